"""The whole program of a plan, compiled and simulated, with costs from formulas. No torch.

    on_paper.predict("pp=8 dp=4 zero=1 microbatches=16 precision=bf16", "megatron-7.5b", "a100-80gb", batch=64)
        an emulated device, as the executor emulates it: operations / `flops`, and bytes / bandwidth of links

It has a trace to look at: `found.trace`. Bytes of layers, and what messages and sums take on a link, are the same as in
all other predictions (costs/analytic.py, costs/links.py); only the seconds of operators differ. The formula of
`minipar.estimate` compiles nothing, and is much faster. The memory is that of rank_memory.py. An emulated device leaves
out the optimizer's own time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from minipar.costs import analytic
from minipar.costs.analytic import WHOLE, Division
from minipar.costs.device import DeviceSpec
from minipar.costs.measured import Profile
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.models import shapes
from minipar.models.sizes import Sizes, Transformer
from minipar.prediction import memory_formula
from minipar.prediction.plan_numbers import PRECISIONS, Precision
from minipar.prediction.program_costs import ProgramCosts, microbatch_rows
from minipar.prediction.rank_memory import RankMemory
from minipar.prediction.simulator import simulate
from minipar.program import Group, Program
from minipar.strategies.plan import Plan
from minipar.trace import Trace
from minipar.wording import several


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
    return Estimate(plan, trace, memory_formula.per_rank(plan, analytic.named(model), batch))


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
    kept = {rows: analytic.weight_costs(model, rows / division.ep, each.activation, division)[1] for rows in by_rows}
    return Profile(
        forward={rows: one.forward for rows, (one, _) in by_rows.items()},
        backward={rows: one.backward for rows, (one, _) in by_rows.items()},
        backward_input={rows: tuple(first) for rows, (_, first) in by_rows.items()},
        backward_weight={
            rows: tuple(a - b for a, b in zip(one.backward, first, strict=True))
            for rows, (one, first) in by_rows.items()
        },
        output_bytes={rows: one.output for rows, (one, _) in by_rows.items()},
        grad_output_bytes={rows: one.gradient for rows, (one, _) in by_rows.items()},
        saved_bytes={rows: one.saved for rows, (one, _) in by_rows.items()},
        saved_weight_bytes=kept,
        parameter_bytes=tuple(each.parameter * size for size in sizes),
        gradient_bytes=tuple(each.gradient * size for size in sizes),
        optimizer_bytes=tuple(each.optimizer * size for size in sizes),
        step_seconds=step_seconds,
    )


def _whole(numbers: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(number) for number in numbers)
