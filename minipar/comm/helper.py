"""A thread that goes on with what was begun while a rank's main thread computes. It starts when first needed."""

from __future__ import annotations

import _thread
import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from minipar.errors import RankError

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
            try:
                # Not threading's own start: it waits for ever if there is no memory for the first lines of the thread.
                _thread.start_new_thread(self._run, ())
            except (RuntimeError, MemoryError) as error:
                raise RankError(
                    f"the thread that {self.name} cannot start: {error or 'out of memory'}; "
                    "the limit of memory or threads of this process is reached"
                ) from error
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
