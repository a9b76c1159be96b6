"""Follow a run while it goes on: what its ranks report after each pass becomes a `Moment`, at most ten a second.

rank 0  pass 0 ... pass 1 ... pass 2        each rank sends its losses, and now and then its clock readings;
rank 1  pass 0 ... pass 1 ... pass 2        when all have sent those of a pass, there is a trace of it

An asynchronous pipeline is one long pass, whose steps overlap. There the ranks with the end of the model report their
losses in the middle of the pass, and there is no trace before the run is over.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from minipar.program import Program, Synchronous
from minipar.trace import Trace
from minipar.trace.terminal import text

EVERY = 0.1  # seconds between two moments


@dataclass(frozen=True)
class Moment:
    """Where a run is: `step` of `steps` steps are done, with these losses, after so many seconds.

    `warm` says how many steps were done, and after how many seconds, when the ranks had told of a step for the first
    time. Until then they also started, and made what later steps find there: so the time of a step is that of later
    ones.

    `trace` is the last pass through the program whose times all ranks have reported: measured, without memory. Where
    steps overlap (asynchronous pipelines, sync=ps) there is none, and a step is one whose losses are known.
    """

    step: int
    steps: int
    losses: list[float]
    trace: Trace | None
    seconds: float
    warm: tuple[int, float] = (0, 0.0)

    def line(self) -> str:
        """One line: `step 12 of 20, loss 3.2191, 41.2 ms a step`."""
        loss = f", loss {self.losses[-1]:.4f}" if self.losses else ""
        return f"step {self.step} of {self.steps}{loss}{self._pace()}"

    def _pace(self) -> str:
        steps, seconds = self.warm
        if self.step > steps:
            return f", {(self.seconds - seconds) / (self.step - steps) * 1e3:.1f} ms a step"
        first = "first step" if steps == 1 else f"first {steps} steps"
        return f", {seconds:.1f} s for the start and the {first}" if steps else ""


Observer = Callable[[Moment], None]


@dataclass(frozen=True)
class StepInfo:
    """One training step that is done.

    step            its number, from 0 on (a resumed run counts on from the saved step)
    loss            the mean loss of its whole batch, before its update
    learning_rates  of its update, one for each parameter group of the optimizer
    gradient_norm   of all gradients together, before clipping; None where there is no such gradient: replicas that
                    train by themselves (local_steps), asynchronous plans

    For an asynchronous plan a step is here a mini-batch: `Run.losses` has one loss for each.
    """

    step: int
    loss: float
    learning_rates: tuple[float, ...]
    gradient_norm: float | None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group."""
        return self.learning_rates[0] if self.learning_rates else 0.0


Callback = Callable[[StepInfo], object]


class News(NamedTuple):
    """What a rank reports of a pass: its parts of the losses, and when its instructions began and ended. If there is a
    callback: also the learning rates of each update, and its part of the square of the gradient's norm."""

    done: int
    losses: list[float]
    times: tuple[list[float], list[float]] | None
    rates: list[tuple[float, ...]] | None = None
    squares: list[float] | None = None


class Warned(NamedTuple):
    """A warning of a rank; the driver shows one for all ranks."""

    text: str


class Part(NamedTuple):
    """What a rank reports in the middle of a pass: which pass it is, and its parts of the losses that are complete."""

    run: int
    losses: list[float]


# in the ranks ---------------------------------------------------------------------------------------------------------


class Midst:
    """In a rank: reports the losses of a pass while it goes on, at most once in `every` seconds. Called with each."""

    def __init__(self, report: Callable[[Part], None], every: float = EVERY) -> None:
        self._report, self._every, self._run = report, every, -1

    def begin(self, count: int) -> None:
        """A pass of so many losses begins."""
        self._losses, self._last, self._run = [0.0] * count, time.perf_counter(), self._run + 1

    def __call__(self, value: float, k: int) -> None:
        """A part of loss k is known; those before it are complete."""
        self._losses[k] += value
        now = time.perf_counter()
        if now - self._last >= self._every:
            self._last = now
            self._report(Part(self._run, self._losses[:k]))


class Reporter:
    """In a rank: decides what to report. Times of a pass are reported only now and then, if possible by all ranks for
    the same passes; of an asynchronous program losses, in the middle of a pass."""

    def __init__(self, watched: bool, program: Program) -> None:
        self._watched, self._flushes = watched, isinstance(program.contract, Synchronous)
        self._slot = -1

    def midst(self, report: Callable[[Any], None]) -> Midst | None:
        """What reports in the middle of a pass, if that is wanted."""
        return Midst(report) if self._watched and not self._flushes else None

    def news(self, done: int, losses: list[float], starts: list[float], ends: list[float]) -> News:
        if not self._watched or not starts or not self._flushes:
            return News(done, losses, None)
        slot = int(min(starts) / EVERY)  # ranks of one machine share a clock, and begin a pass together
        fresh, self._slot = slot != self._slot, slot
        return News(done, losses, (starts, ends) if fresh else None)


# in the driver --------------------------------------------------------------------------------------------------------


class Paced:
    """Calls `watch` with a moment of the run at most every 0.1 s, and with the last one."""

    def __init__(self, watch: Observer | None, steps: int) -> None:
        self._watch, self._steps = watch, steps
        self._begun = self._shown = time.monotonic()
        self._warm = 0, 0.0

    def wait(self, seconds: float) -> None:
        """Leave out these seconds."""
        self._begun, self._shown = self._begun + seconds, self._shown + seconds

    def __call__(self, step: int, losses: Callable[[], list[float]], trace: Callable[[], Trace | None]) -> None:
        """`step` steps are done. `losses` and `trace` are called only if the moment is shown."""
        now = time.monotonic()
        if step and not self._warm[0]:
            self._warm = step, now - self._begun
        if self._watch is not None and (step == self._steps or now - self._shown >= EVERY):
            self._shown = now
            self._watch(Moment(step, self._steps, losses(), trace(), now - self._begun, self._warm))


class Following:
    """In the driver: gathers what ranks report. It calls `report(k, loss)` after each pass with the loss of its last
    step, `watch` at most every 0.1 s, and `callback` for each step of a pass that is over, in order.

    first   the number of the first step
    stop    called when `callback` has returned False; after that `callback` is not called any more
    """

    def __init__(
        self,
        programs: Sequence[Program],
        report: Callable[[int, float], None] | None,
        watch: Observer | None,
        callback: Callback | None = None,
        first: int = 0,
        stop: Callable[[], None] | None = None,
    ) -> None:
        self._callback, self._next, self._stop = callback, first, stop
        self._warnings = Warnings()
        self._programs, self._report, self._watched = programs, report, watch is not None
        self._heard: dict[int, dict[int, News]] = {}
        self._losses: list[float] = []
        self._trace: Trace | None = None
        self._show = Paced(watch, sum(each.steps for each in programs))
        self._parts: dict[int, Part] = {}  # of an asynchronous pass, by rank
        self._steps = 0  # of the passes that are over

    def __call__(self, rank: int, news: News | Part | Warned) -> None:
        if isinstance(news, Part):
            return self._midst(rank, news)
        if isinstance(news, Warned):
            return self._warnings(rank, news)
        heard = self._heard.setdefault(news.done, {})
        heard[rank] = news
        program = self._programs[news.done]
        if len(heard) < len(program.ranks):
            return None
        del self._heard[news.done]
        of_rank = [heard[r] for r in range(len(heard))]
        losses = [sum(n.losses[s] for n in of_rank) for s in range(len(of_rank[0].losses))]
        if self._report is not None:
            self._report(news.done, losses[-1] if losses else 0.0)
        self._call_back(losses, of_rank)
        if not self._watched:
            return None
        self._losses += losses
        times = [n.times for n in of_rank if n.times is not None]
        if len(times) == len(heard):
            self._trace = passed(program, times)
        self._parts.clear()
        self._steps += program.steps
        self._show(self._steps, self._losses.copy, lambda: self._trace)
        return None

    def waited(self, seconds: float) -> None:
        """The ranks have waited so long, which is no part of the run's time."""
        self._show.wait(seconds)

    def _call_back(self, losses: list[float], of_rank: Sequence[News]) -> None:
        """Call the callback for each step of a pass."""
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
                if self._stop is not None:
                    self._stop()

    def _midst(self, rank: int, part: Part) -> None:
        """Take a rank's report from the middle of a pass. Every replica has one rank with the end of the model."""
        self._parts[rank] = part
        program, parts = self._programs[part.run], self._parts.values()
        if len(parts) == program.replicas:
            losses = [sum(each) for each in zip(*(one.losses for one in parts), strict=False)]
            done = len(losses) * program.steps // program.losses
            self._show(self._steps + done, lambda: self._losses + losses, lambda: self._trace)


class Warnings:
    """In the driver: shows the first warning of any rank, and no later one."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, rank: int, news: Warned) -> None:
        if not self._shown:
            self._shown = True
            warnings.warn(news.text, stacklevel=2)


def passed(program: Program, times: Sequence[tuple[list[float], list[float]]]) -> Trace:
    """The trace of one pass from the clock readings of all ranks; nothing is known of its memory."""
    zero = min(min(starts, default=float("inf")) for starts, _ in times)
    starts, ends = ([[t - zero for t in row] for row in rows] for rows in zip(*times, strict=True))
    return Trace(program, starts, ends, lambda rank, value: 0, "measured")


class Screen:
    """An observer for terminals: it draws progress, loss and the timeline of the last step over the picture before.

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
