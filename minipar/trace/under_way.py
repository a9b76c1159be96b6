"""The picture of a pass while it goes on, for asynchronous pipelines, whose run is one long pass: steps overlap.

rank 0   ..F3 B1 F4 B2 F5|B3 ..      each rank tells now and then what it has walked since it last told;
rank 1   ..F2 B2 F3 B3 F4|B4 ..      of the last step that all ranks have done, and all have told the whole time
         step 1 |<-- 3 -->|          of, there is a trace: of that time, with what runs of its neighbours
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, SupportsFloat

from minipar.program import Instruction, Op, Program, message
from minipar.trace import Trace

_MESSAGES = (Op.SEND, Op.RECV)
Span = tuple[Instruction, float, float]  # an instruction and when it ran


class Stretch(NamedTuple):
    """What a rank tells in the midst of a pass.

    run      which pass it is
    until    up to when this is all that it has walked
    walked   (place in the order in which it walks, index of the instruction, start, end)
    losses   of mini-batches, those that have changed
    """

    run: int
    until: float
    walked: list[tuple[int, int, float, float]]
    losses: dict[int, float]


class Walked:
    """In a rank: tells what it has walked, at most once in `every` seconds. Called after an instruction."""

    def __init__(self, report: Callable[[Stretch], None], every: float) -> None:
        self._report, self._every, self._run = report, every, -1

    def begin(self, starts: Sequence[float], ends: Sequence[float], losses: Sequence[SupportsFloat]) -> None:
        """A pass begins, which writes its times and losses to these lists."""
        self._starts, self._ends, self._losses = starts, ends, losses
        self._told, self._held = 0, list[int]()  # places walked and told; of those the ones that had not ended
        self._known: list[SupportsFloat] = [0.0] * len(losses)
        self._last = time.perf_counter()
        self._run += 1

    def __call__(self, order: Sequence[int], waiting: Iterable[int] = (), last: bool = False) -> None:
        """The instructions `order` have been walked; those in `waiting` have no end yet. `last`: the pass is over."""
        now = time.perf_counter()
        if not last and now - self._last < self._every:
            return
        self._last = now
        places = [*self._held, *range(self._told, len(order))]
        open_ = set(waiting)
        self._told, self._held = len(order), [k for k in places if order[k] in open_]
        ended = [(k, order[k]) for k in places if order[k] not in open_]
        walked = [(k, index, self._starts[index], self._ends[index]) for k, index in ended]
        losses = {k: float(loss) for k, loss in enumerate(self._losses) if loss is not self._known[k]}
        self._known = list(self._losses)
        self._report(Stretch(self._run, float("inf") if last else now, walked, losses))


class UnderWay:
    """In the driver: what all ranks have told of one pass of an asynchronous program.

    done    steps that all ranks have done, from the first one on
    losses  of the mini-batches in them
    trace   of the time of the last of them; None before there is one
    """

    def __init__(self, program: Program) -> None:
        self.program, self.done = program, 0
        self._walked: list[dict[int, Span]] = [{} for _ in program.ranks]
        self._until = [float("-inf")] * len(program.ranks)
        self._losses: list[dict[int, float]] = [{} for _ in program.ranks]  # each rank's part
        self._left = [Counter(ins.step for ins in row if ins.microbatch >= 0) for row in program.ranks]
        self._spans: dict[int, tuple[float, float]] = {}  # of steps: first start and last end
        self._shown = 0  # steps that are over for good, since all ranks have told the time of the last of them

    def heard(self, rank: int, part: Stretch) -> None:
        self._until[rank] = part.until
        self._losses[rank] |= part.losses
        for place, index, start, end in part.walked:
            ins = self.program.ranks[rank][index]
            self._walked[rank][place] = ins, start, end
            if ins.microbatch >= 0:
                self._left[rank][ins.step] -= 1
                if ins.stream == "compute":
                    first, last = self._spans.get(ins.step, (start, end))
                    self._spans[ins.step] = min(first, start), max(last, end)
        while self.done < self.program.steps and not any(left[self.done] for left in self._left):
            self.done += 1
        told, before = min(self._until), self._shown
        while self._shown < self.done and self._spans[self._shown][1] <= told:
            self._shown += 1
        if self._shown > before:  # what ended before it is not needed any more: a run may be long
            first = self._spans[self._shown - 1][0]
            self._walked = [{k: one for k, one in row.items() if one[2] > first} for row in self._walked]

    @property
    def losses(self) -> list[float]:
        count = self.done * (self.program.losses // self.program.steps)
        return [sum(found.get(k, 0.0) for found in self._losses) for k in range(count)]

    @property
    def trace(self) -> Trace | None:
        if not self._shown:
            return None
        step = self._shown - 1
        rows = [[row[k] for k in sorted(row)] for row in self._walked]
        others = "; steps overlap, so parts of others ran in it" if self.program.steps > 1 else ""
        return window(self.program, rows, *self._spans[step], f"the time of step {step + 1}{others}")


def window(program: Program, rows: Sequence[Sequence[Span]], first: float, last: float, note: str) -> Trace:
    """A trace of what ran between two times, and of the messages that were sent and arrived; memory is not known."""
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
    """The same for a SEND and its RECV."""
    ends = (rank, ins.peer) if ins.op is Op.SEND else (ins.peer, rank)
    return (*ends, message(ins))
