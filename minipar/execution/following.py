"""A run as it goes on: what its ranks tell after each pass becomes one `Moment`, at most ten of them a second.

rank 0  pass 0 ... pass 1 ... pass 2        each rank sends its losses, and now and then its clock readings;
rank 1  pass 0 ... pass 1 ... pass 2        when all have sent those of a pass, there is a trace of it

An asynchronous pipeline is one long pass: there the ranks tell in the midst of it (`under_way`).
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from minipar.program import Program, Staleness
from minipar.trace import Trace
from minipar.trace.terminal import text
from minipar.trace.under_way import Stretch, UnderWay, Walked

EVERY = 0.1  # seconds between two moments


@dataclass(frozen=True)
class Moment:
    """Where a run is: `step` of `steps` steps are done, with these losses, after so many seconds.

    `trace` is the last pass through the program of which all ranks told the times: measured, without memory. Where
    steps overlap (asynchronous pipelines, sync=ps) it is the time of one step, and its `note` says so.
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


@dataclass(frozen=True)
class StepInfo:
    """One training step that is done.

    step            its number, from 0 on (of a run that was resumed from where it goes on)
    loss            the mean loss of its whole batch, before its update
    learning_rates  of its update, one for each parameter group of the optimizer
    gradient_norm   of all gradients together, before clipping; None where there is no such gradient: replicas that
                    train by themselves (local_steps), asynchronous plans

    Of an asynchronous plan a step is here a mini-batch: what `Run.losses` has a loss of.
    """

    step: int
    loss: float
    learning_rates: tuple[float, ...]
    gradient_norm: float | None

    @property
    def learning_rate(self) -> float:
        """That of the first parameter group."""
        return self.learning_rates[0] if self.learning_rates else 0.0


Callback = Callable[[StepInfo], object]


class News(NamedTuple):
    """What a rank tells of a pass: its parts of the losses, and when its instructions began and ended. Where somebody
    wants to know: learning rates of each update, and its part of the square of the gradient's norm."""

    done: int
    losses: list[float]
    times: tuple[list[float], list[float]] | None
    rates: list[tuple[float, ...]] | None = None
    squares: list[float] | None = None


class Warned(NamedTuple):
    """What a rank warns of, once for all ranks."""

    text: str


class Telling:
    """In a rank: what to tell. The times of a pass only now and then, at the same passes on all ranks if they can.

    walked    of an asynchronous program, what tells in the midst of a pass; it sends through `report`
    """

    def __init__(self, watched: bool, program: Program | None = None, report: Callable[[Any], None] = print) -> None:
        self.watched = watched
        own = watched and program is not None and isinstance(program.contract, Staleness)
        self.walked = Walked(report, EVERY) if own else None
        self._slot = -1

    def news(self, done: int, losses: list[float], starts: list[float], ends: list[float]) -> News:
        if not self.watched or not starts or self.walked is not None:
            return News(done, losses, None)
        slot = int(min(starts) / EVERY)  # ranks of one machine share a clock, and begin a pass together
        fresh, self._slot = slot != self._slot, slot
        return News(done, losses, (starts, ends) if fresh else None)


class Paced:
    """Calls `watch` with a moment of the run at most every 0.1 s, and with the last one."""

    def __init__(self, watch: Watch | None, steps: int) -> None:
        self._watch, self._steps = watch, steps
        self._begun = self._shown = time.monotonic()

    def __call__(self, step: int, losses: Callable[[], list[float]], trace: Callable[[], Trace | None]) -> None:
        """`step` steps are done; losses and trace are asked for if they are shown."""
        now = time.monotonic()
        if self._watch is not None and (step == self._steps or now - self._shown >= EVERY):
            self._shown = now
            self._watch(Moment(step, self._steps, losses(), trace(), now - self._begun))


class Following:
    """In the driver: gathers what ranks tell; calls `report(k, loss)` after each pass with the loss of its last step,
    `watch` at most every 0.1 s, and `callback` for each step of a pass that is over, in order.

    first   the number of the first step
    stop    called when `callback` has returned False; then it is called no more
    """

    def __init__(
        self,
        programs: Sequence[Program],
        report: Callable[[int, float], None],
        watch: Watch | None,
        callback: Callback | None = None,
        first: int = 0,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._callback, self._next, self._stop = callback, first, stop
        self._warned: set[str] = set()
        self._programs, self._report, self._watched = programs, report, watch is not None
        self._heard: dict[int, dict[int, News]] = {}
        self._losses: list[float] = []
        self._trace: Trace | None = None
        self._tell = Paced(watch, sum(each.steps for each in programs))
        self._under_way: dict[int, UnderWay] = {}  # of asynchronous passes
        self._steps = 0  # of the passes that are over

    def __call__(self, rank: int, news: News | Stretch | Warned) -> None:
        if isinstance(news, Stretch):
            return self._midst(rank, news)
        if isinstance(news, Warned):
            return warn_once(news, self._warned)
        heard = self._heard.setdefault(news.done, {})
        heard[rank] = news
        program = self._programs[news.done]
        if len(heard) < len(program.ranks):
            return None
        del self._heard[news.done]
        of_rank = [heard[r] for r in range(len(heard))]
        losses = [sum(n.losses[s] for n in of_rank) for s in range(len(of_rank[0].losses))]
        self._report(news.done, losses[-1] if losses else 0.0)
        self._call_back(losses, of_rank)
        if not self._watched:
            return None
        self._losses += losses
        times = [n.times for n in of_rank if n.times is not None]
        if news.done in self._under_way:
            self._trace = self._under_way.pop(news.done).trace
        elif len(times) == len(heard):
            self._trace = passed(program, times)
        self._steps += program.steps
        self._tell(self._steps, self._losses.copy, lambda: self._trace)
        return None

    def _call_back(self, losses: list[float], of_rank: Sequence[News]) -> None:
        """Tell the callback of each step of a pass."""
        rates = next((n.rates for n in of_rank if n.rates is not None), None) or [()]
        squares = [n.squares for n in of_rank if n.squares is not None]
        for k, loss in enumerate(losses):
            step, self._next = self._next, self._next + 1
            if self._callback is None:
                continue
            norm = math.sqrt(sum(part[k] for part in squares)) if len(squares) == len(of_rank) else None
            info = StepInfo(step, loss, rates[min(k * len(rates) // len(losses), len(rates) - 1)], norm)
            if self._callback(info) is False:
                self._callback = None
                self._stop()

    def _midst(self, rank: int, part: Stretch) -> None:
        """A rank tells in the midst of a pass."""
        if part.run not in self._under_way:
            self._under_way[part.run] = UnderWay(self._programs[part.run])
        now = self._under_way[part.run]
        now.heard(rank, part)
        if now.done < now.program.steps:  # (or the end of the pass is told next)
            self._tell(self._steps + now.done, lambda: self._losses + now.losses, lambda: now.trace or self._trace)


def warn_once(news: Warned, known: set[str]) -> None:
    """In the driver: warn of the first thing that a rank warns of, and of no more of its kind."""
    if not known:
        warnings.warn(news.text, stacklevel=2)
    known.add(news.text)


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
