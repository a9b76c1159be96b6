"""The whole program of a plan, compiled and simulated, with costs from formulas. No torch.

    minipar.estimate("pp=8 dp=4 microbatches=16 ...", "llama3-8b", "h100", batch=64, program=True)
        the operators and the two-level links of a machine (`simulated`)
    on_paper.predict("pp=8 dp=4 zero=1 microbatches=16 precision=bf16", "megatron-7.5b", "a100-80gb", batch=64)
        an emulated device, as the executor emulates it: operations / `flops`, and bytes / bandwidth of links

Both have a trace to look at: `found.trace`. Bytes of layers, and what messages and sums take on a link, are the same in
both and in all other predictions (costs/analytic.py, costs/links.py); only the seconds of operators differ. The formula
of `minipar.estimate` compiles nothing, and is much faster. The memory is that of rank_memory.py. An emulated device
leaves out the optimizer's own time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from minipar.costs import analytic
from minipar.costs.analytic import WHOLE, Division
from minipar.costs.device import DeviceSpec
from minipar.costs.hardware import Hardware
from minipar.costs.measured import Profile
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.models import shapes, table
from minipar.models.sizes import Sizes, of_preset
from minipar.models.table import GPT, Mixture
from minipar.prediction import memory_formula
from minipar.prediction.closed_form import Work, gather, layer_works, line, optimizer_seconds, replicas_of
from minipar.prediction.emulated import EmulatedCosts
from minipar.prediction.plan_numbers import PRECISIONS, PlanNumbers, Precision, own_layers, split_of
from minipar.prediction.profiled import ProfiledCosts, microbatch_rows
from minipar.prediction.rank_memory import RankMemory
from minipar.prediction.simulator import simulate
from minipar.program import COPIES, Group, Instruction, Program, Value
from minipar.program.comm_volume import hops, of_collective, of_message
from minipar.program.shape import Shape
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.registry import find
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
    kinds, numbers, by_rows = PRECISIONS[precision], table.numbers(model), {}
    for count in rows:
        costs = analytic.layer_costs(model, count, kinds.activation, selective=selective)
        first = analytic.input_flops(model, count, selective=selective)
        if selective and isinstance(numbers, (GPT, Mixture)):
            core = analytic.core_flops(numbers, count)
            inner = tuple(flops + core for flops in costs.backward[1:-1])
            costs = replace(costs, backward=(costs.backward[0], *inner, costs.backward[-1]))
        by_rows[count] = Layers(costs, costs.forward, costs.backward, first)
    chosen = of_preset(numbers, model, flash=model not in table.PUBLISHED)
    groups = shapes.shape(model, element_size=1).groups
    built = _profile(chosen, kinds, WHOLE, groups, by_rows, 0.0)
    return replace(
        built,
        forward_flops={count: _whole(one.forward) for count, one in by_rows.items()},
        backward_flops={count: _whole(one.backward) for count, one in by_rows.items()},
        input_flops={count: _whole(one.first) for count, one in by_rows.items()},
    )


class Layers(NamedTuple):
    """The layers of a model for one micro-batch: bytes, and seconds of forward, backward, and its input half."""

    bytes: LayerCosts
    forward: Sequence[float]
    backward: Sequence[float]
    first: Sequence[float]


def _profile(
    model: Sizes, each: Precision, division: Division, groups: Sequence[Group], by_rows: Mapping[int, Layers],
    step_seconds: float,
) -> Profile:  # fmt: skip
    """A profile of these layers. `groups` have sizes in numbers."""
    sizes = [sum(group.tensors) for group in groups]
    kept = {rows: analytic.weight_costs(model, rows / division.ep, each.activation, division)[1] for rows in by_rows}
    return Profile(
        forward={rows: tuple(one.forward) for rows, one in by_rows.items()},
        backward={rows: tuple(one.backward) for rows, one in by_rows.items()},
        backward_input={rows: tuple(one.first) for rows, one in by_rows.items()},
        backward_weight={
            rows: tuple(a - b for a, b in zip(one.backward, one.first, strict=True)) for rows, one in by_rows.items()
        },
        output_bytes={rows: _whole(one.bytes.output) for rows, one in by_rows.items()},
        grad_output_bytes={rows: _whole(one.bytes.gradient) for rows, one in by_rows.items()},
        saved_bytes={rows: _whole(one.bytes.saved) for rows, one in by_rows.items()},
        saved_weight_bytes=kept,
        saves_output=(False,) * own_layers(model),
        parameter_bytes=tuple(each.parameter * size for size in sizes),
        gradient_bytes=tuple(each.gradient * size for size in sizes),
        optimizer_bytes=tuple(each.optimizer * size for size in sizes),
        step_seconds=step_seconds,
    )


def _whole(numbers: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(number) for number in numbers)


# on a machine --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineCosts:
    """Costs of a program on a machine with two levels of links. A rank stands for all that share its layers.

    own       times and sizes of layers
    experts   the first group of parameters that is of experts
    """

    program: Program
    numbers: PlanNumbers
    machine: Hardware
    own: ProfiledCosts
    experts: int

    def compute(self, rank: int, ins: Instruction) -> float:
        return self.own.compute(rank, ins)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        if ins.op in COPIES:
            return self.own.size(rank, ins.reads[0]) / self.machine.host_bandwidth, 0.0
        size = of_message(self.own.size, rank, ins)
        return line(self.numbers, self.machine).message(size / self.numbers.tp)

    def collective(self, ins: Instruction) -> float:
        messages = max(1, len(ins.parts))
        size = of_collective(self.program, self.own.size, ins.group[0], ins)
        axes = replicas_of(self.numbers._replace(dp=len(ins.group)), self.machine)
        sizes = [(sum(self.program.groups[g].tensors), g >= self.experts) for g in ins.layers]
        separate = sum(one for one, expert in sizes if expert) / max(1, sum(one for one, _ in sizes))
        each = gather(self.machine, axes.all, size * (1 - separate) / messages)
        each += gather(self.machine, axes.experts, size * separate / messages)
        return hops(ins) * messages * each

    def size(self, rank: int, value: Value) -> float:
        return self.own.size(rank, value)


def simulated(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> Trace:
    """The simulated program of a plan on a machine. In it embedding and head are layers, which run again as blocks do.

    Errors: PlanError for a plan that minipar cannot compile, and for slices.
    """
    n, schedule = numbers, find(numbers.schedule)
    if "slices" in schedule.options:
        raise PlanError(f"schedule={n.schedule}: no program on paper for slices of a sequence; possible are the others")
    options = dict(n.options) | ({"chunks": n.chunks} if "chunks" in schedule.options else {})
    plan = Plan(
        dp=n.dp, pp=n.pp, schedule=n.schedule, microbatches=n.microbatches // n.rounds, accumulate=n.rounds,
        split=split_of(n, model), zero=n.zero, reduce="microbatch" if n.every or n.zero < 2 else "step",
        overlap="backward" if n.overlap else "none", checkpoint=n.checkpoint or "none", offload=n.offload,
        bucket=n.bucket, **options,
    )  # fmt: skip
    each = n.bytes
    groups, experts = analytic.groups(model, n.division)
    shape = Shape(
        own_layers(model),
        tuple(Group(g.layers, tuple(each.gradient * x for x in g.tensors)) for g in groups),
        model.name,
    )
    rows, batch = round(n.rows), round(n.batch)
    layers = _on_machine(layer_works(n, model, machine), n, model, machine)
    seconds = optimizer_seconds(n, machine, sum(sum(group.tensors) for group in groups))
    measured = _profile(model, each, n.division, groups, {rows: layers}, seconds)
    program = plan.compile(shape, costs=measured)
    own = ProfiledCosts(program, measured, batch)
    return simulate(program, MachineCosts(program, n, machine, own, len(groups) - experts))


def _on_machine(works: list[Work], n: PlanNumbers, model: Sizes, machine: Hardware) -> Layers:
    """The layers of a model on a machine."""
    selective = n.checkpoint == "selective"
    costs = analytic.layer_costs(model, n.rows / n.ep, n.bytes.activation, selective=selective, division=n.division)
    hidden = [min(work.sent_back, work.inner) * machine.efficiency.beside * n.fused for work in works]
    backward = [
        sum(work.back) + work.sent_back - less + work.core * selective for work, less in zip(works, hidden, strict=True)
    ]
    first = [whole - work.inner for whole, work in zip(backward, works, strict=True)]
    return Layers(costs, [work.matrix + work.memory + work.sent for work in works], backward, first)
