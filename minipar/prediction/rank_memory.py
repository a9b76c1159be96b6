"""Bytes on one rank: the formula of memory, which all predictions without a program use.

    parameters, gradients, optimizer    ZeRO's table, for every parameter that a rank holds, over N ranks:
                                            stage 0   p + g + o              stage 2   p + (g + o) / N
                                            stage 1   p + g + o / N          stage 3   (p + g + o) / N
    activations                         layer by layer; f micro-batches in flight, one of them in its backward. Of a
                                        backward in halves, some wait for the weight half, which keeps other bytes
    buffers                             temporary ones: two gathered layers, two buckets, messages

where (p, g, o) is (4, 4, 8) bytes in float32 and (2, 2, 12) in bf16 with float32 master copies, both with Adam. The
bytes of layers are those of costs/analytic.py. The micro-batches in flight are counted in the schedule's order.
Everything that does not change with ZeRO and the number of replicas is kept, so that a search can ask for many plans.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter, mul
from typing import Any, NamedTuple

from minipar.costs import analytic
from minipar.costs.analytic import Division
from minipar.costs.hardware import Hardware
from minipar.costs.recomputation import Chain as LayersInOrder
from minipar.costs.recomputation import LayerCosts, Move, in_segments, keep_everything, memory
from minipar.costs.stacks import STACKS
from minipar.errors import PlanError
from minipar.models.sizes import Chain, Sizes, Transformer, ends_are_layers
from minipar.prediction.plan_numbers import (
    FLOAT,
    PRECISIONS,
    Chunk,
    Kind,
    PlanNumbers,
    Precision,
    copies_of,
    kinds_of,
    own_layers,
    placement_of,
    split_of,
)
from minipar.program import Action, BackwardInput, BackwardWeight, Forward, Group, Op, Program
from minipar.program.shape import Shape
from minipar.program.verify.staleness import alive
from minipar.strategies import segments
from minipar.strategies.buckets import split_buckets
from minipar.strategies.layout import Layout
from minipar.strategies.plan import Plan
from minipar.strategies.schedules.registry import find
from minipar.strategies.segments import INSIDE

AHEAD = Program.receives_ahead
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


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

    held   the part of `activations` that is kept between forward and backward; the rest exists only during a backward
    host   bytes that were offloaded
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
    """Where a rank's model states come from. Parameters are counted before anything is shared out.

    states     bytes of model states
    whole      number of parameters of groups that are not shared out
    shared     (number of parameters, number of ranks) of groups that ZeRO shares out; experts have their own entry
    versions   versions of the weights that are alive at the same time
    gathered   bytes for parameters of two neighbouring layers, if they are gathered or fetched
    buckets    bytes of two neighbouring gradient buckets
    each       bytes of each kind of number
    """

    states: States
    whole: int
    shared: tuple[tuple[int, int], ...]
    versions: int
    gathered: int
    buckets: int
    each: Precision


class ActivationSources(NamedTuple):
    """Where a rank's activations come from, in bytes.

    held       most that is kept between forward and backward
    more       what a backward needs in addition
    messages   buffers for messages
    layer      the largest layer
    each       for each kind of chunk, what one micro-batch keeps between forward and backward; then, for each, what it
               keeps between the halves of a backward
    flying     of each of these, how many micro-batches there are when most is held
    """

    held: int
    more: int
    messages: int
    layer: int
    each: tuple[int, ...] = ()
    flying: tuple[int, ...] = ()


class Detail(NamedTuple):
    """A rank's bytes, and where they come from. `rows` is the number of rows of its largest micro-batch."""

    memory: RankMemory
    own: Own
    kept: ActivationSources
    rows: float


def of_ranks(numbers: PlanNumbers, model: Sizes) -> list[Detail]:
    """The bytes of every rank of one pipeline. Ranks that share layers, and replicas, have the same."""
    return [_detail(numbers, model, facts) for facts in of_kinds(numbers.pipeline, model, every=True)]


def host_of_node(each: int, numbers: PlanNumbers, machine: Hardware) -> int:
    """Bytes on one node's host, if every device has so many there."""
    return each * min(machine.per_node, numbers.ranks)


def fullest(numbers: PlanNumbers, model: Sizes) -> RankMemory:
    """The bytes of the rank that needs most."""
    found = (_detail(numbers, model, facts).memory for facts in of_kinds(numbers.pipeline, model))
    return max(found, key=attrgetter("total"))


class Facts(NamedTuple):
    """What a rank holds and keeps, whatever is shared out among replicas."""

    kind: Kind
    copies: int
    parts: tuple[Part, ...]
    holding: Holding
    versions: int
    kept: ActivationSources


@lru_cache(8192)
def of_kinds(work: PlanNumbers, model: Sizes, every: bool = False) -> tuple[Facts, ...]:
    """For each kind of rank of a pipeline, the one in which most micro-batches are in flight; or `every` rank."""
    n, found = work, []
    first = not every and find(n.schedule).form is not None and not n.options  # (the first of alike ranks has most)
    for kind in kinds_of(n, model):
        held = holding(model, n.division, kind.chunks)
        for rank in range(kind.first, kind.first + (1 if first else kind.alike)):
            parts = _parts(n, model, kind, rank)
            kept = _activations(n, model, parts, rank) if n.rows else ActivationSources(0, 0, 0, 0)
            found.append(Facts(kind, copies_of(n), parts, held, versions_of(pipeline(n))[rank], kept))
    return tuple(found)


def _detail(numbers: PlanNumbers, model: Sizes, facts: Facts) -> Detail:
    own = _own(numbers, model, facts)
    return Detail(_on_device(numbers, own, facts.kept), own, facts.kept, numbers.rows)


# model states --------------------------------------------------------------------------------------------------------

_WHOLE, _BY_REPLICAS, _BY_EXPERTS = 0, 1, 2  # over which ranks ZeRO shares out a group of parameters


class Holding(NamedTuple):
    """Parameters of a rank, in numbers.

    groups      (numbers in a group, how many such groups, over which ranks they are shared out)
    neighbours  most that two neighbouring layers have together: of all parameters, and of those that are shared out
    """

    groups: tuple[tuple[int, int, int], ...]
    neighbours: tuple[int, int]


def parameters_of(model: Sizes, division: Division, chunks: tuple[Chunk, ...]) -> tuple[int, int]:
    """Numbers of parameters of a rank: those that all its replicas have, and those of its own experts."""
    found = [0, 0]
    for numbers, count, shares in holding(model, division, chunks).groups:
        found[shares == _BY_EXPERTS] += numbers * count
    return found[0], found[1]


@lru_cache(4096)
def holding(model: Sizes, division: Division, chunks: tuple[Chunk, ...]) -> Holding:
    """The parameters of a rank with these chunks."""
    groups, shares = _groups_of(model, division, chunks)
    sizes = {g: sum(groups[g].tensors) for g in shares}
    layers = {layer: [0, 0] for chunk in chunks for layer in range(chunk.start, chunk.stop)}
    for g, size in sizes.items():
        for layer in groups[g].layers:
            if layer in layers:
                layers[layer][0] += size
                layers[layer][1] += size * (shares[g] != _WHOLE)
    counted = Counter((size, shares[g]) for g, size in sizes.items())
    every, shared = zip(*layers.values(), strict=True)
    several = tuple((size, count, share) for (size, share), count in counted.items())
    return Holding(several, (_neighbours(every), _neighbours(shared)))


def _groups_of(model: Sizes, division: Division, chunks: tuple[Chunk, ...]) -> tuple[tuple[Group, ...], dict[int, int]]:
    """All groups of the model; and of those of a rank, over which ranks each of them is shared out.

    A group that is tied between stages stays whole: its slices would belong to ranks with different work.
    """
    groups, experts = analytic.groups(model, division)
    held = {layer for chunk in chunks for layer in range(chunk.start, chunk.stop)}
    shares = {
        g: _WHOLE if not held.issuperset(group.layers)
        else _BY_EXPERTS if g >= len(groups) - experts else _BY_REPLICAS
        for g, group in enumerate(groups) if not held.isdisjoint(group.layers)
    }  # fmt: skip
    return groups, shares


@lru_cache(4096)
def _buckets(
    model: Sizes, division: Division, chunks: tuple[Chunk, ...], bucket: Any, element: int, divided: Any
) -> int:
    """Bytes of the two largest neighbouring buckets of the gradients that are shared out."""
    groups, shares = _groups_of(model, division, chunks)
    sharded = [g for g, share in shares.items() if divided[share]]
    sizes = [Group(group.layers, (element * sum(group.tensors),)) for group in groups]
    messages = split_buckets(sharded[::-1], sizes, bucket)
    return _neighbours([sum(sum(sizes[g].tensors) for g in message) for message in messages])


def _own(numbers: PlanNumbers, model: Sizes, facts: Facts) -> Own:
    """Model states of a rank, and the buffers that are needed to shard or offload them."""
    n, each, here = numbers, numbers.bytes, facts.holding
    replicas = n.dp * n.cp * (facts.copies if n.zero else 1)
    among = 1, replicas * n.ep, replicas  # (a group is shared out among so many ranks)
    late = n.zero >= 2 and not n.every  # gradients stay whole until the step
    parameters = gradients = optimizer = total = 0
    shared: dict[int, int] = {}
    for size, count, shares in here.groups:
        ranks = among[shares]
        one = states(size, ranks, n.zero, each.kept(n.zero) if ranks > 1 else each)
        parameters += count * (one.parameters * facts.versions)
        gradients += count * (each.gradient * size if late else one.gradients)
        optimizer += count * one.optimizer
        total += count * size
        if ranks > 1:
            shared[ranks] = shared.get(ranks, 0) + count * size
    gathered = buckets = 0
    if "parameters" in n.offload or (n.zero == 3 and shared):  # one layer computes, the next one is under way
        gathered = each.parameter * here.neighbours["parameters" not in n.offload]
    if n.zero >= 2 and shared and not late:  # (late buckets come when activations are gone)
        bucket = (8 if n.zero == 3 else 25) if n.bucket is None else n.bucket
        divided = (False, among[1] > 1, among[2] > 1)
        buckets = _buckets(model, n.division, facts.kind.chunks, bucket, each.gradient, divided)
    parts = tuple((size, ranks) for ranks, size in sorted(shared.items()))
    whole = total - sum(shared.values())
    return Own(States(parameters, gradients, optimizer), whole, parts, facts.versions, gathered, buckets, each)


@lru_cache(256)
def versions_of(plan: Plan) -> tuple[int, ...]:
    """How many versions of its weights each rank holds, counted in a program of the schedule."""
    if find(plan.schedule).asynchronous is None:
        return (1,) * plan.pp
    program = plan.compile(layers=plan.pp, steps=plan.settling_steps, check=False)
    return tuple(alive(row) for row in program.ranks)


def _neighbours(sizes: Sequence[int]) -> int:
    """The largest sum of two neighbours: one is used or filled, the other one is under way."""
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))


# activations ---------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Bytes of one chunk for one micro-batch.

    held, more           kept between forward and backward; what the backward needs in addition
    later, halved        kept between the halves of a backward; what the input half needs in addition to `held`
    received, returned   of messages of another rank: its input, and the gradient of its output
    largest              of its largest layer
    again                the layers that run forward again
    """

    held: int
    more: int
    later: int
    halved: int
    received: int
    returned: int
    largest: int
    again: tuple[int, ...]


def _parts(numbers: PlanNumbers, model: Sizes, kind: Kind, rank: int) -> tuple[Part, ...]:
    """The chunks of a rank. Errors: PlanError for a checkpoint that the model cannot have."""
    n = numbers
    given = model, n.rows / n.ep, n.bytes.activation, n.division, n.checkpoint, _logits(n, model)
    budget = segments.budget_of(n.checkpoint) is not None
    flights = in_flight(pipeline(n), rank) if budget or n.checkpoint == "sqrt" else ()
    moves = [_within(n, model)[stage] if budget else None for stage in placement_of(n)[rank]]
    return tuple(
        _part(*given, _plain(chunk, n, model), flights[c][1] if flights else 1, moves[c])
        for c, chunk in enumerate(kind.chunks)
    )


def _logits(numbers: PlanNumbers, model: Sizes) -> float:
    """Bytes that the loss keeps and makes for each logit: in minipar's own runs the logit, and in float32 its logarithm
    and the gradients of both; otherwise as the stack does."""
    if isinstance(model, Transformer) and model.built:
        return numbers.bytes.activation + 3 * FLOAT
    stack = STACKS[numbers.software]
    if isinstance(model, Transformer) and model.fused_loss:
        return FLOAT + stack.divided * (numbers.tp > 1)
    return stack.logits + stack.divided * (numbers.tp > 1)


def _plain(chunk: Chunk, numbers: PlanNumbers, model: Sizes) -> Chunk:
    """A chunk of blocks as those from the second one on, where all blocks are equal."""
    named = isinstance(model, Chain) or isinstance(numbers.checkpoint, tuple)
    if named or chunk.start < 2 or chunk.stop == own_layers(model):
        return chunk
    return chunk._replace(start=2, stop=2 + chunk.stop - chunk.start)


@lru_cache(8192)
def _part(
    model: Sizes, rows: float, element: int, division: Division, checkpoint: Any, logits: float, chunk: Chunk,
    flight: int, moves: tuple[Move, ...] | None,
) -> Part:  # fmt: skip
    inside = checkpoint in INSIDE
    if inside and isinstance(model, Chain):
        raise PlanError(
            f"checkpoint={checkpoint}: {model.name or 'the model'} has no attention; possible are the others of "
            f"{segments.POSSIBLE}"
        )
    costs = analytic.costs_of(model, rows, element, division, checkpoint == "selective", checkpoint == "operators")
    layers = range(chunk.start, chunk.stop)
    chain = costs.chain(layers.start, layers.stop)
    if moves is None:
        moves = _segments(costs, layers, checkpoint, ends_are_layers(model), flight)
    held, peak = memory(chain, moves or keep_everything(len(layers)))
    received = costs.output[layers.start - 1] if chunk.before else 0
    returned = costs.gradient[layers.stop - 1] if chunk.after else 0
    core = 0  # what runs again inside a layer
    if inside:
        everything = analytic.costs_of(model, rows, element, division).saved
        core = max(everything[l] - costs.saved[l] for l in layers)
    largest = max(costs.saved[l] + costs.output[l] for l in layers)
    again = tuple(layers.start + move.layer for move in moves if move.op is Op.RECOMPUTE)
    block, count = analytic.workspace(model, rows, element, division)
    more = peak - held + core + block * (max(chunk.start, 1) < min(chunk.stop, own_layers(model) - 1))
    if chunk.stop == own_layers(model):  # (the loss may keep less than the layers' costs say, or make more)
        spare = round(count * (logits - element - FLOAT))
        held, more = held + min(0, spare), max(more, spare)
    built, kept = (sizes[layers.start : layers.stop] for sizes in analytic.weight_costs(model, rows, element, division))
    halved = _input_halves(moves or keep_everything(len(layers)), chain, built, kept) + core + received
    return Part(held + received, more, sum(kept), halved, received, returned, largest, again)


def _input_halves(moves: Sequence[Move], chain: LayersInOrder, built: Sequence[int], kept: Sequence[int]) -> int:
    """The most that the input halves of a chunk need in addition to what it keeps between forward and backward.

    An instruction frees nothing before its end. When it is done, what the weight half needs takes the place of what was
    kept. A segment that runs again has an instruction of its own.
    """
    parts: list[tuple[list[int], list[int]]] = [([], [])]  # layers that run again, and layers that go backward
    for move in moves:
        if move.op is Op.RECOMPUTE and parts[-1][1]:
            parts.append(([], []))
        if move.op is not Op.FORWARD:
            parts[-1][move.op is Op.BACKWARD].append(move.layer)
    most = done = 0
    for again, layers in parts:
        fresh = sum(chain.saved[l] for l in again) + sum(chain.output[l] for l in again[:-1])
        most = max(most, done + fresh + sum(built[l] for l in layers))
        first = [l for l in layers if l not in again] + again[:1]
        gone = sum(chain.output[l - 1] for l in first if l) + sum(chain.saved[l] for l in layers if l not in again)
        done += sum(kept[l] for l in layers) - gone
    return most


def _segments(costs: LayerCosts, layers: range, checkpoint: Any, ends: bool, flight: int) -> tuple[Move, ...]:
    """The moves of a chunk that runs again in segments; (): it keeps everything. Without `ends` the first and the last
    layer of the model are in no segment."""
    if checkpoint == 0 or checkpoint in INSIDE:
        return ()
    count = len(costs.forward)
    first, last = (0, count) if ends or isinstance(checkpoint, tuple) else (1, count - 1)
    part = range(max(layers.start, first), min(layers.stop, last))
    if not part:
        return ()
    found = segments.cut(checkpoint, part, costs.chain(part.start, part.stop), flight)
    shift = part.start - layers.start
    return in_segments(len(layers), [range(one.start + shift, one.stop + shift) for one in found])


@lru_cache(64)
def _within(numbers: PlanNumbers, model: Sizes) -> tuple[tuple[Move, ...], ...]:
    """For each stage, the fastest moves within a budget. Errors: PlanError for a budget that is too small."""
    n, plan = numbers, pipeline(numbers)
    costs = analytic.costs_of(model, n.rows / n.ep, n.bytes.activation, n.division)
    shape = Shape(own_layers(model), analytic.groups(model, n.division)[0], model.name)
    layout = Layout(shape, 1, n.pp, split_of(n, model), plan.microbatches, plan.placement())
    assert isinstance(n.checkpoint, str)
    actions = [plan.actions(rank) for rank in range(n.pp)]
    return tuple(segments.schedules(n.checkpoint, layout, actions, costs))


def _activations(numbers: PlanNumbers, model: Sizes, parts: Sequence[Part], rank: int) -> ActivationSources:
    """Where the activations of a rank come from."""
    n = numbers
    kinds = list(dict.fromkeys((part.held, part.more, part.later, part.halved) for part in parts))
    each = tuple(kind[0] for kind in kinds) + tuple(kind[2] for kind in kinds)
    needs = tuple(kind[1] for kind in kinds) + tuple(kind[3] for kind in kinds)
    most, top, then = 0, 0, (0,) * len(each)
    for counts, backward in moments(pipeline(n), rank, tuple(kinds.index(part[:4]) for part in parts)):
        now = sum(map(mul, counts, each))
        if now > most:
            most, then = now, counts
        top = max(top, now + (needs[backward] if backward >= 0 else 0))
    ahead = AHEAD // copies_of(n)
    messages = 0
    if n.pp > 1:
        for part, (flying, _) in zip(parts, in_flight(pipeline(n), rank), strict=True):
            messages += min(ahead, max(0, n.microbatches - flying)) * part.received
            messages += min(ahead, n.microbatches - 1) * part.returned
    if n.ep > 1 and isinstance(model, Transformer):  # rows that go to experts of other ranks, and come back
        messages += 2 * model.top * analytic.costs_of(model, n.rows / n.ep, n.bytes.activation, n.division).output[0]
    largest = max(part.largest for part in parts)
    return ActivationSources(most, top - most, messages, largest, each, then)


# micro-batches in flight ---------------------------------------------------------------------------------------------


# Of k kinds of chunks: micro-batches of each that wait for their backward, and then those that wait for its weight
# half; the kind of chunk that goes backward, and k more than that if this is an input half; -1: none.
Moment = tuple[tuple[int, ...], int]


def _walk(actions: Iterable[Action], kinds: Sequence[int]) -> Iterable[Moment]:
    """The moments after each forward and halved backward, and before each backward."""
    k = 1 + max(kinds, default=0)
    counts = [0] * (2 * k)
    for action in actions:
        kind = kinds[action.chunk]
        if isinstance(action, BackwardWeight):
            counts[k + kind] -= 1
            continue
        if not isinstance(action, Forward):
            yield tuple(counts), kind + k * isinstance(action, BackwardInput)
        counts[kind] += 1 if isinstance(action, Forward) else -1
        counts[k + kind] += isinstance(action, BackwardInput)
        yield tuple(counts), -1


def pipeline(numbers: PlanNumbers) -> Plan:
    """One replica's pipeline as a plan, for as many micro-batches as are needed to have most of them in flight."""
    n, schedule = numbers, find(numbers.schedule)
    options = dict(n.options)
    for key in ("chunks", "slices"):
        if key in schedule.options:
            options[key] = n.chunks
    return _pipeline(n.pp, n.schedule, n.microbatches // n.rounds, tuple(sorted(options.items())))


@lru_cache(4096)
def _pipeline(pp: int, schedule: str, microbatches: int, options: tuple[tuple[str, Any], ...]) -> Plan:
    """With fewer micro-batches if 2 pp more of them do not change how many are in flight."""
    whole = Plan(pp=pp, schedule=schedule, microbatches=microbatches, **dict(options))
    few = 4 * pp + microbatches % (2 * pp)
    if few + 2 * pp >= microbatches or whole.asynchronous or "doubling" in dict(options):
        return whole
    less, more = (replace(whole, microbatches=count) for count in (few, few + 2 * pp))
    try:
        return less if all(in_flight(less, r) == in_flight(more, r) for r in (0, pp // 2, pp - 1)) else whole
    except PlanError:  # (the error is to name the number that was given)
        return whole


@lru_cache(8192)
def moments(plan: Plan, rank: int, kinds: tuple[int, ...]) -> tuple[Moment, ...]:
    """The moments in which a rank may need most.

    kinds   for each chunk the number of its kind: chunks of a kind keep as much
    """
    found = sorted(set(_walk(_actions(plan, rank), kinds)), reverse=True)
    kept: list[Moment] = []
    for counts, backward in found:  # (a moment in which no kind has more than in another one says nothing)
        if not any(
            other == backward and all(a <= b for a, b in zip(counts, more, strict=True)) for more, other in kept
        ):
            kept.append((counts, backward))
    return tuple(kept)


@lru_cache(8192)
def in_flight(plan: Plan, rank: int) -> tuple[tuple[int, int], ...]:
    """For each chunk of a rank, how many micro-batches are in flight at most: until their backward is done, and until
    its input half is done."""
    actions, found = _actions(plan, rank), []
    for c in range(len(plan.placement()[rank])):
        mine = [action for action in actions if action.chunk == c]
        change = (isinstance(one, Forward) - (not isinstance(one, (Forward, BackwardInput))) for one in mine)
        found.append((max(accumulate(change), default=0), segments.in_flight(mine)))
    return tuple(found)


def _actions(plan: Plan, rank: int) -> list[Action]:
    return plan.actions(rank, plan.settling_steps if plan.asynchronous else 1)


# on the device and on the host ---------------------------------------------------------------------------------------


def _on_device(numbers: PlanNumbers, own: Own, kept: ActivationSources) -> RankMemory:
    """The bytes that stay on the device, and those that go to the host."""
    n, away, held = numbers, numbers.offload, own.states
    here = min(kept.held, 2 * kept.layer) if "activations" in away else kept.held  # one layer in use, one under way
    gone = held.optimizer * ("optimizer" in away)
    if n.zero in (1, 2) and n.bytes.parameter < FLOAT:  # (the shards of float32 parameters stay)
        gone -= gone * FLOAT // n.bytes.optimizer
    host = gone + held.parameters * ("parameters" in away) + kept.held - here
    return RankMemory(
        held.parameters * ("parameters" not in away),
        held.gradients,
        held.optimizer - gone,
        here + kept.more,
        own.gathered + own.buckets + kept.messages,
        here,
        host,
    )
