"""Lesson 06: the time of a step; who gets which rows; buckets for a slow link; a plan for four devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minipar import models
from minipar.costs.device import DeviceSpec
from minipar.errors import PlanError
from minipar.prediction.on_paper import Estimate, per_rank
from minipar.prediction.program_costs import ProgramCosts
from minipar.prediction.simulator import simulate
from minipar.program import Group, Instruction, Op, Program, Value
from minipar.program.shape import Shape, uniform
from minipar.strategies.plan import Plan
from minipar.wording import several
from minipar_course.exercises.kinds.choice import MIB, Choice
from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.verdict import Verdict, raised

# 1. the time of a step ------------------------------------------------------------------------------------------------


def _step_time(ranks: int, compute: float, nbytes: int, alpha: float, beta: float) -> float:
    part = {"forward": compute / 3 / ranks, "backward": 2 * compute / 3 / ranks}
    spec = DeviceSpec(costs=part, bandwidth=1 / beta, latency=alpha)
    program = Plan(dp=int(ranks), bucket="flat", overlap="none").compile(uniform(1, int(nbytes)))
    return simulate(program, ProgramCosts(program, device=spec)).time


STEP_TIME = Formula(
    ("ranks", "compute", "nbytes", "alpha", "beta"),
    _step_time,
    ((4, 480, 1200, 0.5, 0.05), (1, 480, 1200, 0.5, 0.05), (2, 90, 100, 1, 1), (16, 48, 1600, 0.5, 0.1)),
    (
        (lambda p, c, n, a, b: c / p + 2 * (p - 1) / p * n * b, "the bytes are right; what do messages cost besides?"),
        (lambda p, c, n, a, b: c / p + 2 * (p - 1) * (a + n * b), "a message of a ring carries n / p bytes"),
        (lambda p, c, n, a, b: c / p + (p - 1) * (a + n / p * b), "an allreduce is a reduce-scatter and an all-gather"),
        (lambda p, c, n, a, b: c + 2 * (p - 1) * (a + n / p * b), "each device computes its share of the rows only"),
        (lambda p, c, n, a, b: c / p, "that is the computing; the gradients must be summed, too"),
    ),
    hint="a rank computes its share, and then a ring has 2 (ranks - 1) steps of one chunk each",
)  # fmt: skip


# 2. who gets which rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """A function `answer(rank, ranks, size)` that gives a rank its rows of a batch: each row goes to exactly one rank,
    and no rank has two rows more than another. `sizes`: (ranks, rows of the batch)."""

    sizes: tuple[tuple[int, int], ...]

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def my_rows(rank, ranks, size): ...")
        for ranks, size in self.sizes:
            parts = []
            for rank in range(ranks):
                what = f"for rank={rank}, ranks={ranks}, size={size} your function"
                try:
                    rows = answer(rank, ranks, size)
                    parts.append([row.__index__() for row in rows])
                except NotImplementedError as error:
                    return raised(error, what)
                except (AttributeError, TypeError) as error:
                    if isinstance(error, AttributeError) or "iterable" in str(error):
                        hint = "return the rows as numbers: a range, or a list"
                        return Verdict(False, f"{what} gives {rows!r}, which is no list of rows", hint)
                    return raised(error, what)
                except Exception as error:
                    return raised(error, what)
            wrong = _shared_out(parts, size)
            if wrong is not None:
                return Verdict(False, f"{several(size, 'row')} on {several(ranks, 'rank')}: {wrong[0]}", wrong[1])
        return Verdict(True, f"every row once, and no rank has two more than another, in {len(self.sizes)} sizes")


def _shared_out(parts: Sequence[Sequence[int]], size: int) -> tuple[str, str] | None:
    """What is wrong with the ranks' rows, and a hint; None if nothing."""
    owners = Counter(row for rows in parts for row in rows)
    beyond = sorted(row for row in owners if not 0 <= row < size)
    if beyond:
        return f"row {beyond[0]} is given out, and there is none", f"rows count from 0 to {size - 1}"
    twice = sorted(row for row, count in owners.items() if count > 1)
    if twice:
        whose = [rank for rank, rows in enumerate(parts) for row in rows if row == twice[0]]
        hint = "a row that counts twice weighs twice in the gradient: one device would not do that"
        return f"row {twice[0]} is trained {len(whose)} times, by ranks {', '.join(map(str, whose))}", hint
    missing = sorted(set(range(size)) - set(owners))
    if missing:
        return f"nobody trains row {missing[0]}", "where do the rows go that do not divide evenly?"
    most, least = max(map(len, parts)), min(map(len, parts))
    if most - least > 1:
        full, empty = ([len(rows) for rows in parts].index(n) for n in (most, least))
        hint = "all wait for the slowest: give the rows that are left over to different ranks"
        return f"rank {full} has {several(most, 'row')} and rank {empty} has {least}", hint
    return None


SHARES = Shares(((4, 10), (1, 7), (3, 9), (4, 3), (5, 23), (8, 64), (6, 0)))


# 3. buckets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OnLink:
    """Seconds of each layer's backward, and of messages: alpha for each, and beta for each byte."""

    backward: tuple[float, ...]
    alpha: float
    beta: float

    def compute(self, rank: int, ins: Instruction) -> float:
        return sum(self.backward[layer] for layer in ins.layers) if ins.op is Op.BACKWARD else 0.0

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return 0.0, 0.0

    def collective(self, ins: Instruction) -> float:
        return sum(self.alpha + part.bytes * self.beta for part in ins.parts)

    def size(self, rank: int, value: Value) -> float:
        return 0.0


def with_buckets(buckets: Sequence[Sequence[int]], sizes: Sequence[int]) -> Program:
    """The step of two replicas that sums gradients in these buckets."""
    ends = tuple(min(bucket) for bucket in buckets[:-1])
    shape = Shape(len(sizes), tuple(Group((k,), (size,)) for k, size in enumerate(sizes)))
    return Plan(dp=2, bucket=ends or "flat").compile(shape)


def time_with(
    buckets: Sequence[Sequence[int]], sizes: Sequence[int], backward: Any, alpha: float, beta: float
) -> float:
    """Predicted seconds from the beginning of the backward until the last gradient is summed."""
    return simulate(with_buckets(buckets, sizes), _OnLink(tuple(backward), alpha, beta)).time


def best_time(sizes: Sequence[int], backward: Sequence[float], alpha: float, beta: float) -> float:
    """The shortest possible time. ends[k]: when the gradients of all layers from k on are summed, at best."""
    count = len(sizes)
    ready = [sum(backward[k:]) for k in range(count)]
    ends = [0.0] * (count + 1)
    for k in range(count - 1, -1, -1):
        ends[k] = min(max(ends[j], ready[k]) + alpha + sum(sizes[k:j]) * beta for j in range(k + 1, count + 1))
    return ends[0]


def _bucket_problem(given: Any, sizes: list[int], backward: list[float], alpha: float, beta: float) -> str:
    count = len(sizes)
    flat = [layer for bucket in given for layer in bucket]
    if flat != list(range(count - 1, -1, -1)) or not all(given):
        return f"gives {given!r}: every layer must be in one bucket, from layer {count - 1} down to 0"
    seconds, best = time_with(given, sizes, backward, alpha, beta), best_time(sizes, backward, alpha, beta)
    if seconds <= best * (1 + 1e-9):
        return ""
    words = f"gives {several(len(given), 'message')}, and the sums are done after {seconds:g} ms; "
    idle = sum(backward[min(given[0]) :])
    words += f"{best:g} ms are possible (yours begin after {idle:g} ms, when layer {min(given[0])} is done; "
    return words + f"latencies alone are {len(given) * alpha:g} ms)"


def _runs(cut: Callable[[int, int], bool]) -> Callable[..., list[list[int]]]:
    """A function that makes buckets: a bucket ends with layer k if cut(k, number of layers)."""

    def buckets(sizes: Sequence[int], *_: Any) -> list[list[int]]:
        made: list[list[int]] = [[]]
        for k in range(len(sizes) - 1, -1, -1):
            made[-1].append(k)
            if k and cut(k, len(sizes)):
                made.append([])
        return made

    return buckets


BUCKETS = Function(
    "my_buckets(sizes, backward, alpha, beta)",
    (
        ([4, 4, 4, 4, 4, 4], [2, 2, 2, 2, 2, 2], 3, 0.5),
        ([1, 1, 1, 1], [10, 10, 10, 10], 1, 1),
        ([8, 2, 2, 2, 2], [1, 1, 1, 1, 1], 5, 0.5),
        ([1, 2, 3, 20], [6, 3, 2, 4], 2, 1),
        ([3, 1, 9, 2, 2, 7, 1, 4], [2, 1, 3, 1, 4, 2, 1, 2], 2, 0.5),
        ([5], [1], 1, 1),
    ),
    problem=_bucket_problem,
    mistakes=(
        (_runs(lambda k, n: True), "one message for each layer: every one of them costs alpha; some could go together"),
        (_runs(lambda k, n: False), "one message for all: it cannot begin before the backward has ended"),
    ),
    hint="try every place where the last bucket could begin: what comes before it is the same question, but smaller",
)  # fmt: skip

# 4. a plan ------------------------------------------------------------------------------------------------------------

# Seconds of a forward: for each row, and for each micro-batch in addition; a backward takes twice as long.
ROW, LAUNCH = 0.01, 0.01
STEPS = 8  # in a program of which one step's messages travel during the next


def with_launches(plan: Plan | str, model: str, device: DeviceSpec | str, batch: int) -> Estimate:
    """What a plan without stages would take, as `on_paper.predict` tells it, where each micro-batch has a price."""
    plan = Plan.parse(plan)
    if plan.pp > 1:
        raise PlanError(f"plan {plan}: cuts the model; here every rank has all of it (pp=1)")
    forward = LAUNCH + batch / plan.dp / plan.total_microbatches * ROW
    spec = replace(DeviceSpec.parse(device), costs={"forward": forward, "backward": 2 * forward})

    def costs_of(program: Program) -> ProgramCosts:
        return ProgramCosts(program, device=spec)

    program = plan.compile(models.shape(model), steps=plan.block(STEPS), costs_of=costs_of)
    return Estimate(plan, simulate(program, costs_of(program)), per_rank(plan, model, batch))


FOUR_DEVICES = Choice(
    "gpt-demo", 64, "bandwidth=100MB/s latency=100us", ranks=4, time=0.6, memory=165 * MIB, by=with_launches
)
