"""Threads that begin, or an error that says why not.

Under a limit of memory Python's own `Thread.start` may wait for ever: for a thread that ended before its first line,
since there was no memory for it. `ThreadPoolExecutor` and `Timer` start their threads in the same way.
"""

from __future__ import annotations

import _thread
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from minipar.errors import RankError

T = TypeVar("T")

_NAP = 5e-4  # seconds before a helper begins: a thread that waits at once does the work itself, and faster
_LONGEST = 10.0  # seconds that a thread may take until its first line


def start(run: Callable[[], None], what: str) -> threading.Event:
    """Run a function in a thread of its own, "the thread that `what`", which does not keep the process alive. The event
    is set at its end. RankError if it does not begin."""
    begun, ended = threading.Event(), threading.Event()
    given_up: list[bool] = []

    def whole() -> None:
        begun.set()
        try:
            if not given_up:
                run()
        finally:
            ended.set()

    reason = "it ended before its first line"
    try:
        _thread.start_new_thread(whole, ())
        if begun.wait(_LONGEST):
            return ended
        given_up.append(True)
    except (RuntimeError, MemoryError) as error:
        reason = str(error) or "out of memory"
    raise RankError(
        f"the thread that {what} cannot start: {reason}; the limit of memory or threads of this process is reached"
    )


class InTurn:
    """A thread that runs one function after another. It starts when first needed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._left: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._more = threading.Condition()
        self._ended: threading.Event | None = None
        self._closed = False

    def submit(self, run: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run this after all others; its result. RankError if the thread does not begin, or was ended."""
        if self._closed:
            raise RankError(f"the thread that {self._what} has ended")
        if self._ended is None:
            self._ended = start(self._run, self._what)
        found: Future[Any] = Future()
        with self._more:
            self._left.append((found, partial(run, *args)))
            self._more.notify()
        return found

    def _run(self) -> None:
        while True:
            with self._more:
                while not self._left and not self._closed:
                    self._more.wait()
                if not self._left:
                    return
                found, run = self._left.popleft()
            try:
                found.set_result(run())
            except BaseException as error:
                found.set_exception(error)
            del found, run

    def shutdown(self, patient: bool = True) -> None:
        """End the thread, when it has run all that it was given. `patient`: wait for that."""
        with self._more:
            self._closed = True
            self._more.notify()
        if self._ended is not None and patient:
            self._ended.wait()


@dataclass(eq=False)
class Helper(ABC, Generic[T]):
    """A thread that goes on with what was begun while a rank's main thread computes. It starts when first needed.
    Subclasses define `turn`: it works for all in `waiting`, and removes, under `lock`, those that are finished."""

    name: str
    waiting: set[T] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _started: bool = False
    _closed: bool = False

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
            start(self._run, self.name)
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
            time.sleep(_NAP)
            while self.waiting and not self._closed:
                self.turn()
