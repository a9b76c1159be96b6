"""A run as it goes on: what its ranks tell after each pass becomes one `Moment`, at most ten of them a second.

rank 0  pass 0 ... pass 1 ... pass 2        each rank sends its losses, and now and then its clock readings;
rank 1  pass 0 ... pass 1 ... pass 2        when all have sent those of a pass, there is a trace of it
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from minipar.program import Program
from minipar.terminal import text
from minipar.trace import Trace

EVERY = 0.1  # seconds between two moments


@dataclass(frozen=True)
class Moment:
    """Where a run is: `step` of `steps` steps are done, with these losses, after so many seconds.

    `trace` is the last pass through the program of which all ranks told the times: measured, without memory.
    """

    step: int
    steps: int
    losses: list[float]
    trace: Trace | None
    seconds: float

    def line(self) -> str:
        """One line: `step 12 of 20, loss 3.2191, 41.2 ms a step`."""
        loss = f", loss {self.losses[-1]:.4f}" if self.losses else ""
        pace = f", {self.seconds / self.step * 1e3:.1f} ms a step" if self.step else ""
        return f"step {self.step} of {self.steps}{loss}{pace}"


Watch = Callable[[Moment], None]


class News(NamedTuple):
    """What a rank tells of a pass: its parts of the losses, and when its instructions began and ended."""

    done: int
    losses: list[float]
    times: tuple[list[float], list[float]] | None


class Telling:
    """In a rank: what to tell. The times of a pass only now and then, at the same passes on all ranks if they can."""

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self._slot = -1

    def news(self, done: int, losses: list[float], starts: list[float], ends: list[float]) -> News:
        if not self.watched or not starts:
            return News(done, losses, None)
        slot = int(min(starts) / EVERY)  # ranks of one machine share a clock, and begin a pass together
        fresh, self._slot = slot != self._slot, slot
        return News(done, losses, (starts, ends) if fresh else None)


class Following:
    """In the driver: gathers what ranks tell; calls `report(k)` after each pass, and `watch` at most every 0.1 s."""

    def __init__(self, programs: Sequence[Program], report: Callable[[int], None], watch: Watch | None) -> None:
        self._programs, self._report, self._watch = programs, report, watch
        self._heard: dict[int, dict[int, News]] = {}
        self._losses: list[float] = []
        self._trace: Trace | None = None
        self._begun = self._shown = time.monotonic()

    def __call__(self, rank: int, news: News) -> None:
        heard = self._heard.setdefault(news.done, {})
        heard[rank] = news
        program = self._programs[news.done]
        if len(heard) < len(program.ranks):
            return
        del self._heard[news.done]
        self._report(news.done)
        if self._watch is None:
            return
        of_rank = [heard[r] for r in range(len(heard))]
        self._losses += [sum(n.losses[s] for n in of_rank) for s in range(len(of_rank[0].losses))]
        times = [n.times for n in of_rank if n.times is not None]
        if len(times) == len(heard) and program.in_flight is None:  # (where ranks decide, the order is not told)
            self._trace = passed(program, times)
        now, last = time.monotonic(), news.done == len(self._programs) - 1
        if last or now - self._shown >= EVERY:
            self._shown = now
            step = sum(each.steps for each in self._programs[: news.done + 1])
            steps = sum(each.steps for each in self._programs)
            self._watch(Moment(step, steps, list(self._losses), self._trace, now - self._begun))


def passed(program: Program, times: Sequence[tuple[list[float], list[float]]]) -> Trace:
    """The trace of one pass from the clock readings of all ranks; nothing is known of its memory."""
    zero = min(min(starts, default=float("inf")) for starts, _ in times)
    starts, ends = ([[t - zero for t in row] for row in rows] for rows in zip(*times, strict=True))
    return Trace(program, starts, ends, lambda rank, value: 0, "measured")


class Screen:
    """A watcher for terminals: progress, loss and the timeline of the last step, drawn over each other.

    Where there is no terminal, only the last picture is written.
    """

    def __init__(self, file: TextIO | None = None, width: int = 100) -> None:
        self._file: Any = file or sys.stderr
        self._width, self._lines = width, 0

    def __call__(self, moment: Moment) -> None:
        last = moment.step == moment.steps
        if not last and not self._file.isatty():
            return
        part = moment.step / moment.steps if moment.steps else 1.0
        bar = "#" * round(30 * part)
        lines = [f"[{bar:<30}] {moment.line()}"]
        if moment.trace is not None:
            lines += text(moment.trace, self._width).splitlines()
        up = f"\x1b[{self._lines}A\x1b[J" if self._lines else ""
        self._file.write(up + "\n".join(lines) + "\n")
        self._file.flush()
        self._lines = len(lines)
