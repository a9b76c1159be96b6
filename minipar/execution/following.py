"""Follow a run while it goes on: what its ranks report after each pass becomes a `Moment`, at most ten a second.

rank 0  pass 0 ... pass 1 ... pass 2        each rank sends its losses, and now and then its clock readings;
rank 1  pass 0 ... pass 1 ... pass 2        when all have sent those of a pass, there is a trace of it

An asynchronous pipeline is one long pass, whose steps overlap. There the ranks report in the middle of the pass:

rank 0   ..F3 B1 F4 B2 F5|B3 ..      each rank reports now and then what it has walked since its last report;
rank 1   ..F2 B2 F3 B3 F4|B4 ..      the trace shows the time of the last step that all ranks have done and fully
         step 1 |<-- 3 -->|          reported, together with the parts of other steps that ran in that time
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from minipar.program import Instruction, Op, Program, Staleness, message
from minipar.trace import Trace
from minipar.trace.terminal import text

if TYPE_CHECKING:  # (the driver follows a run without torch)
    from torch import Tensor

    from minipar.execution.streams import Mark, Reading, Streams

EVERY = 0.1  # seconds between two moments
_MESSAGES = (Op.SEND, Op.RECV)
Span = tuple[Instruction, float, float]  # an instruction and when it ran


@dataclass(frozen=True)
class Moment:
    """Where a run is: `step` of `steps` steps are done, with these losses, after so many seconds.

    `warm` says how many steps were done, and after how many seconds, when the ranks had told of a step for the first
    time. Until then they also started, and made what later steps find there: so the time of a step is that of later
    ones.

    `trace` is the last pass through the program whose times all ranks have reported: measured, without memory. Where
    steps overlap (asynchronous pipelines, sync=ps) it is the time of one step, and its `note` says so.
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


class Stretch(NamedTuple):
    """What a rank reports in the middle of a pass.

    run      which pass it is
    until    the time up to which the reports are complete
    walked   (place in the order in which it walks, index of the instruction, start, end)
    losses   of the mini-batches whose loss has changed
    """

    run: int
    until: float
    walked: list[tuple[int, int, float, float]]
    losses: dict[int, float]


# in the ranks ---------------------------------------------------------------------------------------------------------


class Walked:
    """In a rank: reports what it has walked, at most once in `every` seconds. Called after an instruction."""

    def __init__(self, report: Callable[[Stretch], None], every: float) -> None:
        self._report, self._every, self._run = report, every, -1

    def begin(
        self, starts: Sequence[Mark], ends: Sequence[Mark], losses: Sequence[Tensor | float], streams: Streams
    ) -> None:
        """A pass begins, which writes its times and losses to these lists."""
        self._starts, self._ends, self._losses, self._streams = starts, ends, losses, streams
        self._ready: list[tuple[Stretch, dict[int, Reading]]] = []  # reports whose losses are not known yet
        self._seen, self._held = 0, list[int]()  # number of places seen; those of them that had not ended
        self._known: list[Tensor | float] = [0.0] * len(losses)
        self._last = time.perf_counter()
        self._run += 1

    def __call__(self, order: Sequence[int], waiting: Iterable[int] = (), last: bool = False) -> None:
        """The instructions `order` have been walked; those in `waiting` have no end yet. `last`: the pass is over."""
        now = time.perf_counter()
        if not last and now - self._last < self._every:
            return
        self._last = now
        places = [*self._held, *range(self._seen, len(order))]
        streams, open_ = self._streams, set(waiting)
        open_.update(order[k] for k in places if not (order[k] in open_ or streams.happened(self._ends[order[k]])))
        self._seen, self._held = len(order), [k for k in places if order[k] in open_]
        ended = [(k, order[k]) for k in places if order[k] not in open_]
        starts, ends = (streams.times([of[index] for _, index in ended]) for of in (self._starts, self._ends))
        walked = [(k, index, start, end) for (k, index), start, end in zip(ended, starts, ends, strict=True)]
        losses = {k: streams.reading(loss) for k, loss in enumerate(self._losses) if loss is not self._known[k]}
        self._known = list(self._losses)
        self._ready.append((Stretch(self._run, float("inf") if last else now, walked, {}), losses))
        while self._ready and (last or all(number.known() for number in self._ready[0][1].values())):
            stretch, found = self._ready.pop(0)
            self._report(stretch._replace(losses={k: number.value() for k, number in found.items()}))


class Reporter:
    """In a rank: decides what to report. Times of a pass are reported only now and then, if possible by all ranks for
    the same passes; of an asynchronous program in the middle of a pass."""

    def __init__(self, watched: bool, program: Program) -> None:
        self._watched, self._in_the_midst = watched, watched and isinstance(program.contract, Staleness)
        self._slot = -1

    def walked(self, report: Callable[[Any], None]) -> Walked | None:
        """What reports in the middle of a pass, if that is wanted."""
        return Walked(report, EVERY) if self._in_the_midst else None

    def news(self, done: int, losses: list[float], starts: list[float], ends: list[float]) -> News:
        if not self._watched or not starts or self._in_the_midst:
            return News(done, losses, None)
        slot = int(min(starts) / EVERY)  # ranks of one machine share a clock, and begin a pass together
        fresh, self._slot = slot != self._slot, slot
        return News(done, losses, (starts, ends) if fresh else None)


# in the driver --------------------------------------------------------------------------------------------------------


class UnderWay:
    """In the driver: what all ranks have reported of one pass of an asynchronous program.

    done    steps that all ranks have done, from the first one on
    losses  of the mini-batches in them
    trace   of the time of the last of them; None before there is one
    """

    def __init__(self, program: Program) -> None:
        self.program, self.done = program, 0
        self._walked: list[dict[int, Span]] = [{} for _ in program.ranks]  # by the place in its order
        self._until = [float("-inf")] * len(program.ranks)
        self._losses: list[dict[int, float]] = [{} for _ in program.ranks]  # each rank's part
        self._left = [Counter(ins.step for ins in row if ins.microbatch >= 0) for row in program.ranks]

    def heard(self, rank: int, part: Stretch) -> None:
        row = self.program.ranks[rank]
        self._until[rank] = part.until
        self._losses[rank] |= part.losses
        self._walked[rank] |= {place: (row[index], start, end) for place, index, start, end in part.walked}
        self._left[rank].subtract(row[index].step for _, index, _, _ in part.walked if row[index].microbatch >= 0)
        while self.done < self.program.steps and not any(left[self.done] for left in self._left):
            self.done += 1

    @property
    def losses(self) -> list[float]:
        count = self.done * (self.program.losses // self.program.steps)
        return [sum(found.get(k, 0.0) for found in self._losses) for k in range(count)]

    @property
    def trace(self) -> Trace | None:
        spans: dict[int, tuple[float, float]] = {}  # of the steps that are done: first start and last end
        for ins, start, end in (span for row in self._walked for span in row.values()):
            if ins.stream == "compute" and ins.microbatch >= 0 and ins.step < self.done:
                first, last = spans.get(ins.step, (start, end))
                spans[ins.step] = min(first, start), max(last, end)
        reported = [step for step, (_, last) in spans.items() if last <= min(self._until)]
        if not reported:
            return None
        step = max(reported)
        rows = [[row[k] for k in sorted(row)] for row in self._walked]
        others = "; steps overlap, so parts of others ran in it" if self.program.steps > 1 else ""
        return window(self.program, rows, *spans[step], f"the time of step {step + 1}{others}")


def window(program: Program, rows: Sequence[Sequence[Span]], first: float, last: float, note: str) -> Trace:
    """A trace of what ran between two times, with the messages whose both ends ran then; memory is not known."""
    seen = [[one for one in row if one[2] > first and one[1] < last] for row in rows]
    ends_of = Counter(_key(rank, ins) for rank, row in enumerate(seen) for ins, _, _ in row if ins.op in _MESSAGES)
    kept = [
        [one for one in row if one[0].op not in _MESSAGES or ends_of[_key(rank, one[0])] == 2]
        for rank, row in enumerate(seen)
    ]
    cut = replace(
        program, ranks=tuple(tuple(ins for ins, _, _ in row) for row in kept), state=(), in_flight=None, serving=None
    )
    starts, ends = ([[one[k] - first for one in row] for row in kept] for k in (1, 2))  # type: ignore[operator]
    return Trace(cut, starts, ends, lambda rank, value: 0, "measured", note=note)


def _key(rank: int, ins: Instruction) -> tuple[object, ...]:
    """A key that a SEND and its RECV share."""
    ends = (rank, ins.peer) if ins.op is Op.SEND else (ins.peer, rank)
    return (*ends, message(ins))


class Paced:
    """Calls `watch` with a moment of the run at most every 0.1 s, and with the last one."""

    def __init__(self, watch: Observer | None, steps: int) -> None:
        self._watch, self._steps = watch, steps
        self._begun = self._shown = time.monotonic()
        self._warm = 0, 0.0

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
        self._under_way: dict[int, UnderWay] = {}  # of asynchronous passes
        self._steps = 0  # of the passes that are over

    def __call__(self, rank: int, news: News | Stretch | Warned) -> None:
        if isinstance(news, Stretch):
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
        if news.done in self._under_way:
            self._trace = self._under_way.pop(news.done).trace
        elif len(times) == len(heard):
            self._trace = passed(program, times)
        self._steps += program.steps
        self._show(self._steps, self._losses.copy, lambda: self._trace)
        return None

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

    def _midst(self, rank: int, part: Stretch) -> None:
        """Take a rank's report from the middle of a pass."""
        if part.run not in self._under_way:
            self._under_way[part.run] = UnderWay(self._programs[part.run])
        now = self._under_way[part.run]
        now.heard(rank, part)
        if now.done < now.program.steps:  # (else the report of the whole pass comes next)
            self._show(self._steps + now.done, lambda: self._losses + now.losses, lambda: now.trace or self._trace)


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
