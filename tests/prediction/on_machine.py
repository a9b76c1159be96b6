"""The whole program of a plan on a machine, compiled and simulated with the operators and the two-level links of it.

The estimates, which compile nothing, are compared with this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from minipar.costs import analytic
from minipar.costs.hardware import PRESETS, Hardware, hardware
from minipar.costs.recomputation import LayerCosts
from minipar.costs.stacks import STACKS
from minipar.errors import PlanError
from minipar.models.sizes import Chain, Sizes
from minipar.prediction.closed_form import (
    Work,
    as_run,
    gather,
    line,
    optimizer_seconds,
    replicas_of,
    works,
)
from minipar.prediction.estimating import estimate
from minipar.prediction.on_paper import profile_of
from minipar.prediction.plan_numbers import PlanNumbers, own_layers, split_of
from minipar.prediction.program_costs import ProgramCosts
from minipar.prediction.simulator import simulate
from minipar.program import COPIES, Group, Instruction
from minipar.program.comm_volume import hops, of_collective, of_message
from minipar.program.shape import Shape
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.registry import find
from minipar.trace import Trace


def whole(plan: str, model: str, machine: str | Hardware, batch: int | None = None) -> Trace:
    """The trace of a step of a plan, as `estimate` reads it."""
    found = estimate(plan, model, machine, batch)
    return simulated(found.numbers, found.model, hardware(machine))


ONE = PlanNumbers()


@dataclass(frozen=True)
class MachineCosts(ProgramCosts):
    """Costs of a program on a machine with two levels of links. A rank stands for all that share its layers.

    experts   the first group of parameters that is of experts
    """

    numbers: PlanNumbers = ONE
    machine: Hardware = PRESETS["a100-80gb"]
    experts: int = 0

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        if ins.op in COPIES:
            return self.size(rank, ins.reads[0]) / self.machine.host_bandwidth, 0.0
        size = of_message(self.size, rank, ins)
        return line(self.numbers, self.machine).message(size / self.numbers.tp)

    def collective(self, ins: Instruction) -> float:
        messages = max(1, len(ins.parts))
        size = of_collective(self.program, self.size, ins.group[0], ins)
        axes = replicas_of(self.numbers._replace(dp=len(ins.group)), self.machine)
        sizes = [(sum(self.program.groups[g].tensors), g >= self.experts) for g in ins.layers]
        separate = sum(one for one, expert in sizes if expert) / max(1, sum(one for one, _ in sizes))
        each = gather(self.machine, axes.all, size * (1 - separate) / messages)
        each += gather(self.machine, axes.experts, size * separate / messages)
        return hops(ins) * messages * each


def simulated(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> Trace:
    """The simulated program of a plan on a machine. In it embedding and head are layers, which run again as blocks do.

    Errors: PlanError for a plan that minipar cannot compile, and for slices.
    """
    n, schedule = numbers, find(numbers.schedule)
    model, machine = as_run(model, machine, n.software)
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
    found = works(model, machine, n.precision, n.rows, n.division, n.checkpoint)
    if not isinstance(model, Chain):
        found = (found[0], *(found[1],) * model.layers, found[2])
    layers = {rows: _on_machine(found, n, model, machine)}
    seconds = optimizer_seconds(n, machine, sum(sum(group.tensors) for group in groups))
    measured = profile_of(model, each, n.division, groups, layers, seconds)
    program = plan.compile(shape, costs=measured)
    costs = MachineCosts(program, measured, batch, numbers=n, machine=machine, experts=len(groups) - experts)
    return simulate(program, costs)


def _on_machine(
    found: Sequence[Work], n: PlanNumbers, model: Sizes, machine: Hardware
) -> tuple[LayerCosts, list[float]]:
    """The layers of a model on a machine, and seconds of their input halves."""
    selective = n.checkpoint == "selective"
    costs = analytic.layer_costs(model, n.rows / n.ep, n.bytes.activation, selective=selective, division=n.division)
    hidden = [min(work.summed, work.weight) * machine.rates.beside * STACKS[n.software].fused for work in found]
    backward = [work.backward - less + work.inner for work, less in zip(found, hidden, strict=True)]
    first = [whole - work.weight for whole, work in zip(backward, found, strict=True)]
    return replace(costs, forward=tuple(work.forward for work in found), backward=tuple(backward)), first
