"""How to wait for what usually comes soon: look again and again for a short while, and only then sleep.

    wait   look look look there it is              a core that sleeps takes some 20 us to wake, with cold caches
    wait   look look ... look | sleep ...          nothing came in 100 us: it is not worth it now
    wait   sleep ...                               then 1, 3, 7 ... 63 waits sleep at once, until a look finds something

Both ends of a parameter server's connections wait like this. Looking takes a core that another rank may want; so it is
short, and rare where it finds nothing: where what is waited for takes long, or needs that core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

SHORT = 1e-4  # seconds of looking
_RARELY = 6  # at most every 2 ** 6 waits where nothing is found

_T = TypeVar("_T")


class Looking:
    """Whether looking has been worth it lately, for one kind of wait."""

    def __init__(self) -> None:
        self.alone = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) < 2
        self.misses = self.asleep = 0  # looks in a row that found nothing; waits that are to sleep at once

    def find(self, look: Callable[[], _T]) -> _T | None:
        """What `look` gives, as soon as it raises no BlockingIOError any more; None: it is time to sleep instead."""
        with suppress(BlockingIOError):
            return look()  # what was there already says nothing about waiting
        if self.alone or self.asleep:
            self.asleep -= self.asleep > 0
            return None
        until = time.perf_counter() + SHORT
        while time.perf_counter() < until:
            try:
                found = look()
            except BlockingIOError:
                continue
            self.misses = 0
            return found
        self.misses = min(self.misses + 1, _RARELY)
        self.asleep = 2**self.misses - 1
        return None
