"""split=auto: the layers of each stage, such that a step takes as little time as possible.

    actions      rank 0   F0 F1 F0' F1' ...      the schedule's order, which no split changes
    candidates   split    3 2 2 3 | 2 3 3 2 ...  many at a time: each number below is a vector with one entry a split
    a turn       begins   when its rank is free, and what it reads has come
                 takes    the time of the stage's layers
                 sends    its output, when the link is free: bytes / bandwidth, and the latency after it

This is the rule of `simulate` for one pipeline (prediction/simulator.py). It goes by ranks, not by stages: a rank with
several chunks takes the time of all of them. Layers that ranks share stay whole, as `split=` counts them. If there are
few splits, all of them are tried. Otherwise the search begins with the equal split and with the dynamic program's
(costs/partition.py), moves one layer from one stage to another, and keeps the best splits, until nothing gets better or
`WORK` is used up.

A walk leaves out what runs beside or after the pipeline: sums over replicas, parameters that are gathered, copies to
the host, cores that ranks share. Recomputation counts as a forward of all layers. Where the caller can predict a
program (`time_of`, which `train` gives), the best few splits, the equal one and the dynamic program's are predicted,
and the fastest is taken.

The search takes about 3 seconds at most on one core, and milliseconds for a pipeline of 4 ranks and 16 layers. It also
predicts at most `FINALISTS` + 2 programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minipar.costs.measured import Profile
from minipar.costs.partition import partition
from minipar.costs.protocol import Costs
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.program import Action, Backward, BackwardInput, BackwardWeight, Forward, Op, Program
from minipar.program.edges import Edges
from minipar.program.shape import Shape
from minipar.strategies.layout import Layout
from minipar.wording import several

if TYPE_CHECKING:
    Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
    Vectors = np.ndarray[tuple[int, int], np.dtype[np.float64]]

Split = tuple[int, ...]
Place = tuple[int, int]  # two ranks of a pipeline: from, to
Line = tuple[float, float]  # of a link: latency, seconds for each byte
Entry = tuple[float, int, Split]  # time of a split, its distance from the equal one

LINE: Line = (2e-4, 1 / 1.5e9)  # where nothing is known of the links, as `ProfiledCosts` assumes
WORK = 200_000  # most turns that the search walks, as `_effort` counts them
BLOCK = 1024  # splits in one walk
BEAM = 32  # splits from which the search goes on
PATIENCE = 3  # rounds of the search in which nothing gets better before it ends
FINALISTS = 4  # the best splits, which are predicted
LARGE = 200_000  # forwards and backwards of layers: larger programs are not predicted only to choose a split
EXACT = 1e-12  # times that differ by less count as equal
_KINDS = {Forward: 0, Backward: 1, BackwardInput: 2, BackwardWeight: 3}
_SENT: Mapping[int, int] = {0: 1, 1: -1, 2: -1}  # kind of a turn -> the stage that its message goes to


class Turn(NamedTuple):
    """One action in an order in which every turn comes after what it waits for.

    rank, stage, kind   kind is 0 for a forward, 1 a backward, 2 and 3 its input and weight half
    waits               number of the message that it waits for; -1: none
    sends               messages that leave when it ends: number, link, stage of the sender, and its kind
    """

    rank: int
    stage: int
    kind: int
    waits: int
    sends: list[tuple[int, Place, int, int]]


@dataclass(frozen=True)
class Times:
    """Seconds (or another unit) of every layer and of the messages between layers.

    work       for each kind of turn, the time of each layer
    step       the time of each layer's part of the optimizer's step
    gradients  bytes of the gradients of each layer's parameters, which are summed over the copies of a stage
    messages   bytes of the output handed on after each layer, and of the gradient that comes back
    lines      of the links between ranks; `line` where a link is not known
    trained    the first layer with a backward
    """

    work: tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]
    step: Sequence[float]
    gradients: Sequence[float]
    messages: tuple[Sequence[float], Sequence[float]]
    line: Line = (0.0, 0.0)
    lines: Mapping[Place, Line] = field(default_factory=dict)
    trained: int = 0

    def of(self, place: Place) -> Line:
        return self.lines.get(place, self.line)


def best_split(
    shape: Shape,
    stages: int,
    layout: Callable[[Split], Layout],
    actions: Sequence[Sequence[Action]],
    costs: LayerCosts | Profile | None,
    again: bool = False,
    known: Callable[[Layout], tuple[Program, Costs]] | None = None,
    time_of: Callable[[Layout], float] | None = None,
) -> Split:
    """The number of layers of each stage.

    shape     the model's layers; `stages` is the number of stages
    layout    the layout of a split, which counts the model's own layers
    actions   of each rank of a pipeline
    costs     of the layers. A profile is in seconds, so its messages count, too, and the optimizer's step. The times of
              LayerCosts may have any unit, for example operations; then messages are free
    again     whether layers run forward again before their backward
    known     a program with this layout, and what it costs: it says what links cost. Without it messages take what
              `ProfiledCosts` assumes
    time_of   the predicted time of a step with this layout

    Errors: `PlanError` without costs, or with costs of another number of layers.
    """
    if costs is None:
        raise PlanError(
            "split=auto: needs what the layers cost; give compile(..., costs=minipar.profile(model, batch)), "
            "or layer counts such as 3,3,2, or even"
        )
    layers = LayerCosts.of(costs) if isinstance(costs, Profile) else costs
    n = shape.own_layers
    if len(layers.forward) != shape.layers:
        raise PlanError(f"costs: of {several(len(layers.forward), 'layer')}, but the model has {shape.layers}")
    equal = _equal(n, stages)
    first = layout(equal)
    lines = _lines(*known(first), first) if known and isinstance(costs, Profile) else {}
    times = _of_own_layers(times_of(costs, layers, first, again, lines), shape)
    found = fastest(times, stages, actions, first.placement, first.microbatches)
    if time_of is None or len(found) == 1 or shape.layers * first.microbatches * first.dp > LARGE:
        return found[0]
    usual = _by_chain(times, stages, first.microbatches)
    finalists = dict.fromkeys([*found[:FINALISTS], equal, usual])
    return min(finalists, key=lambda split: time_of(layout(split)))


def fastest(
    times: Times,
    stages: int,
    actions: Sequence[Sequence[Action]],
    placement: Sequence[Sequence[int]],
    microbatches: int,
) -> list[Split]:
    """Splits by the times of layers and messages alone, the fastest first; at least one.

    actions, placement   of each rank of a pipeline
    """
    n = len(times.work[0])
    usual = _by_chain(times, stages, microbatches)
    turns = in_order(actions, placement)
    if turns is None or len(turns) > WORK:
        return [usual]
    return search(turns, times, n, [_equal(n, stages), usual])


def _equal(layers: int, stages: int) -> Split:
    even, more = divmod(layers, stages)
    return tuple(even + (s < more) for s in range(stages))


# what layers and links cost -------------------------------------------------------------------------------------------


def times_of(
    costs: LayerCosts | Profile, layers: LayerCosts, layout: Layout, again: bool, lines: Mapping[Place, Line]
) -> Times:
    """The times that a walk needs, from the costs of layers. The arguments are those of `best_split`."""
    shape, n = layout.shape, len(layers.forward)
    first = layout.first_trainable
    whole = [t if l >= first else 0.0 for l, t in enumerate(layers.backward)]
    halves = ([t / 2 for t in whole], [t / 2 for t in whole])
    if isinstance(costs, Profile) and costs.backward_input and costs.backward_weight:
        rows = max(costs.forward)
        halves = (
            [t if l >= first else 0.0 for l, t in enumerate(costs.backward_input[rows])],
            [t if l >= first else 0.0 for l, t in enumerate(costs.backward_weight[rows])],
        )
    if again:
        repeated = [t if l >= first else 0.0 for l, t in enumerate(layers.forward)]
        whole, halves = _added(whole, repeated), (_added(halves[0], repeated), halves[1])
    step = [0.0] * n
    if not isinstance(costs, Profile):
        return Times((layers.forward, whole, *halves), step, step, ([0.0] * n, [0.0] * n), trained=first)
    total = sum(costs.gradient_bytes)
    gradients = [0.0] * n
    for group, size in zip(shape.groups, costs.gradient_bytes, strict=False):
        gradients[min(group.layers)] += size
        step[min(group.layers)] += costs.step_seconds * size / total if total else 0.0
    crossing = (_crossing(layers.output, shape.edges), _crossing(layers.gradient, shape.edges))
    return Times((layers.forward, whole, *halves), step, gradients, crossing, LINE, lines, first)


def _of_own_layers(times: Times, shape: Shape) -> Times:
    """The times of the model's own layers, each of which may consist of several nodes."""
    if not shape.nodes:
        return times
    whole = list(pairwise(shape.firsts))

    def summed(table: Sequence[float]) -> list[float]:
        return [sum(table[first:end]) for first, end in whole]

    forward, backward, inputs, weights = map(summed, times.work)
    outputs, gradients = ([table[end - 1] for _, end in whole] for table in times.messages)
    return replace(
        times, work=(forward, backward, inputs, weights), step=summed(times.step), gradients=summed(times.gradients),
        messages=(outputs, gradients), trained=shape.own_layer(times.trained),
    )  # fmt: skip


def _added(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _crossing(sizes: Sequence[float], edges: Edges) -> Sequence[float]:
    """Bytes that go over a cut after each layer; with branches, all outputs that a layer after it reads."""
    if not edges:
        return sizes
    last = [max((b for a, b in edges if a == layer), default=layer) for layer in range(len(sizes))]
    return [sum(sizes[a] for a in range(cut + 1) if last[a] > cut) for cut in range(len(sizes))]


def _lines(program: Program, costs: Costs, layout: Layout) -> dict[Place, Line]:
    """What messages cost between the ranks of the first replica's pipeline, from the largest one on each link."""
    largest: dict[Place, tuple[float, Line]] = {}
    ranks = {layout.rank(0, rank): rank for rank in range(layout.pp)}
    for number, rank in ranks.items():
        for ins in program.ranks[number]:
            if ins.op is not Op.SEND or ins.peer not in ranks:
                continue
            size = sum(costs.size(number, value) for value in ins.reads)
            place = rank, ranks[ins.peer]
            if place not in largest or size > largest[place][0]:
                occupied, latency = costs.transfer(number, ins)
                largest[place] = size, (latency, occupied / size if size else 0.0)
    return {place: line for place, (_, line) in largest.items()}


def _by_chain(times: Times, stages: int, microbatches: int) -> Split:
    """The dynamic program's split: exact where every rank has one stage and gpipe flushes."""
    (forward, whole, *_), known = times.work, list(times.lines.values()) or [times.line]
    per_byte = sum(line[1] for line in known) / len(known)
    messages = [per_byte * (a + b) for a, b in zip(*times.messages, strict=True)]
    return partition(_added(forward, whole), stages, microbatches, activations=messages).split


# the time of many splits ----------------------------------------------------------------------------------------------


def in_order(actions: Sequence[Sequence[Action]], placement: Sequence[Sequence[int]]) -> list[Turn] | None:
    """All actions in an order in which each comes after what it waits for; None if ranks wait for each other."""
    stages = 1 + max(map(max, placement))
    where: dict[tuple[int, int, int], int] = {}  # (0 forward, 1 backward; micro-batch; stage) -> the rank
    for rank, row in enumerate(actions):
        for action in row:
            if not isinstance(action, BackwardWeight):
                forward = isinstance(action, Forward)
                where[0 if forward else 1, action.microbatch, placement[rank][action.chunk]] = rank
    turns: list[Turn] = []
    number: dict[tuple[int, int, int], int] = {}  # of a message: kind, micro-batch, stage that it goes to
    done: set[tuple[int, int, int]] = set()
    place = [0] * len(actions)
    pending: list[list[tuple[int, Place, int, int]]] = [[] for _ in actions]  # messages that wait for the next backward
    kept: list[list[tuple[int, int, int]]] = [[] for _ in actions]  # what these messages bring
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(actions):
            for action in islice(row, place[rank], None):
                kind, stage, i = _KINDS[type(action)], placement[rank][action.chunk], action.microbatch
                back = int(kind > 0)
                before = stage - 1 if kind == 0 else stage + 1
                waits = -1
                if kind < 3 and 0 <= before < stages:
                    if (back, i, before) not in done:
                        break
                    waits = number.get((back, i, stage), -1)
                sends: list[tuple[int, Place, int, int]] = []
                target = stage + _SENT.get(kind, 0)
                if target != stage and 0 <= target < stages:
                    to = where.get((back, i, target), rank)
                    if to != rank:
                        number[back, i, target] = len(number)
                        sends.append((number[back, i, target], (rank, to), stage, kind))
                built = [(back, i, stage)] if kind < 3 else []
                if isinstance(action, Forward) and action.beside and sends:
                    pending[rank], kept[rank], sends, built = sends, built, [], []
                elif pending[rank] and kind in (1, 2):
                    sends, pending[rank] = [*sends, *pending[rank]], []
                    built, kept[rank] = [*built, *kept[rank]], []
                done.update(built)
                turns.append(Turn(rank, stage, kind, waits, sends))
                place[rank] += 1
                moved = True
    return turns if all(at == len(row) for at, row in zip(place, actions, strict=True)) else None


def walk(turns: Sequence[Turn], times: Times, splits: Sequence[Split]) -> Vector:
    """The time of a step with each of the splits, by the rule of `simulate` for one pipeline."""
    ends = np.concatenate([np.zeros((len(splits), 1), int), np.cumsum(np.asarray(splits), axis=1)], axis=1).T
    starts, stops = ends[:-1], ends[1:]  # [stage, split]
    work = [_of_stages(table, starts, stops) for table in times.work]
    outputs, gradients = (np.asarray(table, float) for table in times.messages)
    trains = None if times.trained == 0 else stops > times.trained
    clock: dict[int, Vector] = {}
    free: dict[Place, Vector] = {}
    came: dict[int, Vector] = {}
    held: dict[int, dict[int, Vector]] = {}  # rank -> for each of its stages, when its last turn ends
    nothing = np.zeros(len(splits))
    for rank, stage, kind, waits, sends in turns:
        now = clock.get(rank, nothing)
        if waits >= 0:
            now = np.maximum(now, came.pop(waits))
        clock[rank] = end = now + work[kind][stage]
        held.setdefault(rank, {})[stage] = end
        for message, link, source, of in sends:
            latency, per_byte = times.of(link)
            size = outputs[stops[source] - 1] if of == 0 else gradients[starts[source] - 1]
            sent = np.maximum(end, free.get(link, nothing)) + per_byte * size
            arrives = sent + latency * (size > 0)  # (nothing is sent where there is nothing to send)
            if trains is not None and of:  # no gradient goes to layers without a backward
                free[link] = np.where(trains[source - 1], sent, free.get(link, nothing))
                came[message] = np.where(trains[source - 1], arrives, 0.0)
            else:
                free[link], came[message] = sent, arrives
    summed = _sums_of_copies(held, times, _of_stages(times.gradients, starts, stops))
    step = _of_stages(times.step, starts, stops)
    ready = {rank: np.max([clock[rank], *(summed[stage] for stage in mine)], axis=0) for rank, mine in held.items()}
    finished = [ready[rank] + sum(step[stage] for stage in mine) for rank, mine in held.items()]
    return np.max(finished, axis=0) if finished else nothing


def _sums_of_copies(held: Mapping[int, Mapping[int, Vector]], times: Times, sizes: Vectors) -> dict[int, Vector]:
    """When the gradients of each stage are summed over its copies; those of a stage without copies need no sum.

    Sums over the same ranks come one after another, those of late stages first.
    """
    found: dict[int, Vector] = {}
    joined: dict[Place, Vector] = {}  # when a rank has joined its last sum with another rank
    for stage in sorted({stage for mine in held.values() for stage in mine}, reverse=True):
        ranks = sorted(rank for rank, mine in held.items() if stage in mine)
        found[stage] = held[ranks[0]][stage]
        for a, b in pairwise(ranks):
            latency, per_byte = times.of((a, b))
            lasts = np.where(sizes[stage] > 0, 2 * latency + per_byte * sizes[stage], 0.0)  # 2 hops of half the bytes
            begins = np.max([held[a][stage], held[b][stage], joined.get((a, b), found[stage])], axis=0)
            found[stage] = joined[a, b] = begins + lasts
    return found


def _of_stages(table: Sequence[float], starts: Vectors, stops: Vectors) -> Vectors:
    """The sum of a table's entries over the layers of each stage."""
    before = np.concatenate([[0.0], np.cumsum(table)])
    return before[stops] - before[starts]


# which splits ---------------------------------------------------------------------------------------------------------


def search(turns: Sequence[Turn], times: Times, layers: int, starts: Sequence[Split], work: int = WORK) -> list[Split]:
    """Splits of `layers` layers, the fastest first; of equally fast ones, those that are nearest to the first of
    `starts`. At most `BEAM` of them. All splits are tried if that takes no more than `work`; otherwise `climb` does."""
    stages = len(starts[0])
    count = math.comb(layers - 1, stages - 1)
    if -(-count // BLOCK) * _effort(len(turns), min(count, BLOCK)) > work:
        return climb(turns, times, starts, work)
    return _best(
        entry for block in _blocks(_every_split(layers, stages)) for entry in _judged(turns, times, block, starts[0])
    )


def climb(turns: Sequence[Turn], times: Times, starts: Sequence[Split], work: int) -> list[Split]:
    """As `search`, from the starts: move one layer, keep the best splits, and go on from these."""
    left = float(work)
    best: list[Split] = []
    known: dict[Split, Entry] = {}
    tried, fresh, patience = set[Split](), list(dict.fromkeys(starts)), PATIENCE
    while patience and left > 0:
        tried.update(fresh)
        fastest = known[best[0]][0] if best else math.inf
        known = {split: known[split] for split in best}
        for block in _blocks(fresh):
            if left > 0:
                known |= {entry[2]: entry for entry in _judged(turns, times, block, starts[0])}
                left -= _effort(len(turns), len(block))
        best = _best(known.values())
        patience = PATIENCE if known[best[0]][0] < fastest * (1 - EXACT) else patience - 1
        fresh = [*dict.fromkeys(other for split in best for other in _neighbours(split) if other not in tried)]
    return best


def _blocks(splits: Iterable[Split]) -> Iterator[list[Split]]:
    remaining = iter(splits)
    while block := list(islice(remaining, BLOCK)):
        yield block


def _judged(turns: Sequence[Turn], times: Times, block: Sequence[Split], first: Split) -> Iterator[Entry]:
    """The time of each split, and its distance from the first start."""
    for split, seconds in zip(block, walk(turns, times, block).tolist(), strict=True):
        yield seconds, sum(abs(a - b) for a, b in zip(split, first, strict=True)), split


def _effort(turns: int, splits: int) -> float:
    """How long a walk takes, in turns of one split, which take some microseconds each."""
    return turns * (1 + splits / 1000) + 2 * splits


def _best(found: Iterable[Entry]) -> list[Split]:
    """The fastest splits. Times that differ only by rounding count as equal."""
    entries = sorted(found)
    if not entries:
        return []
    limit = entries[0][0] * (1 + EXACT)
    equal = sum(seconds <= limit for seconds, _, _ in entries)
    ordered = sorted(entries[:equal], key=lambda entry: entry[1:]) + entries[equal:]
    return [split for _, _, split in ordered[:BEAM]]


def _every_split(layers: int, stages: int) -> Iterator[Split]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, layers)))


def _neighbours(split: Split) -> Iterator[Split]:
    """Splits with one layer less in one stage, and one more in another; of many stages only between neighbours."""
    stages = range(len(split))
    for a in stages:
        for b in stages if len(split) <= 16 else (a - 1, a + 1):
            if a != b and 0 <= b < len(split) and split[a] > 1:
                yield tuple(n - (s == a) + (s == b) for s, n in enumerate(split))
