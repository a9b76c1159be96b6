"""Lesson 04: gradients of a batch in parts; how many parts fit; a plan for a small device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from minipar.costs.recomputation import LayerCosts
from minipar.errors import MiniparError
from minipar.prediction.simulator import simulate
from minipar.program import Instruction, Op, Value
from minipar.strategies.plan import Plan
from minipar.wording import several
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.order import MiB, ms
from minipar_course.exercises.kinds.verdict import Verdict, raised

if TYPE_CHECKING:
    from torch import Tensor, nn

    Loss = Callable[[Tensor, Tensor], Tensor]
    Parts = list[tuple[Tensor, Tensor]]

__all__ = ["ACCUMULATE", "FEWEST", "SMALL_DEVICE", "predict"]


# 1: the gradient of a batch in parts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accumulation:
    """A function that goes through the parts of a batch one by one, and must leave the gradient of the whole batch.

    sizes   rows of each part, for each batch that is tried
    """

    sizes: tuple[tuple[int, ...], ...]

    def judge(self, answer: Any) -> Verdict:
        if not callable(answer):
            return Verdict(False, f"{answer!r} is no function", "def accumulate(model, loss, parts): ...")
        for sizes in self.sizes:
            verdict = self._judge(answer, sizes)
            if verdict is not None:
                return verdict
        each = max(map(len, self.sizes))
        return Verdict(True, f"equal gradients in all {len(self.sizes)} cases, and one part in memory, of up to {each}")

    def _judge(self, answer: Callable[..., Any], sizes: tuple[int, ...]) -> Verdict | None:
        import torch

        from minipar.training.reference import gradient_error

        model, loss, parts = _problem(sizes)
        case = f"with parts of {', '.join(map(str, sizes))} rows"
        x, y = (torch.cat([part[k] for part in parts]) for k in range(2))
        whole = loss(model(x), y)
        whole.backward()
        expected = _gradients(model)
        model.zero_grad()
        try:
            value, peak = _tracked(lambda: answer(model, loss, parts))
        except Exception as error:
            return raised(error, f"{case} your function")
        found = _gradients(model)
        if not found:
            return Verdict(False, f"{case} no parameter has a gradient", "who calls backward?")
        if gradient_error(found, expected) > 1e-12:
            return Verdict(False, f"{case} the gradients are not those of the whole batch", _why(found, model, sizes))
        if not isinstance(value, (int, float)) or not math.isclose(value, whole.item(), rel_tol=1e-9):
            hint = (
                "return the mean loss of the whole batch, a number: the parts' `.item()`, weighted as their gradients"
            )
            return Verdict(False, f"{case} your function returns {value!r}; the loss is {whole.item():.4f}", hint)
        model.zero_grad()
        largest = parts[max(range(len(sizes)), key=sizes.__getitem__)]
        _, one = _tracked(lambda: loss(model(largest[0]), largest[1]).backward())
        if peak > 1.5 * one:
            reason = f"{case} the gradients are right, but {peak / one:.1f} times the memory of one part is held"
            return Verdict(
                False, reason, "a graph lives until its backward: call backward for each part, before the next"
            )
        return None


def _problem(sizes: tuple[int, ...]) -> tuple[nn.Sequential, Loss, Parts]:
    """A model whose activations are much larger than its parameters, its loss, and a batch in parts."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(len(sizes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))).double()
    make = lambda rows: torch.randn(rows, 64, 8, generator=generator, dtype=torch.float64)  # noqa: E731
    return model, nn.functional.mse_loss, [(make(rows), make(rows)) for rows in sizes]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _tracked(work: Callable[[], Any]) -> tuple[Any, int]:
    """What a function gives, and the most bytes that live at once of what it made."""
    from minipar.execution.memory.storages import FollowedStorage, Storages

    class Peak(Storages):
        top = 0

        def changed(self, held: FollowedStorage, delta: int) -> None:
            self.top = max(self.top, self.live)

    with Peak() as followed:
        value = work()
    return value, followed.top


def _why(found: dict[str, Tensor], model: nn.Module, sizes: tuple[int, ...]) -> str:
    """The hint for the usual mistake that gives these gradients."""
    from minipar.training.reference import gradient_error

    model, loss, parts = _problem(sizes)
    rows = sum(sizes)

    def weighted(weights: list[float]) -> dict[str, Tensor]:
        model.zero_grad()
        for weight, (x, y) in zip(weights, parts, strict=True):
            (weight * loss(model(x), y)).backward()
        return _gradients(model)

    last = [0.0] * (len(sizes) - 1)
    mistakes = [
        ([1.0] * len(sizes), "these are the sums of the parts' gradients: a mean over all rows was asked for"),
        ([1 / len(sizes)] * len(sizes), "every part counts the same here; but one with more rows must count more"),
        ([float(size) for size in sizes], "these are sums over rows: divide by the number of all rows"),
        ([*last, 1.0], "this is the last part alone: what happened to the gradients before it?"),
        ([*last, sizes[-1] / rows], "this is the last part alone: what happened to the gradients before it?"),
    ]
    for weights, hint in mistakes:
        if gradient_error(found, weighted(weights)) < 1e-9:
            return hint
    return (
        "the loss of a part is a mean over its rows: what must it be multiplied by, so that they add up to the whole?"
    )


ACCUMULATE = Accumulation(((4, 4), (4, 3, 3), (7,), (2, 1, 5, 1, 1)))


# 2: how many parts ----------------------------------------------------------------------------------------------------


def _fewest(rows: int, fixed: int, each: int, capacity: int) -> int:
    fits = [m for m in range(1, rows + 1) if fixed + each * -(-rows // m) <= capacity]
    return fits[0] if fits else 0


FEWEST = Function(
    "fewest(rows, fixed, each, capacity)",
    ((64, 56, 4, 400), (64, 56, 4, 100), (10, 0, 2, 7), (7, 5, 3, 8), (12, 10, 5, 14), (32, 20, 3, 40), (1, 1, 1, 2)),
    truth=_fewest,
    mistakes=(
        (
            lambda n, f, a, c: max(1, math.ceil(n * a / (c - f))),
            (
                "rows are whole: n rows in m parts are parts of up to ceil(n / m); and where not even one row"
                " fits, the answer is 0"
            ),
        ),
        (
            lambda n, f, a, c: max(1, math.ceil(n * a / c)),
            "parameters and states take `fixed`, however small the parts are",
        ),
        (lambda n, f, a, c: max(1, (n * a) // (c - f)), "rounded down, the parts are a little too large"),
        (
            lambda n, f, a, c: next((m for m in range(1, n + 1) if f + a * (n // m) <= c), 0),
            "n rows in m parts: the largest part has ceil(n / m) of them",
        ),
        (
            lambda n, f, a, c: next((m for m in range(1, n + 1) if f + a * -(-n // m) <= c), n),
            "not even one row fits here: 0",
        ),
    ),
    hint="try m = 1, 2, 3, ...: how many rows has the largest part?",
)


# 3: a plan for a small device -----------------------------------------------------------------------------------------

LAYERS = 8
KEYS = ("microbatches", "checkpoint")


@dataclass(frozen=True)
class _Costs:
    """8 blocks: a forward takes 0.5 ms, and 0.1 ms more for each row; for a row the output has 1 MiB, and 3 MiB more
    are saved."""

    rows: tuple[int, ...]  # of each micro-batch

    def compute(self, rank: int, ins: Instruction) -> float:
        if ins.op is Op.STEP:
            return 0.0
        one = (0.5 + 0.1 * self.rows[ins.microbatch]) * ms
        return len(ins.layers) * one * (2 if ins.op is Op.BACKWARD else 1)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return 0.0, 0.0

    def collective(self, ins: Instruction) -> float:
        return 0.0

    def size(self, rank: int, value: Value) -> float:
        if value.microbatch < 0:
            return {"optimizer_state": 16 * MiB}.get(value.kind, 8 * MiB)
        return (3 if value.kind == "saved" else 1) * self.rows[value.microbatch] * MiB


def predict(words: str, rows: int) -> tuple[float, float]:
    """(milliseconds, MiB) of a step of `rows` rows under a plan, on the device of exercise 3.

    Errors: PlanError for an impossible plan, MiniparError for one with other keys than microbatches and checkpoint.
    """
    plan = Plan.parse(words)
    other = [word for word in str(plan).split()[2:] if word.partition("=")[0] not in KEYS]
    if plan.ranks > 1 or other:
        raise MiniparError(f"plan {words!r}: there is one device; possible keys are {' and '.join(KEYS)}")
    if plan.microbatches > rows:
        raise MiniparError(
            f"plan {words!r}: {several(plan.microbatches, 'micro-batch')}, but only {several(rows, 'row')}"
        )
    return _predicted(str(plan), rows)


@cache
def _predicted(words: str, rows: int) -> tuple[float, float]:
    plan = Plan.parse(words)
    even, more = divmod(rows, plan.microbatches)
    costs = LayerCosts.equal(LAYERS, rows * MiB, 3 * rows * MiB)
    program = plan.compile(layers=LAYERS, costs=costs)
    trace = simulate(program, _Costs(tuple(even + (i < more) for i in range(plan.microbatches))))
    return round(trace.time / ms, 6), max(trace.peak_memory()) / MiB


@cache
def _fastest(rows: int, capacity: int) -> float:
    """The least milliseconds of all plans that fit; inf if none does."""
    counts = sorted({-(-rows // size) for size in range(1, rows + 1)})  # for each largest part the fewest parts
    choices = ["none", *map(str, range(1, LAYERS + 1))]
    found = [predict(f"microbatches={m} checkpoint={c}", rows) for m, c in product(counts, choices)]
    return min((time for time, memory in found if memory <= capacity), default=math.inf)


def _too_slow_or_large(given: Any, rows: int, capacity: int) -> str:
    try:
        time, memory = predict(given, rows)
    except MiniparError as error:
        return f"gives {given!r}: {error.reason if hasattr(error, 'reason') else error}"
    if memory > capacity:
        return f'gives "{given}", which needs {memory:g} MiB; the device has {capacity}'
    best = _fastest(rows, capacity)
    if time > 1.02 * best:
        return f'gives "{given}", which takes {time:g} ms; {best:g} ms are possible in {capacity} MiB'
    return ""


SMALL_DEVICE = Function(
    "plan(rows, capacity)",
    ((32, 1300), (32, 800), (32, 600), (32, 460), (24, 320)),
    problem=_too_slow_or_large,
    mistakes=(
        (
            lambda rows, capacity: "microbatches=1",
            "that is the fastest where it fits; elsewhere more micro-batches, or recomputation, or both",
        ),
        (
            lambda rows, capacity: f"microbatches={rows}",
            "that needs least, but every micro-batch takes a while to start on each of the 8 layers",
        ),
    ),
    hint="predict(words, rows) gives milliseconds and MiB of any plan: try many, and keep the fastest that fits",
)
