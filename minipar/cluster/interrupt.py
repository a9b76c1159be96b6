"""Interrupts, such as by the stop button of a notebook, while the driver listens to its ranks."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Inside of `with interrupts:` an interrupt raises KeyboardInterrupt as usual. Inside of `with interrupts.held():`
    it does so only at the end: else half a message of a rank would be lost, and the next message with it. In threads
    other than the main one this does nothing, since they are not interrupted."""

    def __init__(self) -> None:
        self._before: Any = None
        self._holding = False
        self._missed = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._pressed)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            before, self._before = self._before, None
            signal.signal(signal.SIGINT, before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._missed = True
        elif self._before is not None:
            self._before(number, frame)

    def held(self) -> _Held:
        """While entered, an interrupt waits."""
        return _Held(self)


class _Held:
    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __enter__(self) -> None:
        self._interrupts._holding = True

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        interrupts = self._interrupts
        interrupts._holding = False
        if interrupts._missed:
            interrupts._missed = False
            interrupts._pressed(signal.SIGINT, None)
