"""The program of a plan, simulated with costs from formulas: from a model's name, a device's rates, a plan. No torch.

    found = on_paper.predict("pp=8 dp=4 zero=1 microbatches=16 precision=bf16", "megatron-7.5b", "a100-80gb", batch=64)
    found.trace.time, max(found.memory)           seconds of a step; bytes on the fullest rank

The whole program is compiled, so that there is a trace to look at. `minipar.estimate` compiles nothing, and knows which
part of its peak a device reaches. The simulator gives the time: operations / `flops`, and bytes / bandwidth of links.
`memory_formula` gives the memory. The optimizer's own time is left out, and so is memory that an instruction needs only
while it runs: they have no formula here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from minipar.costs import analytic
from minipar.costs.device import DeviceSpec
from minipar.costs.measured import Profile
from minipar.errors import PlanError
from minipar.models import shapes, table
from minipar.models.table import GPT, Mixture
from minipar.prediction import memory_formula
from minipar.prediction.emulated import EmulatedCosts
from minipar.prediction.memory_formula import PRECISIONS, RankMemory
from minipar.prediction.profiled import ProfiledCosts, microbatch_rows
from minipar.prediction.simulator import simulate
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
    program = plan.compile(shapes.shape(model, element_size=element), costs=measured)
    trace = simulate(program, EmulatedCosts(program, spec, ProfiledCosts(program, measured, batch)))
    return Estimate(plan, trace, memory_formula.per_rank(plan, model, batch))


def profile(model: str, rows: Iterable[int], precision: str = "float32", selective: bool = False) -> Profile:
    """The profile of a model from formulas, in place of `minipar.profile`. Seconds are those of a device with 1 FLOP/s.

    selective   whether the backward of a block runs its attention core forward again
    """
    kinds, numbers = PRECISIONS[precision], table.numbers(model)
    by_rows = {count: analytic.layer_costs(model, count, kinds.activation, selective=selective) for count in rows}
    if selective and isinstance(numbers, (GPT, Mixture)):
        for count, costs in by_rows.items():
            core = analytic.core_flops(numbers, count)
            inner = tuple(flops + core for flops in costs.backward[1:-1])
            by_rows[count] = replace(costs, backward=(costs.backward[0], *inner, costs.backward[-1]))
    sizes = [sum(group.tensors) for group in shapes.shape(model, element_size=1).groups]
    first = next(iter(by_rows.values()))
    return Profile(
        forward={count: costs.forward for count, costs in by_rows.items()},
        backward={count: costs.backward for count, costs in by_rows.items()},
        output_bytes={count: _whole(costs.output) for count, costs in by_rows.items()},
        grad_output_bytes={count: _whole(costs.gradient) for count, costs in by_rows.items()},
        saved_bytes={count: _whole(costs.saved) for count, costs in by_rows.items()},
        saves_output=(False,) * len(first.forward),
        parameter_bytes=tuple(kinds.parameter * size for size in sizes),
        gradient_bytes=tuple(kinds.gradient * size for size in sizes),
        optimizer_bytes=tuple(kinds.optimizer * size for size in sizes),
        step_seconds=0.0,
        forward_flops={count: _whole(costs.forward) for count, costs in by_rows.items()},
        backward_flops={count: _whole(costs.backward) for count, costs in by_rows.items()},
        input_flops={count: _whole(analytic.input_flops(model, count, selective=selective)) for count in by_rows},
    )


def _whole(numbers: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(number) for number in numbers)
