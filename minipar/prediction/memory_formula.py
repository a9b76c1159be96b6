"""Bytes on every rank of a plan, from formulas: what `minipar memory` prints. No torch, no device, any size.

    parameters, gradients, optimizer    ZeRO's table, for every parameter that a rank holds, over N = dp ranks:
                                            stage 0   p + g + o              stage 2   p + (g + o) / N
                                            stage 1   p + g + o / N          stage 3   (p + g + o) / N
    activations                         layer by layer; f micro-batches in flight, one of them in its backward
    buffers                             what is there for a while: two gathered layers, two buckets, messages

where (p, g, o) is (4, 4, 8) bytes in float32 and (2, 2, 12) in bf16 with float32 master copies, both with Adam. The
number of micro-batches in flight is counted in the plan's own program. `memory_terms` writes them out with numbers.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from minipar.costs import analytic
from minipar.costs.analytic import WHOLE, Division
from minipar.costs.recomputation import keep_everything, memory
from minipar.errors import PlanError
from minipar.models import shapes, table
from minipar.models.table import GPT, Branchy
from minipar.program import Action, BackwardInput, BackwardWeight, Forward, Group, Program
from minipar.program.rows import split_rows
from minipar.program.shape import Shape
from minipar.program.verify.staleness import alive
from minipar.strategies import keys
from minipar.strategies.layout import Layout
from minipar.strategies.passes import segments
from minipar.strategies.passes.data_parallel import split_buckets
from minipar.strategies.plan import Plan

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


class Own(NamedTuple):
    """Where a rank's model states come from. Numbers are parameters, before anything is shared out.

    whole      numbers of groups that no replica shares out
    shared     (numbers, among how many ranks) of those that ZeRO shares out: of the rest, and of experts
    versions   of the weights that are alive at once
    gathered   bytes for parameters of two neighbouring layers, where they come from elsewhere
    buckets    bytes of two neighbouring gradient buckets
    """

    states: States
    whole: int
    shared: tuple[tuple[int, int], ...]
    versions: int
    gathered: int
    buckets: int


class Kept(NamedTuple):
    """Where a rank's activations come from: by chunk what one micro-batch holds between forward and backward (`each`),
    and how many are `flying` when most is held; more bytes while one goes backward; messages; the largest layer."""

    held: int
    more: int
    messages: int
    layer: int
    each: tuple[int, ...] = ()
    flying: tuple[int, ...] = ()


class Detail(NamedTuple):
    """A rank's bytes, and where they come from; `rows` of its largest micro-batch."""

    memory: RankMemory
    own: Own
    kept: Kept
    rows: int


def in_flight(actions: Iterable[Action], sizes: Sequence[float], more: Sequence[float] = ()) -> float:
    """The most that a rank's micro-batches keep at once, where one keeps `sizes[c]` of chunk c.

    Of a split backward it is kept until the weight half is done. A backward takes `more[c]` while it runs.
    """
    return _most(actions, sizes, more)[0]


def _most(
    actions: Iterable[Action], sizes: Sequence[float], more: Sequence[float] = ()
) -> tuple[float, tuple[int, ...]]:
    """The most, and how many micro-batches of each chunk keep it."""
    counts = [0] * len(sizes)
    now = most = 0.0
    then = tuple(counts)
    for action in actions:
        forward = isinstance(action, Forward)
        if forward:
            counts[action.chunk] += 1
            now += sizes[action.chunk]
        extra = more[action.chunk] if more and not forward and not isinstance(action, BackwardWeight) else 0
        if now + extra > most:
            most, then = now + extra, tuple(counts)
        if not forward and not isinstance(action, BackwardInput):
            counts[action.chunk] -= 1
            now -= sizes[action.chunk]
    return most, then


def per_rank(
    plan: Plan, model: str, batch: int | None = None, division: Division = WHOLE, **overrides: Any
) -> list[RankMemory]:
    """Bytes of each rank, in rank order, for a step of `batch` rows; default one row for every micro-batch.

    division    tensor and expert parallelism, of which a plan knows nothing: of one of the ranks that share a part
    overrides   numbers that replace the model's, such as layers=48
    Errors: `PlanError` for a model that is not known, and for what does not fit it.
    """
    return [detail.memory for detail in details(plan, model, batch, division, **overrides)]


def details(
    plan: Plan, model: str, batch: int | None = None, division: Division = WHOLE, **overrides: Any
) -> list[Detail]:
    """As `per_rank`, with what the bytes come from."""
    numbers = table.numbers(model, **overrides)
    division.check(numbers, plan.dp)
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
    given: dict[str, Any] = {"division": division, **overrides}
    costs = analytic.layer_costs(model, max(1, *largest), **given) if plan.split == "auto" else None
    shape, experts = shapes.shape(model, element_size=1, **overrides), 0
    if isinstance(numbers, GPT) and division != WHOLE:
        groups, experts = analytic.groups(numbers, division)
        shape = Shape(shape.layers, groups, shape.name)
    layout = replace(plan, dp=1, accumulate=1).layout(shape, costs)
    own = [_own(plan, layout, rank, experts, division.ep) for rank in range(plan.pp)]
    found: dict[int, list[Detail]] = {}
    for rows in set(largest):
        kept = _activations(plan, model, layout, rows, given)
        found[rows] = [
            Detail(_on_device(plan, own[rank], kept[rank]), own[rank], kept[rank], rows) for rank in range(plan.pp)
        ]
    return [found[rows][rank] for rows in largest for rank in range(plan.pp)]


# model states --------------------------------------------------------------------------------------------------------


def _own(plan: Plan, layout: Layout, rank: int, experts: int, ep: int) -> Own:
    """Model states of a rank, and the buffers that sharding or offloading them takes."""
    precision, groups = PRECISIONS[plan.precision], layout.shape.groups
    held = layout.groups(rank)
    versions = _versions(plan)[rank]
    # What is tied between stages stays whole: its slices would belong to ranks with different work.
    alone = [g for g in held if len(layout.holders(g)) == 1]
    among = {g: plan.dp // (ep if g >= len(groups) - experts else 1) for g in alone}
    sharded = [g for g in alone if among[g] > 1]
    parts = [states(_numbers(groups[g]), among.get(g, 1), plan.zero if g in sharded else 0, precision) for g in held]
    total = sum(_numbers(groups[g]) for g in held)
    own = States(
        precision.parameter * (versions - 1) * total + sum(p.parameters for p in parts),
        sum(p.gradients for p in parts),
        sum(p.optimizer for p in parts),
    )
    gathered = buckets = 0
    if "parameters" in plan.offload or (plan.zero == 3 and sharded):
        moving = held if "parameters" in plan.offload else sharded
        mine = [l for chunk in layout.chunks(rank) for l in chunk]
        layers = [sum(_numbers(groups[g]) for g in moving if l in groups[g].layers) for l in mine]
        gathered = precision.parameter * _neighbours(layers)  # one layer computes, the next is on its way
    if plan.zero >= 2:
        sizes = [Group(group.layers, (precision.gradient * _numbers(group),)) for group in groups]
        messages = split_buckets(sharded[::-1], sizes, plan.messages)
        buckets = _neighbours([sum(sum(sizes[g].tensors) for g in bucket) for bucket in messages])
    shared = {
        n: sum(_numbers(groups[g]) for g in sharded if among[g] == n) for n in sorted(set(among.values())) if n > 1
    }
    whole = total - sum(shared.values())
    return Own(own, whole, tuple((numbers, n) for n, numbers in shared.items() if numbers), versions, gathered, buckets)


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


def _activations(plan: Plan, model: str, layout: Layout, rows: int, given: dict[str, Any]) -> list[Kept]:
    """Per rank: bytes that wait, bytes more at the peak, buffers for messages, and the most that one layer keeps."""
    element = PRECISIONS[plan.precision].activation
    if rows == 0:
        return [Kept(0, 0, 0, 0)] * plan.pp
    selective, division = plan.checkpoint == "selective", given["division"]
    costs = analytic.layer_costs(model, rows, element, selective=selective, **given)
    everything = analytic.layer_costs(model, rows, element, **given).saved
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
        if division.ep > 1:  # rows on their way to experts of other ranks, and back
            messages += 2 * division.top * costs.output[0]
        mine = [l for layers in layout.chunks(rank) for l in layers]
        largest = max(costs.saved[l] + costs.output[l] for l in mine)
        (most, flying), top = _most(actions[rank], waiting), in_flight(actions[rank], waiting, more)
        found.append(Kept(int(most), int(top) - int(most), messages, largest, tuple(waiting), flying))
    return found


def _on_device(plan: Plan, own: Own, kept: Kept) -> RankMemory:
    """What stays on the device, and what the host has instead."""
    moved, states = {name: name in plan.offload for name in keys.OFFLOADS}, own.states
    held = min(kept.held, 2 * kept.layer) if moved["activations"] else kept.held  # one layer in use, one on its way
    host = states.optimizer * moved["optimizer"] + states.parameters * moved["parameters"] + kept.held - held
    return RankMemory(
        states.parameters * (not moved["parameters"]),
        states.gradients,
        states.optimizer * (not moved["optimizer"]),
        held + kept.more,
        own.gathered + own.buckets + kept.messages,
        held,
        host,
    )
