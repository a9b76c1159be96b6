"""A plan as minipar itself runs it, before it runs: bytes of every rank, and its whole program simulated. No torch.

    per_rank(plan, "gpt2-xl", batch)       the numbers of `minipar.estimate` for every rank, by the formula of
                                           rank_memory.py; for `minipar memory` and MemoryExplorer
    details(...)                           the same, with what they consist of
    predict("pp=8 dp=4 microbatches=16 precision=bf16", "megatron-7.5b", "a100-80gb", batch=64)
                                           the trace, on emulated devices as the executor emulates them: operations /
                                           `flops`, and bytes / bandwidth of links, without the optimizer's own time

Here embedding and head are layers; in an estimate for a device they are only if the plan says so. Bytes of layers, and
what messages and sums take on a link, are the same as in all other predictions; only the seconds of operators differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minipar.costs import analytic
from minipar.costs.analytic import WHOLE, Division
from minipar.costs.device import DeviceSpec
from minipar.costs.measured import Profile
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.models import shapes, table
from minipar.models.sizes import Sizes, Transformer, of_preset, sizes
from minipar.models.table import Branchy
from minipar.prediction.plan_numbers import PRECISIONS, PlanNumbers, Precision
from minipar.prediction.plan_words import check, divides, numbers_of, table_of
from minipar.prediction.program_costs import ProgramCosts, microbatch_rows
from minipar.prediction.rank_memory import Detail, RankMemory, of_ranks
from minipar.prediction.simulator import simulate
from minipar.program import Group, Program
from minipar.program.rows import split_rows
from minipar.strategies.plan import Plan
from minipar.trace import Trace
from minipar.wording import several


def per_rank(plan: Plan, model: str | Sizes, batch: int | None = None, division: Division = WHOLE) -> list[RankMemory]:
    """Bytes of each rank, in rank order, for a step of `batch` rows; default: one row for every micro-batch.

    division    how further ranks share each layer, which the plan does not say: the bytes are those of one of them, and
                the ranks of ep are some of the plan's replicas
    Errors: `PlanError` for an unknown model, and for a plan that does not fit it.
    """
    return [detail.memory for detail in details(plan, model, batch, division)]


def details(plan: Plan, model: str | Sizes, batch: int | None = None, division: Division = WHOLE) -> list[Detail]:
    """As `per_rank`, with the origin of the bytes."""
    chosen = model_of(model) if isinstance(model, str) else model
    numbers = own_numbers(plan, chosen, division)
    count = plan.total_microbatches
    batch = plan.dp * count if batch is None else batch
    edges = split_rows(batch, plan.dp * count)
    largest = [len(edges[replica * count]) for replica in range(plan.dp)]  # the first micro-batches have more rows
    found = {rows: of_ranks(numbers._replace(rows=float(rows * division.ep)), chosen) for rows in set(largest)}
    return [detail for rows in largest for detail in found[rows] for _ in range(plan.sharing)]


def model_of(model: str, **overrides: Any) -> Sizes:
    """A model by its name or words. Errors: PlanError for an unknown one, and for one whose layers branch."""
    if model not in table.names():
        return sizes(" ".join([model, *(f"{key}={value}" for key, value in overrides.items())]))
    numbers = table.numbers(model, **overrides)
    if isinstance(numbers, Branchy):
        raise PlanError(f"memory: no formula for {model}, whose layers branch; possible is `minipar run --memory`")
    return of_preset(numbers, model)


def own_numbers(plan: Plan, model: Sizes, division: Division = WHOLE) -> PlanNumbers:
    """A plan as minipar runs it, with one row in each micro-batch. Errors: PlanError for what has no formula."""
    if plan.slice_count > 1 or plan.place is not None:
        sliced = f"schedule={plan.schedule}, whose slices differ"
        raise PlanError(
            f"memory: no formula for {'place=, which cuts stages in pieces' if plan.place is not None else sliced}; "
            f"possible are `minipar memory` of a model that can be built ({', '.join(table.presets())}), or `minipar "
            "run --memory`"
        )
    found, ep = numbers_of(table_of(plan), model), division.ep
    divides("ep", ep, found.dp, f"the dp={found.dp} replicas that it is of")
    found = found._replace(
        dp=found.dp // ep, ep=found.ep * ep, tp=found.tp * division.tp, cp=found.cp * division.cp,
        sequence_parallel=found.sequence_parallel or division.sequence,
    )  # fmt: skip
    check(found, model)
    return found


# the whole program ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """The predicted step of a plan, and the memory of each rank. If messages of one step travel during the next step,
    the trace has several steps."""

    plan: Plan
    trace: Trace
    ranks: list[RankMemory]

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.trace.time / self.trace.program.steps

    @property
    def memory(self) -> list[int]:
        """For each rank, bytes at its peak."""
        return [rank.total for rank in self.ranks]


def predict(plan: Plan | str, model: str, device: DeviceSpec | str, batch: int) -> Estimate:
    """A step of `batch` rows of a model, given by its name (`models.table`), on devices of one kind.

    Errors: PlanError for a plan that cannot run with these rows, for slices, and for a device without flops.
    """
    plan, spec = Plan.parse(plan), DeviceSpec.parse(device)
    if spec.flops is None:
        raise PlanError(f"device {spec}: needs flops=, such as flops=10GFLOP/s")
    if plan.sharing > 1:
        raise PlanError(f"plan {plan}: no formula yet for the time of ranks that share layers; possible is train(...)")
    if plan.slice_count > 1:
        raise PlanError(f"schedule={plan.schedule}: no formula for slices of a sequence; possible are the others")
    if batch < plan.dp * plan.total_microbatches:
        raise PlanError(
            f"batch={batch}: fewer rows than the "
            f"{several(plan.dp * plan.total_microbatches, 'micro-batch')} of plan {plan}"
        )
    rows = microbatch_rows(batch, plan.dp, plan.total_microbatches)
    measured = profile(model, rows, plan.precision, selective=plan.checkpoint == "selective")
    element = PRECISIONS[plan.precision].activation

    def simulated(program: Program) -> Trace:
        return simulate(program, ProgramCosts(program, measured, batch, spec))

    shape = shapes.shape(model, element_size=element)
    trace = simulated(plan.compile(shape, costs=measured, time_of=lambda program: simulated(program).time))
    return Estimate(plan, trace, per_rank(plan, analytic.named(model), batch))


def profile(model: str, rows: Iterable[int], precision: str = "float32", selective: bool = False) -> Profile:
    """The profile of a model from formulas, in place of `minipar.profile`. Seconds are those of a device with 1 FLOP/s.

    selective   whether the backward of a block runs its attention core forward again
    """
    kinds, by_rows = PRECISIONS[precision], {}
    chosen = analytic.named(model)
    for count in rows:
        costs = analytic.layer_costs(model, count, kinds.activation, selective=selective)
        first = analytic.input_flops(model, count, selective=selective)
        if selective and isinstance(chosen, Transformer):
            core = chosen.core_flops * count
            inner = tuple(flops + core for flops in costs.backward[1:-1])
            costs = replace(costs, backward=(costs.backward[0], *inner, costs.backward[-1]))
        by_rows[count] = costs, first
    groups = shapes.shape(model, element_size=1).groups
    built = profile_of(chosen, kinds, WHOLE, groups, by_rows, 0.0)
    flops = (built.forward, built.backward, built.backward_input)
    forward, backward, half = ({count: _whole(one) for count, one in table.items()} for table in flops)
    return replace(built, forward_flops=forward, backward_flops=backward, input_flops=half)


Layers = Mapping[int, tuple[LayerCosts, Sequence[float]]]  # by rows; and seconds of each layer's input half


def profile_of(
    model: Sizes, each: Precision, division: Division, groups: Sequence[Group], by_rows: Layers, step_seconds: float
) -> Profile:
    """A profile of these layers. `groups` have sizes in numbers."""
    sizes = [sum(group.tensors) for group in groups]
    costs = {rows: one for rows, (one, _) in by_rows.items()}
    first = {rows: tuple(halves) for rows, (_, halves) in by_rows.items()}
    second = {rows: tuple(a - b for a, b in zip(costs[rows].backward, first[rows], strict=True)) for rows in costs}
    return Profile(
        forward={rows: one.forward for rows, one in costs.items()},
        backward={rows: one.backward for rows, one in costs.items()},
        backward_input=first,
        backward_weight=second,
        output_bytes={rows: one.output for rows, one in costs.items()},
        grad_output_bytes={rows: one.gradient for rows, one in costs.items()},
        saved_bytes={rows: one.saved for rows, one in costs.items()},
        saved_weight_bytes={
            rows: analytic.weight_costs(model, rows / division.ep, each.activation, division)[1] for rows in costs
        },
        parameter_bytes=tuple(each.parameter * size for size in sizes),
        gradient_bytes=tuple(each.gradient * size for size in sizes),
        optimizer_bytes=tuple(each.optimizer * size for size in sizes),
        step_seconds=step_seconds,
    )


def _whole(numbers: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(number) for number in numbers)
