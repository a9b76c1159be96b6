"""What `checkpoint=` means: a schedule of moves for each stage (see `passes/checkpoint.py`) from the user's word.

checkpoint=4         0 1 2 3 | 4 5 6 7 | 8 9        segments of 4 layers, counted in each stage
checkpoint=sqrt      segments of the length that takes the least memory
checkpoint=3,7       0 1 2 | 3 4 5 6 | 7 8 9        segments begin at these layers
checkpoint=selective the core of each attention, inside its layer: see `minipar.models.selective_checkpoint`
checkpoint=operators inside each layer all but attention and every second matrix product: torchtitan's selective
checkpoint=64MiB     the fastest schedule that fits: some layers keep what they save, others run again, perhaps twice
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from minipar.costs.measured import Profile
from minipar.costs.recomputation import (
    Chain,
    LayerCosts,
    Move,
    every,
    in_segments,
    keep_everything,
    needed,
    square_root,
)
from minipar.costs.reversal import minimum, rotor
from minipar.errors import PlanError
from minipar.program import Action, BackwardInput, BackwardWeight, Forward
from minipar.strategies.layout import Layout
from minipar.wording import several

Checkpoint = (
    int | str | tuple[int, ...]
)  # every K layers; "none", "sqrt", a word of INSIDE or a budget; first layers of segments
INSIDE = ("selective", "operators")  # parts of each layer run again, not the whole
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
POSSIBLE = (
    "none, sqrt, selective (attention core), operators, K (every K layers), a budget such as 64MiB, "
    "or first layers of segments such as 3,7,11"
)


def parse(value: object) -> Checkpoint:
    """A `Checkpoint`, from a word or a Python value. Errors: PlanError for anything else."""
    if isinstance(value, str):
        if value in ("none", "sqrt", *INSIDE):
            return value
        if "," in value:
            return _starts(value, value.removesuffix(",").split(","))
        found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(b|kib|mib|gib)", value.lower())
        if found and float(found[1]) * _UNITS[found[2]] >= 1:
            return value
        value = int(value) if re.fullmatch(r"[0-9]{1,9}", value) else value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, (tuple, list)):
        return _starts(value, value)
    raise PlanError(f"checkpoint={value}: must be {POSSIBLE}")


def _starts(given: object, entries: Iterable[object]) -> tuple[int, ...]:
    texts = [str(entry) for entry in entries]
    starts = [int(text) for text in texts if re.fullmatch(r"[0-9]{1,9}", text)]
    if not starts or len(starts) < len(texts) or starts != sorted(set(starts)):
        raise PlanError(
            f"checkpoint={given}: must be layers in ascending order, at which segments begin, such as 3,7,11"
        )
    return tuple(starts)


def text(choice: Checkpoint) -> str:
    """The word that parses to the same choice."""
    return ",".join(map(str, choice)) + "," * (len(choice) == 1) if isinstance(choice, tuple) else str(choice)


def budget_of(choice: Checkpoint) -> int | None:
    """Bytes, if the choice is a budget."""
    found = re.fullmatch(r"([0-9.]+)([a-z]+)", choice.lower()) if isinstance(choice, str) else None
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def schedules(
    choice: Checkpoint,
    layout: Layout,
    actions: Sequence[Sequence[Action]],
    costs: LayerCosts | Profile | None = None,
    receives_ahead: int = 2,
    slices: int = 1,
) -> list[tuple[Move, ...]]:
    """For each stage, the moves of one micro-batch through its trainable layers, which count from 0 in each stage.

    actions   the actions of each rank, which say how many micro-batches are in flight
    costs     the costs of each layer, which a budget needs; with them "sqrt" takes sizes into account
    slices    of each sequence; each counts as one micro-batch

    A budget counts activations: outputs, their gradients, what is saved, and `receives_ahead` buffers for messages
    from each neighbour. It does not count the input rows, nor outputs that wait because a link is slow. Several stages
    of a rank share its budget: each gets the least that it needs, and of the rest a part that is in proportion to what
    more it can use. Every micro-batch or slice counts as the largest one. What waits for the weight halves of backwards
    counts as all that their layers had saved. Errors: PlanError for a choice that does not fit the model, and for a
    budget that is too small; it names the smallest one.
    """
    if isinstance(costs, Profile):
        costs = LayerCosts.of(costs)
    _check(choice, layout, costs)
    count = len(layout.split)
    if isinstance(choice, tuple) and layout.shape.nodes:
        choice = tuple(layout.shape.firsts[layer] for layer in choice)
    if choice in ("none", *INSIDE):
        return [()] * count
    parts = [layout.trained(stage) for stage in range(count)]
    flying, waiting = [1] * count, [0] * count
    for rank, chosen in enumerate(actions):
        for c, stage in enumerate(layout.placement[rank]):
            mine = [action for action in chosen if action.chunk == c]
            flying[stage] = max(flying[stage], in_flight(mine))
            waiting[stage] = max(waiting[stage], between_halves(mine))
    budget = budget_of(choice)
    if budget is not None and costs is not None:
        return _within(budget, layout, parts, flying, waiting, costs, receives_ahead, slices)
    found = []
    for part, flight in zip(parts, flying, strict=True):
        segments: Iterable[range] = ()
        if part and isinstance(choice, int) and layout.shape.nodes:  # (a frozen part keeps nothing)
            begins = [first for first in layout.shape.firsts if part.start < first < part.stop]
            cuts = [part.start, *begins[choice - 1 :: choice], part.stop]
            segments = [range(a - part.start, b - part.start) for a, b in pairwise(cuts)]
        elif part:
            segments = cut(choice, part, _chain(costs, layout, part) if costs is not None else None, flight)
        found.append(in_segments(len(part), segments))
    return found


def cut(choice: Checkpoint, part: range, chain: Chain | None, in_flight: int) -> Iterable[range]:
    """The segments of layers `part` of the model, counted from the first of these layers.

    choice      a length, first layers of segments, or "sqrt"
    chain       these layers with their sizes, which "sqrt" takes into account; None: all are equal
    in_flight   micro-batches that wait for their backward
    """
    if isinstance(choice, tuple):
        cuts = [part.start, *(layer for layer in choice if part.start < layer < part.stop), part.stop]
        return [range(a - part.start, b - part.start) for a, b in pairwise(cuts)]
    length = choice if isinstance(choice, int) else square_root(len(part), chain, in_flight)
    return every(len(part), length)


def in_flight(actions: Iterable[Action]) -> int:
    """The largest number of micro-batches between the beginning of their forward and the end of their backward.

    (A split backward counts until the end of its input half, since recomputation is only for that.)
    """
    change = (1 if isinstance(a, Forward) else -1 for a in actions if not isinstance(a, BackwardWeight))
    return max([1, *accumulate(change)])


def between_halves(actions: Iterable[Action]) -> int:
    """The largest number of micro-batches between the two halves of their backward."""
    change = (isinstance(action, BackwardInput) - isinstance(action, BackwardWeight) for action in actions)
    return max(accumulate(change, initial=0))


def _check(choice: Checkpoint, layout: Layout, costs: LayerCosts | None) -> None:
    if costs is not None and len(costs.forward) != layout.shape.layers:
        raise PlanError(f"costs: of {several(len(costs.forward), 'layer')}, but the model has {layout.shape.layers}")
    check_layers(choice, layout.shape.own_layers)
    if budget_of(choice) is not None and costs is None:
        raise PlanError(
            f"checkpoint={text(choice)}: a budget needs the sizes of the layers; give compile(..., costs=profile), "
            "or choose sqrt, K or layers"
        )


def check_layers(choice: Checkpoint, layers: int) -> None:
    """Errors: PlanError for segments that a model of so many layers cannot have."""
    if isinstance(choice, int) and choice > layers:
        raise PlanError(f"checkpoint={choice}: the model has {several(layers, 'layer')}; possible are 1 to {layers}")
    if isinstance(choice, tuple) and not 0 < choice[0] <= choice[-1] < layers:
        possible = f"possible are 1 to {layers - 1}" if layers > 1 else "it has one layer"
        raise PlanError(f"checkpoint={text(choice)}: segments begin at layers of the model; {possible}")


def _chain(costs: LayerCosts, layout: Layout, part: range) -> Chain:
    return costs.chain(part.start, part.stop, layout.first_trainable)


def _within(
    budget: int,
    layout: Layout,
    stages: list[range],
    flying: list[int],
    waiting: list[int],
    costs: LayerCosts,
    receives_ahead: int,
    slices: int,
) -> list[tuple[Move, ...]]:
    """The fastest schedule of each stage within the budget of its rank. Errors: PlanError, which names the smallest
    possible budget."""
    count = len(stages)
    chains = [_chain(costs, layout, part) if part else None for part in stages]
    around = [
        _around(layout, stage, flying[stage], costs, receives_ahead)
        + waiting[stage] * _left(costs, stages[stage])
        + _carried(costs, stages[stage], flying[stage], slices)
        for stage in range(count)
    ]

    def least(stage: int) -> int:
        chain = chains[stage]
        return around[stage] + (minimum(chain, flying[stage]) if chain else 0)

    def most(stage: int) -> int:
        chain = chains[stage]
        return around[stage] + (needed(chain, keep_everything(len(chain)), flying[stage]) if chain else 0)

    shares = [budget] * count
    for held in layout.placement if max(map(len, layout.placement)) > 1 else ():
        low = {stage: least(stage) for stage in held}
        more = {stage: max(0, most(stage) - low[stage]) for stage in held}
        spare, wanted = max(0, budget - sum(low.values())), max(1, sum(more.values()))
        for stage in held:  # (of a stage with copies the smallest share)
            shares[stage] = min(shares[stage], low[stage] + min(more[stage], spare * more[stage] // wanted))
        if sum(low.values()) > budget:
            shares[held[0]] = -1
    found: list[tuple[Move, ...]] = []
    try:
        for chain, share, flight, extra in zip(chains, shares, flying, around, strict=True):
            if extra > share:
                raise PlanError("too small")
            found.append(rotor(chain, share - extra, flight) if chain else ())
    except PlanError:
        needs = [sum(least(stage) for stage in held) for held in layout.placement]
        rank = max(range(layout.pp), key=needs.__getitem__)
        held = layout.placement[rank]
        where = f" on rank {rank}, with {several(len(held), 'stage')}"
        if len(held) == 1:
            where = f" on stage {held[0]}, with {flying[held[0]]} in flight"
        raise too_small(budget, needs[rank], where if layout.pp > 1 else "") from None
    return found


def too_small(budget: int, least: int, where: str) -> PlanError:
    """The error for a budget below what a rank needs at least; `where` it does."""
    words = f"checkpoint: a budget of {_size(budget)} is too small; the least is {_size(least, up=True)}"
    return PlanError(f"{words}{where}")


def _left(costs: LayerCosts, layers: range) -> int:
    """At most so many bytes are left of a micro-batch between the halves of its backward."""
    own = sum(costs.saved[layer] + costs.output[layer] + costs.gradient[layer] for layer in layers)
    return own + (costs.output[layers.start - 1] if layers and layers.start else 0)


def _carried(costs: LayerCosts, layers: range, flying: int, slices: int) -> int:
    """Bytes that slices in flight have handed on to the next ones, and at most one gradient of that in each layer."""
    total = 0
    for layer in layers if slices > 1 else ():
        sizes = sorted((measured[layer] for measured in costs.carry[-slices:]), reverse=True)
        total += flying // slices * sum(sizes) + sum(sizes[: flying % slices]) + max(sizes, default=0)
    return total


def _around(layout: Layout, stage: int, flying: int, costs: LayerCosts, receives_ahead: int) -> int:
    """Bytes that a stage needs in addition to its chain of trainable layers."""
    layers, start = layout.layers(stage), layout.trained(stage).start
    total = flying * costs.output[start - 1] if start and start < layers.stop else 0  # the input of the chain stays
    messages = min(receives_ahead, layout.microbatches)
    if stage:
        total += messages * costs.output[layers.start - 1]
    if start < layers.stop < layout.shape.layers:
        total += messages * costs.gradient[layers.stop - 1]
    frozen = range(layers.start, start)  # during their forward two outputs exist at a time
    return total + max((sum(costs.output[max(0, layer - 1) : layer + 1]) for layer in frozen), default=0)


def _size(count: int, up: bool = False) -> str:
    """Bytes as a word that `parse` reads; with `up`, rounded up so that a budget of this size is enough."""
    if count < 2**20:
        return f"{count}B"
    return f"{-(-count * 100 // 2**20) / 100 if up else count / 2**20:.2f}MiB"
