"""Lesson 07: bytes at a server; who may pull; which gradients an update takes; servers for a straggler."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minipar.costs.unit import UnitCosts
from minipar.errors import MiniparError
from minipar.prediction.simulator import simulate
from minipar.program import Instruction, Op, Program, Value
from minipar.program.server_rule import Consistency, Kind, Mode
from minipar.program.shape import uniform
from minipar.strategies.plan import Plan
from minipar.strategies.shares import shares_of
from minipar.trace import Trace
from minipar.wording import several
from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.verdict import Verdict, raised

# 1. bytes at a server -------------------------------------------------------------------------------------------------


def _server_bytes(workers: int, nbytes: int, servers: int) -> float:
    """All bytes that the first server receives and sends in one step."""
    plan = Plan(dp=int(workers), sync="ps", servers=int(servers))
    program = plan.compile(uniform(1, int(nbytes)))
    row = program.ranks[int(workers)]
    return float(sum(part.bytes for ins in row if ins.op in (Op.ACCEPT, Op.REPLY) for part in ins.parts))


SERVER_BYTES = Formula(
    ("workers", "nbytes", "servers"),
    _server_bytes,
    ((4, 9600, 1), (1, 9600, 1), (4, 9600, 2), (7, 2400, 3), (16, 9600, 4)),
    (
        (lambda w, n, s: w * n / s, "that is one way; gradients come in, and parameters go out again"),
        (lambda w, n, s: 2 * n / s, "every worker sends its own gradient, and gets the parameters"),
        (lambda w, n, s: 2 * w * n, "several servers share out the parameters: each has a part of them"),
        (lambda w, n, s: 2 * (w - 1) / w * n, "that is what a rank of a ring allreduce sends"),
    ),
    hint="in a step every worker sends this server its part of a gradient, and gets its part of the parameters",
)  # fmt: skip


# 2. who may pull ------------------------------------------------------------------------------------------------------


class _Ruled(Consistency):
    """The servers' state machine, with the student's own rule for which worker may pull."""

    may_pull: Callable[[int, dict[int, int]], Any]

    def _may_go_on(self, worker: int) -> bool:
        clocks = {w: self.clocks[w] for w in sorted(self.members)}
        return self.clocks[worker] >= self.steps or bool(self.may_pull(worker, clocks))


@dataclass(frozen=True)
class PullRule:
    """A function `answer(worker, clocks, bound)`: may this worker have the parameters of its next step?

    It is tried on workers of different speeds, with the servers' own state machine. When a worker pulls, it may not be
    further ahead of the slowest one than the bound; no worker may wait without need; and all must come to their end.

    cases   (bound, seconds of a step of each worker)
    """

    cases: tuple[tuple[int, tuple[float, ...]], ...]
    steps: int = 12

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def may_pull(worker, clocks, bound): ...")
        for bound, speeds in self.cases:
            wrong = self._run(answer, bound, speeds)
            if wrong is not None and wrong.reason.startswith("nothing"):  # it is a stub
                return wrong
            if wrong is not None:
                where = f"bound {bound}, steps of {', '.join(f'{s:g}' for s in speeds)} s: "
                return replace(wrong, reason=where + wrong.reason)
        return Verdict(
            True,
            f"never more ahead than the bound, and nobody waits without need, in {several(len(self.cases), 'run')}",
        )

    def _run(self, answer: Callable[..., Any], bound: int, speeds: tuple[float, ...]) -> Verdict | None:
        """What is wrong with one run; None if nothing."""
        rule = _Ruled(Mode("ssp", bound=bound), len(speeds), self.steps)
        rule.may_pull = lambda worker, clocks: answer(worker, dict(clocks), bound)
        due: list[tuple[float, int, int]] = []  # when a worker's gradient arrives, the worker, its step
        now = 0.0
        for worker in range(len(speeds)):
            rule.ask(worker)
        while True:
            try:
                rows = rule.decide()
            except Exception as error:
                return raised(error, "your function")
            if rows:
                for kind, worker, step, _ in rows:
                    if kind is Kind.ANSWER and step < self.steps:
                        ahead = rule.gap(worker)
                        if ahead > bound:
                            return _too_far(worker, rule.clocks, ahead, bound)
                        heapq.heappush(due, (now + speeds[worker], worker, step))
                    elif kind is Kind.ANSWER:
                        rule.leave(worker)
                continue
            idle = [w for w in rule.asking if rule.gap(w) <= bound]
            if idle:
                return _waits(idle[0], rule.clocks, rule.gap(idle[0]), bound, stuck=not due)
            if not due:
                return None if not rule.members else _stuck(rule)
            now, worker, step = heapq.heappop(due)
            rule.push(worker, step)
            rule.ask(worker)


def _clocks(clocks: dict[int, int]) -> str:
    return "{" + ", ".join(f"{w}: {clocks[w]}" for w in sorted(clocks)) + "}"


def _too_far(worker: int, clocks: dict[int, int], ahead: int, bound: int) -> Verdict:
    reason = f"with clocks {_clocks(clocks)} worker {worker} may pull, though it is {ahead} ahead of the slowest one"
    return Verdict(False, reason, f"the bound is {bound}: compare its clock with the smallest of all clocks")


def _waits(worker: int, clocks: dict[int, int], ahead: int, bound: int, stuck: bool) -> Verdict:
    reason = f"with clocks {_clocks(clocks)} worker {worker} must wait, though it is only {ahead} ahead"
    end = ", and nobody else is at work: all wait for ever" if stuck else ""
    return Verdict(False, reason + end, f"whoever is at most {bound} ahead of the slowest one may go on")


def _stuck(rule: Consistency) -> Verdict:
    return Verdict(False, f"with clocks {_clocks(rule.clocks)} all wait for ever", "the slowest worker must never wait")


MAY_PULL = PullRule(
    ((1, (1.0, 1.0, 5.0)), (3, (1.0, 2.0, 5.0, 1.5)), (0, (1.0, 3.0)), (2, (2.0, 2.0)), (2, (1.0,)), (20, (1.0, 9.0)))
)


# 3. which gradients an update takes -----------------------------------------------------------------------------------


def _update(arrived: list[tuple[int, int]], version: int, k: int, members: int) -> tuple[list[int], list[int]]:
    """By the servers' own rule: workers whose gradients go into update `version`, and workers whose are dropped."""
    rule = Consistency(Mode("k-of-n", count=k, of=max(k, members)), members, version + 10, version)
    rule.clocks = dict.fromkeys(range(members), 0)
    for worker, step in arrived:
        rule.push(worker, step)
    take: list[int] = []
    drop: list[int] = []
    while rows := rule.decide():
        take += [row.worker for row in rows if row.kind is Kind.TAKE and row.version == version]
        drop += [row.worker for row in rows if row.kind is Kind.DROP and row.step < version]
        if rule.version > version:
            break
    late = [worker for worker, step in arrived if step < version]
    return sorted(take), sorted({*drop, *late})


_ARRIVED: tuple[tuple[list[tuple[int, int]], int, int, int], ...] = (
    ([(2, 5), (0, 5), (1, 5)], 5, 2, 4),
    ([(2, 5), (0, 4), (1, 5)], 5, 2, 4),
    ([(3, 7)], 7, 2, 4),
    ([(1, 3), (0, 3)], 5, 2, 3),
    ([(1, 0), (0, 0)], 0, 3, 2),
    ([(4, 9), (3, 8), (0, 9), (2, 9), (1, 9)], 9, 3, 5),
    ([], 2, 1, 3),
    ([(0, 6)], 6, 1, 1),
)


def _first(arrived: list[tuple[int, int]], version: int) -> list[int]:
    return [worker for worker, step in arrived if step == version]


def _take_all(arrived: list[tuple[int, int]], version: int, k: int, members: int) -> tuple[list[int], list[int]]:
    return sorted(_first(arrived, version)), _update(arrived, version, k, members)[1]


def _drop_none(arrived: list[tuple[int, int]], version: int, k: int, members: int) -> tuple[list[int], list[int]]:
    return _update(arrived, version, k, members)[0], []


def _always_k(arrived: list[tuple[int, int]], version: int, k: int, members: int) -> tuple[list[int], list[int]]:
    ready = _first(arrived, version)
    return sorted(ready[:k]) if len(ready) >= k else [], _update(arrived, version, k, members)[1]


def _as_they_came(
    take: bool, drop: bool
) -> Callable[[list[tuple[int, int]], int, int, int], tuple[list[int], list[int]]]:
    """The right workers, but those that are taken, or dropped, are not sorted."""

    def answer(arrived: list[tuple[int, int]], version: int, k: int, members: int) -> tuple[list[int], list[int]]:
        right = _update(arrived, version, k, members)
        came = [worker for worker, _ in arrived]
        taken, dropped = (sorted(workers, key=came.index) for workers in right)
        return (taken if take else right[0]), (dropped if drop else right[1])

    return answer


def _any_step(arrived: list[tuple[int, int]], version: int, k: int, members: int) -> tuple[list[int], list[int]]:
    return sorted(worker for worker, _ in arrived[:k]), []


UPDATE = Function(
    "my_update(arrived, version, k, members)",
    _ARRIVED,
    truth=_update,
    mistakes=(
        (_take_all, "an update takes the first k gradients, as soon as they are there; not fewer, and not more"),
        (_drop_none, "a gradient of an earlier step comes too late: it is dropped, or its worker would wait for ever"),
        (_always_k, "when workers have died, fewer than k may be left: then all that are left must be enough"),
        (_any_step, "look at the step of a gradient: only those of step `version` belong into this update"),
        *(
            (
                _as_they_came(take, drop),
                f"the right workers, but {what} in the order in which they came: sort them",
            )
            for take, drop, what in (
                (True, False, "the taken ones stand"),
                (False, True, "the dropped ones stand"),
                (True, True, "both stand"),
            )
        ),
    ),
    hint="take the first min(k, members) gradients of step `version`, once they are there; drop older ones; sort both",
)


# 4. servers for a straggler -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Straggling:
    """Costs of workers, the first of which is slower, and of messages and memory by bytes."""

    program: Program
    own: UnitCosts
    bandwidth: float

    def compute(self, rank: int, ins: Instruction) -> float:
        return self.own.compute(rank, ins)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return sum(part.bytes for part in ins.parts) / self.bandwidth, 0.0

    def collective(self, ins: Instruction) -> float:
        return 0.0

    def size(self, rank: int, value: Value) -> float:
        assert self.program.serving is not None
        groups, server = self.program.groups, rank - self.program.workers
        if value.kind in ("served", "pushed") and server >= 0:
            return shares_of(groups, self.program.serving.servers)[server].get(value.index, 0)
        return sum(groups[value.index].tensors) if value.kind in ("param", "grad") else 0


@dataclass(frozen=True)
class Served:
    """A plan with parameter servers for `workers` workers, the first of which is `slower` times slower.

    ranks       workers and servers together
    time        at most so many seconds until all workers but the first have done `steps` steps
    staleness   of every gradient, at most
    memory      of every server, at most so many bytes: its parameters, and gradients that wait
    dropped     gradients that come too late for their update, at most
    """

    workers: int
    ranks: int
    steps: int
    layers: int
    nbytes: int
    forward: float
    backward: float
    slower: float
    bandwidth: float
    time: float
    staleness: int
    memory: int
    dropped: int

    def judge(self, answer: Any) -> Verdict:
        try:
            words = answer() if callable(answer) else answer
        except Exception as error:
            return raised(error, "your function")
        if not isinstance(words, (str, Plan)):
            return Verdict(False, f"{words!r} is no plan", 'a plan is a text such as "dp=4 sync=ps mode=async"')
        try:
            plan = Plan.parse(words)
            if plan.sync != "ps" or plan.dp != self.workers or plan.ranks > self.ranks:
                wanted = f"{several(self.workers, 'worker')} (dp), and {several(self.ranks, 'rank')} at most"
                return Verdict(
                    False, f"`{plan}` has {several(plan.ranks, 'rank')}", f"sync=ps with {wanted}: servers count, too"
                )
            trace = self.predict(plan)
        except MiniparError as error:
            return Verdict(
                False, f"`{words}`: {error.reason}", "the words of a plan are explained by help(minipar.Plan)"
            )
        seconds = max(trace.ends[rank][-1] for rank in range(1, self.workers))
        stale = max(trace.staleness())
        held = max(trace.peak_memory()[self.workers :])
        late = _dropped(trace.program)
        found = (
            f"`{plan}`: {seconds:.2f} s, staleness {stale}, {held / 1e6:.1f} MB at a server, "
            f"{several(late, 'gradient')} dropped"
        )
        reason = f"{found}; the targets are {self.time:g} s, {self.staleness}, {self.memory / 1e6:g} MB, {self.dropped}"
        if seconds > self.time * (1 + 1e-9):
            return Verdict(
                False, reason, "for whom do the quick workers wait? For the slow one, or for the server's link?"
            )
        if stale > self.staleness:
            return Verdict(False, reason, "updates came between a pull and its push; which modes bound their number?")
        if held > self.memory:
            waiting = "gradients wait at a server until there are enough of them for an update; who could share that?"
            return Verdict(False, reason, waiting)
        if late > self.dropped:
            return Verdict(False, reason, "work is thrown away: let an update take more of the gradients of its step")
        return Verdict(True, reason)

    def predict(self, plan: Plan) -> Trace:
        """The predicted trace of all steps."""
        program = plan.compile(uniform(self.layers, self.nbytes // self.layers), steps=self.steps)
        factors = [self.slower] + [1.0] * (len(program.ranks) - 1)
        own = UnitCosts(program, self.forward, self.backward, stage_factors=factors)
        return simulate(program, _Straggling(program, own, self.bandwidth))


def _dropped(program: Program) -> int:
    """Gradients that came to server 0 and went into no update."""
    row = program.ranks[program.workers]
    came = {(ins.peer, ins.step) for ins in row if ins.op is Op.ACCEPT}
    taken = {(v.microbatch, v.step) for ins in row if ins.op is Op.APPLY for v in ins.reads if v.kind == "pushed"}
    return len(came - taken)


STRAGGLER = Served(
    workers=4, ranks=6, steps=20, layers=6, nbytes=6_000_000, forward=0.01, backward=0.02, slower=5.0,
    bandwidth=2e9, time=0.9, staleness=2, memory=14_000_000, dropped=10,
)  # fmt: skip
