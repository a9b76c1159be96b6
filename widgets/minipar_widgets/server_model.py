"""What a trace with parameter servers says about versions: which version each worker pulled, which update its gradient
went into, and which workers were slow or away. The trace may be predicted or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from minipar.errors import MiniparError
from minipar.program import COMPUTE, Op
from minipar.program.server_rule import Kind, Row
from minipar.trace import Trace, labels

MOST_STEPS = 20_000
SLOW = 1.25  # a slow worker computes longer than this many times the median of all workers
LONG = 0.2  # seconds; a shorter gap between two steps never counts as away
_SERVER = {Op.ACCEPT: "receives", Op.APPLY: "updates", Op.REPLY: "answers"}


class Step(NamedTuple):
    """A step of a worker. Times are the trace's, from its beginning on.

    pull      from the request until the parameters had arrived
    work      (op, start, end) of its computations; neighbours of one kind are joined
    push      from the first PUSH's start to the last one's end
    version   how many updates the pulled parameters contained
    update    the update that its gradient went into; -1: the gradient came too late, and was dropped
    applied   the time of that update
    """

    step: int
    pull: tuple[float, float]
    work: tuple[tuple[str, float, float], ...]
    push: tuple[float, float]
    version: int
    update: int
    applied: float

    @property
    def late(self) -> int:
        """The number of updates between the pulled parameters and the update of the step's own gradient."""
        return max(0, self.update - self.version)

    @property
    def busy(self) -> float:
        return sum(end - start for _, start, end in self.work)


@dataclass(frozen=True)
class Worker:
    """A worker's steps, the times in which it was away, and its computing time as a multiple of the median."""

    rank: int
    steps: tuple[Step, ...]
    away: tuple[tuple[float, float], ...]
    slowness: float

    @property
    def slow(self) -> bool:
        return self.slowness >= SLOW

    @property
    def staleness(self) -> int:
        return max((step.late for step in self.steps), default=0)

    @property
    def dropped(self) -> int:
        return sum(step.update < 0 for step in self.steps)


class Act(NamedTuple):
    """One action of a server: its worker, the step of that worker, and the `version` after the action."""

    what: str
    start: float
    end: float
    peer: int
    step: int
    version: int


@dataclass(frozen=True)
class Served:
    """A run with parameter servers."""

    trace: Trace
    workers: tuple[Worker, ...]
    servers: tuple[tuple[Act, ...], ...]
    updates: tuple[float, ...]  # the time of each, on the first server

    @property
    def mode(self) -> str:
        assert self.trace.program.serving is not None
        return self.trace.program.serving.mode


def served(trace: Trace, order: Sequence[Row] = ()) -> Served:
    """Read a trace. MiniparError if it has no parameter servers, or too many steps to be shown.

    order   of the servers (`run.service.order`): it says exactly which workers came back. Without it, a worker that
            sends no message for a long time counts as away
    """
    if not isinstance(trace, Trace):
        raise MiniparError(
            f"ServerView shows a Trace, not {type(trace).__name__}; possible are simulate(...) and run.trace of a plan "
            "with sync=ps"
        )
    labels.check([trace])
    program = trace.program
    if program.serving is None:
        raise MiniparError("the program has no parameter servers; possible are plans with sync=ps")
    if program.undecided:
        raise MiniparError(
            f"mode={program.serving.mode}: what servers do is known when they have done it; possible is a trace of "
            "simulate(program) or train(...)"
        )
    zero = trace.span[0]
    acts = tuple(_acts(trace, rank, zero) for rank in range(program.workers, len(program.ranks)))
    given = {(act.peer, act.step): act.version for mine in acts for act in mine if act.what == "answers"}
    updates = [act.end for act in acts[0] if act.what == "updates"]
    into = _updates(trace)
    found = [_steps(trace, rank, zero, given, into, updates) for rank in range(program.workers)]
    count = sum(map(len, found))
    if count > MOST_STEPS:
        raise MiniparError(f"{count:,} steps are too many for one picture; possible are {MOST_STEPS:,}")
    middle = [median(step.busy for step in steps) if steps else 0.0 for steps in found]
    usual = median([x for x in middle if x] or [0.0])
    cycles = [b.pull[0] - a.pull[0] for steps in found for a, b in pairwise(steps)]
    gap = max(LONG, 2 * median(cycles)) if cycles and trace.kind == "measured" else float("inf")
    returns = _returns(order)
    workers = [
        Worker(
            rank,
            steps,
            _away(steps, returns.get(rank, []) if order else None, gap),
            middle[rank] / usual if usual else 1.0,
        )
        for rank, steps in enumerate(found)
    ]
    return Served(trace, tuple(workers), acts, tuple(updates))


def _acts(trace: Trace, rank: int, zero: float) -> tuple[Act, ...]:
    version, found = 0, []
    for k, ins in enumerate(trace.program.ranks[rank]):
        version = ins.step + 1 if ins.op is Op.APPLY else version
        start, end = trace.starts[rank][k] - zero, trace.ends[rank][k] - zero
        found.append(Act(_SERVER[ins.op], start, end, ins.peer, ins.step, version))
    return tuple(found)


def _updates(trace: Trace) -> dict[tuple[int, int], int]:
    """The update that each gradient went into, by worker and step."""
    program = trace.program
    found: dict[tuple[int, int], int] = {}
    for row in program.ranks[program.workers :]:
        for ins in (ins for ins in row if ins.op is Op.APPLY):
            found |= {(value.microbatch, value.step): ins.step for value in ins.reads if value.kind == "pushed"}
    return found


def _steps(
    trace: Trace,
    rank: int,
    zero: float,
    given: dict[tuple[int, int], int],
    into: dict[tuple[int, int], int],
    updates: Sequence[float],
) -> tuple[Step, ...]:
    spans: dict[int, dict[str, list[tuple[str, float, float]]]] = {}
    for k, ins in enumerate(trace.program.ranks[rank]):
        kind = "pull" if ins.op is Op.PULL else "push" if ins.op is Op.PUSH else "work"
        if kind == "work" and ins.op not in COMPUTE:
            continue
        row = spans.setdefault(ins.step, {"pull": [], "work": [], "push": []})[kind]
        start, end = trace.starts[rank][k] - zero, trace.ends[rank][k] - zero
        if row and row[-1][0] == ins.op.value:
            row[-1] = row[-1][0], row[-1][1], end
        else:
            row.append((ins.op.value, start, end))
    found = []
    for step, parts in spans.items():
        pull, push = _span(parts["pull"]), _span(parts["push"])
        update = into.get((rank, step), -1)
        applied = updates[update] if update >= 0 else push[1]
        found.append(Step(step, pull, tuple(parts["work"]), push, given.get((rank, step), 0), update, applied))
    return tuple(sorted(found, key=lambda one: one.pull))


def _span(row: Sequence[tuple[str, float, float]]) -> tuple[float, float]:
    return min((start for _, start, _ in row), default=0.0), max((end for _, _, end in row), default=0.0)


def _returns(order: Sequence[Row]) -> dict[int, list[int]]:
    """For every worker the steps with which it began again. (The first JOIN of a worker is its first beginning.)"""
    found: dict[int, list[int]] = {}
    known: set[int] = set()
    for row in order:
        if row.kind is Kind.JOIN and row.worker in known:
            found.setdefault(row.worker, []).append(row.step)
        elif row.kind is Kind.JOIN:
            known.add(row.worker)
    return found


def _away(steps: Sequence[Step], returns: Sequence[int] | None, gap: float) -> tuple[tuple[float, float], ...]:
    """The times in which a worker was away. A worker that runs asks for parameters as soon as it has pushed, so these
    are gaps between a push and the next pull. What a worker computed before it died is in no trace, nor is the time of
    its restart."""
    ends = [0.0, *(step.push[1] for step in steps)]
    between = [(end, step.pull[0], step.step) for end, step in zip(ends, steps, strict=False)]
    if returns is None:
        return tuple((a, b) for a, b, _ in between if b - a > gap)
    firsts = [next(((a, b) for a, b, step in between if step >= first), None) for first in returns]
    return tuple(one for one in dict.fromkeys(firsts) if one is not None)
