"""A thread that goes on with what was begun, while a rank's main thread computes; there when needed, one for all."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

T = TypeVar("T")


class Helper(ABC, Generic[T]):
    """Subclasses say in `turn` what is done for those in `waiting`, and take out, under `lock`, who needs no more."""

    NAP = 5e-4  # whoever waits for something at once does it itself, and would only lose time to a helper

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: set[T] = set()
        self.lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @abstractmethod
    def turn(self) -> None:
        """Go on with everybody for a while; sleep a little if there is nothing to do yet."""

    def watch(self, one: T) -> None:
        """Look after this one until it is dropped."""
        with self.lock:
            if one in self.waiting:
                return
            self.waiting.add(one)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Do nothing more."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            time.sleep(self.NAP)
            while self.waiting and not self._closed:
                self.turn()
