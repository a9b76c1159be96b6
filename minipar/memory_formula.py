"""Bytes on every rank of a plan, from formulas: what `minipar memory` prints. No torch, no device, any size.

    parameters, gradients, optimizer    ZeRO's table, for every parameter that a rank holds, over N = dp ranks:
                                            stage 0   p + g + o              stage 2   p + (g + o) / N
                                            stage 1   p + g + o / N          stage 3   (p + g + o) / N
    activations                         layer by layer; f micro-batches in flight, one of them in its backward
    buffers                             what is there for a while: two gathered layers, two buckets, messages

where (p, g, o) is (4, 4, 8) bytes in float32 and (2, 2, 12) in bf16 with float32 master copies, both with Adam. The
number of micro-batches in flight is counted in the plan's own program.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from minipar import settings, strategies
from minipar.costs import presets
from minipar.costs.profiled import split_rows
from minipar.costs.recomputation import LayerCosts, Move, keep_everything, memory
from minipar.errors import PlanError
from minipar.models.table import GPT
from minipar.plan import Plan
from minipar.program import Group
from minipar.strategies import segments
from minipar.strategies.data_parallel import split_buckets
from minipar.strategies.layers import Layout
from minipar.trace import Trace


@dataclass(frozen=True)
class Precision:
    """Bytes for each parameter, and for each number of an activation."""

    parameter: int
    gradient: int
    optimizer: int
    activation: int


PRECISIONS = {
    "float32": Precision(4, 4, 8, 4),  # Adam's two moments
    "bf16": Precision(2, 2, 12, 2),  # master parameters and Adam's moments in float32; ZeRO's K = 12
}


@dataclass(frozen=True)
class States:
    """Bytes of model states on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at its peak.

    held   of `activations`, what waits between forward and backward; the rest is there while one of them goes backward
    host   what was offloaded
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    held: int
    host: int

    @property
    def total(self) -> int:
        """All that is on the device."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def states(parameters: int, ranks: int, zero: int, precision: Precision = PRECISIONS["bf16"]) -> States:
    """Model states on each of `ranks` data-parallel ranks, by ZeRO's stage; shards are rounded up."""
    shard = -(-parameters // ranks)
    return States(
        precision.parameter * (shard if zero >= 3 else parameters),
        precision.gradient * (shard if zero >= 2 else parameters),
        precision.optimizer * (shard if zero >= 1 else parameters),
    )


def in_flight(plan: Plan) -> tuple[list[int], int]:
    """(micro-batches that each stage holds at most, receives posted ahead), from the program of one replica.

    One layer a stage and one round of accumulation: neither changes the order.
    """
    small = Plan(pp=plan.pp, schedule=plan.schedule, microbatches=plan.microbatches)
    program = small.compile(layers=small.pp, check=False)
    found = Trace(program, (), (), lambda rank, value: 0).in_flight()
    return [int(count) for count in found], program.receives_ahead


def per_rank(plan: Plan, model: str, batch: int | None = None) -> list[RankMemory]:
    """Bytes of each rank, in rank order, for a step of `batch` rows; default one row for every micro-batch.

    Errors: `PlanError` for a model that is not known, and for what does not fit it.
    """
    numbers = presets.model(model)
    if plan.checkpoint == "selective" and not isinstance(numbers, GPT):
        raise PlanError(
            f"checkpoint=selective: {model} has no attention; possible are the others of {segments.POSSIBLE}"
        )
    count = plan.total_microbatches
    batch = plan.dp * count if batch is None else batch
    edges = split_rows(batch, plan.dp * count)
    largest = [len(edges[replica * count]) for replica in range(plan.dp)]  # the first ones have more rows
    costs = presets.layer_costs(model, max(1, *largest)) if plan.split == "auto" else None
    layout = replace(plan, dp=1, accumulate=1).layout(presets.shape(model, element_size=1), costs)
    flying, ahead = in_flight(plan)
    own = [_own(plan, layout, stage) for stage in range(plan.pp)]
    found: dict[int, list[RankMemory]] = {}
    for rows in set(largest):
        of_step = _activations(plan, model, layout, flying, ahead, rows)
        found[rows] = [_on_device(plan, *own[stage], *of_step[stage]) for stage in range(plan.pp)]
    return [found[rows][stage] for rows in largest for stage in range(plan.pp)]


# model states --------------------------------------------------------------------------------------------------------


def _own(plan: Plan, layout: Layout, stage: int) -> tuple[States, int]:
    """Model states of a stage, and the buffers that sharding or offloading them takes."""
    precision, groups = PRECISIONS[plan.precision], layout.shape.groups
    held = layout.groups(stage)
    # What is tied between stages stays whole: its slices would belong to ranks with different work.
    sharded = [g for g in held if len(layout.holders(g)) == 1] if plan.dp > 1 else []
    parts = [states(_numbers(groups[g]), plan.dp, plan.zero if g in sharded else 0, precision) for g in held]
    own = States(sum(p.parameters for p in parts), sum(p.gradients for p in parts), sum(p.optimizer for p in parts))
    buffers = 0
    if "parameters" in plan.offload or (plan.zero == 3 and sharded):
        moving = held if "parameters" in plan.offload else sharded
        layers = [sum(_numbers(groups[g]) for g in moving if l in groups[g].layers) for l in layout.layers(stage)]
        buffers += precision.parameter * _neighbours(layers)  # one layer computes, the next is on its way
    if plan.zero >= 2:
        sizes = [Group(group.layers, (precision.gradient * _numbers(group),)) for group in groups]
        buckets = split_buckets(sharded[::-1], sizes, plan.bucket)
        buffers += _neighbours([sum(sum(sizes[g].tensors) for g in bucket) for bucket in buckets])
    return own, buffers


def _numbers(group: Group) -> int:
    return sum(group.tensors)  # (of a shape with one byte a number)


def _neighbours(sizes: Sequence[int]) -> int:
    """The most that two neighbours come to: one that is used or filled, one that is on its way."""
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))


# activations ---------------------------------------------------------------------------------------------------------


def _activations(
    plan: Plan, model: str, layout: Layout, flying: Sequence[int], ahead: int, rows: int
) -> list[tuple[int, int, int, int]]:
    """Per stage: bytes that wait, bytes more at the peak, buffers for messages, and the most that one layer keeps."""
    element = PRECISIONS[plan.precision].activation
    if rows == 0:
        return [(0, 0, 0, 0)] * plan.pp
    selective = plan.checkpoint == "selective"
    costs = presets.layer_costs(model, rows, element, selective=selective)
    everything = presets.layer_costs(model, rows, element).saved
    schedules = _schedules(plan, layout, costs)
    found = []
    for stage, (schedule, several) in enumerate(zip(schedules, flying, strict=True)):
        layers = layout.layers(stage)
        held, peak = memory(costs.chain(layers.start, layers.stop), schedule)
        messages = 0
        if stage:
            received = costs.output[layers.start - 1]
            held, peak = held + received, peak + received
            messages += min(ahead, plan.total_microbatches - several) * received
        if stage < plan.pp - 1:
            messages += min(ahead, plan.total_microbatches - 1) * costs.gradient[layers.stop - 1]
        most = max(costs.saved[l] + costs.output[l] for l in layers)
        core = max(everything[l] - costs.saved[l] for l in layers)  # of the one that is computed again
        found.append((several * held, peak - held + core, messages, most))
    return found


def _schedules(plan: Plan, layout: Layout, costs: LayerCosts) -> list[tuple[Move, ...]]:
    """How a micro-batch goes through each stage: what is kept, and what runs again."""
    order = strategies.find(plan.schedule).generate
    actions = [list(order(stage, plan.pp, plan.microbatches)) for stage in range(plan.pp)]
    found = segments.schedules(plan.checkpoint, layout, actions, costs)
    return [moves or keep_everything(layout.split[stage]) for stage, moves in enumerate(found)]


def _on_device(plan: Plan, own: States, gathered: int, held: int, more: int, messages: int, layer: int) -> RankMemory:
    """What stays on the device, and what the host has instead."""
    moved = {name: name in plan.offload for name in settings.OFFLOADS}
    kept = min(held, 2 * layer) if moved["activations"] else held  # one layer in use, one on its way
    host = own.optimizer * moved["optimizer"] + own.parameters * moved["parameters"] + held - kept
    return RankMemory(
        own.parameters * (not moved["parameters"]),
        own.gradients,
        own.optimizer * (not moved["optimizer"]),
        kept + more,
        gathered + messages,
        kept,
        host,
    )
