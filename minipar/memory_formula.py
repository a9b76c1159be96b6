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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from minipar import settings
from minipar.costs import presets
from minipar.costs.profiled import split_rows
from minipar.costs.recomputation import keep_everything, memory
from minipar.errors import PlanError
from minipar.models.table import GPT, Branchy
from minipar.plan import Plan
from minipar.program import Action, BackwardInput, BackwardWeight, Forward, Group, Program
from minipar.staleness import alive
from minipar.strategies import segments
from minipar.strategies.data_parallel import split_buckets
from minipar.strategies.layout import Layout

AHEAD = Program.receives_ahead


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


def in_flight(actions: Iterable[Action], sizes: Sequence[float], more: Sequence[float] = ()) -> float:
    """The most that a rank's micro-batches keep at once, where one keeps `sizes[c]` of chunk c.

    Of a split backward it is kept until the weight half is done. A backward takes `more[c]` while it runs.
    """
    now = most = 0.0
    for action in actions:
        if isinstance(action, Forward):
            now += sizes[action.chunk]
            most = max(most, now)
            continue
        most = max(most, now + (more[action.chunk] if more and not isinstance(action, BackwardWeight) else 0))
        if not isinstance(action, BackwardInput):
            now -= sizes[action.chunk]
    return most


def per_rank(plan: Plan, model: str, batch: int | None = None) -> list[RankMemory]:
    """Bytes of each rank, in rank order, for a step of `batch` rows; default one row for every micro-batch.

    Errors: `PlanError` for a model that is not known, and for what does not fit it.
    """
    numbers = presets.model(model)
    if plan.checkpoint == "selective" and not isinstance(numbers, GPT):
        raise PlanError(
            f"checkpoint=selective: {model} has no attention; possible are the others of {segments.POSSIBLE}"
        )
    if plan.slice_count > 1:
        raise PlanError(
            f"memory: no formula for schedule={plan.schedule}, whose slices differ; possible is `minipar run --memory`"
        )
    if plan.place is not None or isinstance(numbers, Branchy):
        what = (
            f"{model}, whose layers branch" if isinstance(numbers, Branchy) else "place=, which cuts stages in pieces"
        )
        raise PlanError(f"memory: no formula for {what}; possible is `minipar run --memory`")
    count = plan.total_microbatches
    batch = plan.dp * count if batch is None else batch
    edges = split_rows(batch, plan.dp * count)
    largest = [len(edges[replica * count]) for replica in range(plan.dp)]  # the first ones have more rows
    costs = presets.layer_costs(model, max(1, *largest)) if plan.split == "auto" else None
    layout = replace(plan, dp=1, accumulate=1).layout(presets.shape(model, element_size=1), costs)
    own = [_own(plan, layout, rank) for rank in range(plan.pp)]
    found: dict[int, list[RankMemory]] = {}
    for rows in set(largest):
        of_step = _activations(plan, model, layout, rows)
        found[rows] = [_on_device(plan, *own[rank], *of_step[rank]) for rank in range(plan.pp)]
    return [found[rows][rank] for rows in largest for rank in range(plan.pp)]


# model states --------------------------------------------------------------------------------------------------------


def _own(plan: Plan, layout: Layout, rank: int) -> tuple[States, int]:
    """Model states of a rank, and the buffers that sharding or offloading them takes."""
    precision, groups = PRECISIONS[plan.precision], layout.shape.groups
    held = layout.groups(rank)
    kept = _versions(plan)[rank] - 1  # of the weights, besides the newest
    # What is tied between stages stays whole: its slices would belong to ranks with different work.
    sharded = [g for g in held if len(layout.holders(g)) == 1] if plan.dp > 1 else []
    parts = [states(_numbers(groups[g]), plan.dp, plan.zero if g in sharded else 0, precision) for g in held]
    stashed = precision.parameter * kept * sum(_numbers(groups[g]) for g in held)
    own = States(
        stashed + sum(p.parameters for p in parts), sum(p.gradients for p in parts), sum(p.optimizer for p in parts)
    )
    buffers = 0
    if "parameters" in plan.offload or (plan.zero == 3 and sharded):
        moving = held if "parameters" in plan.offload else sharded
        mine = [l for chunk in layout.chunks(rank) for l in chunk]
        layers = [sum(_numbers(groups[g]) for g in moving if l in groups[g].layers) for l in mine]
        buffers += precision.parameter * _neighbours(layers)  # one layer computes, the next is on its way
    if plan.zero >= 2:
        sizes = [Group(group.layers, (precision.gradient * _numbers(group),)) for group in groups]
        buckets = split_buckets(sharded[::-1], sizes, plan.messages)
        buffers += _neighbours([sum(sum(sizes[g].tensors) for g in bucket) for bucket in buckets])
    return own, buffers


def _versions(plan: Plan) -> list[int]:
    """How many versions of its weights each rank holds, counted in the program of a run."""
    if not plan.asynchronous:
        return [1] * plan.pp
    one = replace(plan, split=None, checkpoint="none")
    return [alive(row) for row in one.compile(layers=plan.pp, steps=plan.settling_steps, check=False).ranks]


def _numbers(group: Group) -> int:
    return sum(group.tensors)  # (of a shape with one byte a number)


def _neighbours(sizes: Sequence[int]) -> int:
    """The most that two neighbours come to: one that is used or filled, one that is on its way."""
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))


# activations ---------------------------------------------------------------------------------------------------------


def _activations(plan: Plan, model: str, layout: Layout, rows: int) -> list[tuple[int, int, int, int]]:
    """Per rank: bytes that wait, bytes more at the peak, buffers for messages, and the most that one layer keeps."""
    element = PRECISIONS[plan.precision].activation
    if rows == 0:
        return [(0, 0, 0, 0)] * plan.pp
    selective = plan.checkpoint == "selective"
    costs = presets.layer_costs(model, rows, element, selective=selective)
    everything = presets.layer_costs(model, rows, element).saved
    steps = plan.settling_steps if plan.asynchronous else 1
    actions = [plan.actions(rank, steps) for rank in range(plan.pp)]
    schedules = segments.schedules(plan.checkpoint, layout, actions, costs)
    found = []
    for rank, stages in enumerate(layout.placement):
        waiting, more = [], []
        messages = 0
        for c, stage in enumerate(stages):
            layers = layout.layers(stage)
            chain = costs.chain(layers.start, layers.stop)
            held, peak = memory(chain, schedules[stage] or keep_everything(len(layers)))
            several = in_flight(actions[rank], [k == c for k in range(len(stages))])
            # From a stage with copies both pipelines go on to another rank, and share the links.
            copies = sum(stage in mine for mine in layout.placement)
            ahead = AHEAD // copies
            others = [s for s in (stage - 1, stage + 1) if 0 <= s < len(layout.split)]
            others = [s for s in others if copies > 1 or s not in stages]
            if stage - 1 in others:
                received = costs.output[layers.start - 1]
                held, peak = held + received, peak + received
                messages += min(ahead, plan.total_microbatches - int(several)) * received
            if stage + 1 in others:
                messages += min(ahead, plan.total_microbatches - 1) * costs.gradient[layers.stop - 1]
            core = max(everything[l] - costs.saved[l] for l in layers)  # of the one that is computed again
            waiting.append(held)
            more.append(peak - held + core)
        mine = [l for layers in layout.chunks(rank) for l in layers]
        most = max(costs.saved[l] + costs.output[l] for l in mine)
        held, peak = int(in_flight(actions[rank], waiting)), int(in_flight(actions[rank], waiting, more))
        found.append((held, peak - held, messages, most))
    return found


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
