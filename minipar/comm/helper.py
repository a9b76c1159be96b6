"""A thread that goes on with what was begun while a rank's main thread computes. It starts when first needed."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from minipar.cluster import threads

T = TypeVar("T")


class Helper(ABC, Generic[T]):
    """Subclasses define `turn`: it works for all in `waiting`, and removes, under `lock`, those that are finished."""

    NAP = 5e-4  # seconds before the helper begins: a thread that waits at once does the work itself, and faster

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: set[T] = set()
        self.lock = threading.Lock()
        self._wake = threading.Event()
        self._started = self._closed = False

    @abstractmethod
    def turn(self) -> None:
        """Go on for a while with all in `waiting`; sleep a little if there is nothing to do yet."""

    def watch(self, one: T) -> None:
        """Put this one in `waiting`, and start the thread or wake it."""
        with self.lock:
            if one in self.waiting:
                return
            self.waiting.add(one)
        if not self._started:
            threads.start(self._run, self.name)
            self._started = True
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            time.sleep(self.NAP)
            while self.waiting and not self._closed:
                self.turn()
