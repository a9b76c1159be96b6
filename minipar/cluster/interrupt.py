"""Interrupts, such as by the stop button of a notebook, while the driver listens to its ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Inside of `with interrupts:` an interrupt raises KeyboardInterrupt as usual. Inside of `with interrupts.held():`
    it does so only at the end: else half a message of a rank would be lost, and the next message with it. A second one
    does not wait. In threads other than the main one this does nothing, since they are not interrupted. Both may be
    entered again inside."""

    def __init__(self) -> None:
        self._before: Any = None
        self._entered = self._holding = 0
        self._missed = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._entered += 1
        before = signal.getsignal(signal.SIGINT)
        if self._entered == 1 and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._pressed)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._entered -= 1
        if not self._entered and self._before is not None:
            before, self._before = self._before, None
            signal.signal(signal.SIGINT, before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self._holding and not self._missed:
            self._missed = True
        elif self._before is not None:
            self._before(number, frame)

    def held(self) -> _Held:
        """While entered, an interrupt waits, if these interrupts are entered, too."""
        return _Held(self)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """While entered, an interrupt waits."""
        with self, self.held():
            yield


class _Held:
    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __enter__(self) -> None:
        self._interrupts._holding += 1

    def __exit__(self, *_: object) -> None:
        interrupts = self._interrupts
        interrupts._holding -= 1
        if not interrupts._holding and interrupts._missed:
            interrupts._missed = False
            interrupts._pressed(signal.SIGINT, None)
