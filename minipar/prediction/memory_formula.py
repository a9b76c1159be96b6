"""Bytes on every rank of a plan, from formulas, as `minipar memory` prints them. It needs no torch and no device.

    parameters, gradients, optimizer    ZeRO's table, for every parameter that a rank holds, over N = dp ranks:
                                            stage 0   p + g + o              stage 2   p + (g + o) / N
                                            stage 1   p + g + o / N          stage 3   (p + g + o) / N
    activations                         layer by layer; f micro-batches in flight, one of them in its backward
    buffers                             temporary ones: two gathered layers, two buckets, messages

where (p, g, o) is (4, 4, 8) bytes in float32 and (2, 2, 12) in bf16 with float32 master copies, both with Adam. The
number of micro-batches in flight is counted in the plan's own program.

`terms` writes the formulas for one rank, in letters and with numbers:

    optimizer      o (P0 + P1 / N)       12 B × (38,597,376 + 85,842,432 ÷ 8)        = 564.54 MiB
    activations    f a + b               4 × 98.62 MiB + 31.5 MiB                    = 425.98 MiB

`verdict` says whether a plan fits, and which changes would make it fit. `report` and `show_report` make the output of
`minipar memory`.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from minipar.costs import analytic
from minipar.costs.analytic import WHOLE, Division
from minipar.costs.device import HARDWARE, holding
from minipar.costs.recomputation import keep_everything, memory
from minipar.errors import MiniparError, PlanError
from minipar.models import shapes, table
from minipar.models.table import GPT, MLP, Branchy
from minipar.prediction.neighbours import nearby
from minipar.program import Action, BackwardInput, BackwardWeight, Forward, Group, Program
from minipar.program.rows import split_rows
from minipar.program.shape import Shape
from minipar.program.verify.staleness import alive
from minipar.strategies import keys, segments
from minipar.strategies.buckets import split_buckets
from minipar.strategies.layout import Layout
from minipar.strategies.plan import Plan
from minipar.wording import several

AHEAD = Program.receives_ahead
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
_SHARED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # stage of ZeRO
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


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
    """

    states: States
    whole: int
    shared: tuple[tuple[int, int], ...]
    versions: int
    gathered: int
    buckets: int


class ActivationSources(NamedTuple):
    """Where a rank's activations come from, in bytes.

    held       most that is kept between forward and backward
    more       what a backward needs in addition
    messages   buffers for messages
    layer      the largest layer
    each       for each chunk, what one micro-batch keeps between forward and backward
    flying     for each chunk, how many micro-batches are kept when most is held
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
    rows: int


def in_flight(actions: Iterable[Action], sizes: Sequence[float], more: Sequence[float] = ()) -> float:
    """The most that a rank's micro-batches keep at the same time, if one micro-batch keeps `sizes[c]` in chunk c.

    With a split backward it is kept until the weight half is done. A backward takes `more[c]` in addition while it
    runs.
    """
    return _most(actions, sizes, more)[0]


def _most(
    actions: Iterable[Action], sizes: Sequence[float], more: Sequence[float] = ()
) -> tuple[float, tuple[int, ...]]:
    """As `in_flight`, and how many micro-batches of each chunk are kept at that moment."""
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
    """Bytes of each rank, in rank order, for a step of `batch` rows; default: one row for every micro-batch.

    division    expert parallelism, and the tensor parallelism of a plan without it; the bytes are those of one rank
    overrides   numbers that replace the model's, such as layers=48
    Errors: `PlanError` for an unknown model, and for a plan that does not fit it.
    """
    return [detail.memory for detail in details(plan, model, batch, division, **overrides)]


def details(
    plan: Plan, model: str, batch: int | None = None, division: Division = WHOLE, **overrides: Any
) -> list[Detail]:
    """As `per_rank`, with the origin of the bytes."""
    if plan.context_parallel > 1 or plan.ep > 1:
        told = f"context_parallel={plan.context_parallel}" if plan.context_parallel > 1 else f"ep={plan.ep}"
        raise PlanError(f"memory: no formula for {told}; possible is `minipar run --memory`")
    if plan.tp > 1:
        division = replace(division, tp=plan.tp, sequence=plan.sequence_parallel)
        alone = replace(plan, tp=1, sequence_parallel=False, batch_copies=1)
        return [each for each in details(alone, model, batch, division, **overrides) for _ in range(plan.tp)]
    numbers = table.numbers(model, **overrides)
    division.check(numbers, plan.dp)
    if plan.checkpoint == "selective" and isinstance(numbers, (MLP, Branchy)):
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
    largest = [len(edges[replica * count]) for replica in range(plan.dp)]  # the first micro-batches have more rows
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
    """Model states of a rank, and the buffers that are needed to shard or offload them."""
    precision, groups = PRECISIONS[plan.precision], layout.shape.groups
    held = layout.groups(rank)
    versions = versions_of(plan)[rank]
    # A group that is tied between stages stays whole: its slices would belong to ranks with different work.
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
        gathered = precision.parameter * _neighbours(layers)  # one layer computes, the next one is under way
    if plan.zero >= 2:
        sizes = [Group(group.layers, (precision.gradient * _numbers(group),)) for group in groups]
        messages = split_buckets(sharded[::-1], sizes, plan.messages)
        buckets = _neighbours([sum(sum(sizes[g].tensors) for g in bucket) for bucket in messages])
    shared = {
        n: sum(_numbers(groups[g]) for g in sharded if among[g] == n) for n in sorted(set(among.values())) if n > 1
    }
    whole = total - sum(shared.values())
    return Own(own, whole, tuple((numbers, n) for n, numbers in shared.items() if numbers), versions, gathered, buckets)


def versions_of(plan: Plan) -> list[int]:
    """How many versions of its weights each rank holds, counted in the program of a run."""
    if not plan.asynchronous:
        return [1] * plan.pp
    one = replace(plan, split=None, checkpoint="none")
    return [alive(row) for row in one.compile(layers=plan.pp, steps=plan.settling_steps, check=False).ranks]


def _numbers(group: Group) -> int:
    return sum(group.tensors)  # (the shape has one byte for each number)


def _neighbours(sizes: Sequence[int]) -> int:
    """The largest sum of two neighbours: one is used or filled, the other one is under way."""
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))


# activations ---------------------------------------------------------------------------------------------------------


def _activations(plan: Plan, model: str, layout: Layout, rows: int, given: dict[str, Any]) -> list[ActivationSources]:
    """For each rank, where its activations come from, for micro-batches of so many rows."""
    element = PRECISIONS[plan.precision].activation
    if rows == 0:
        return [ActivationSources(0, 0, 0, 0)] * plan.pp
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
            # If a stage has copies, both pipelines go to another rank after it, and share the links.
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
            core = max(everything[l] - costs.saved[l] for l in layers)  # the attention core that runs again
            waiting.append(held)
            more.append(peak - held + core)
        if division.ep > 1:  # rows that go to experts of other ranks, and come back
            messages += 2 * division.top * costs.output[0]
        mine = [l for layers in layout.chunks(rank) for l in layers]
        largest = max(costs.saved[l] + costs.output[l] for l in mine)
        (most, flying), top = _most(actions[rank], waiting), in_flight(actions[rank], waiting, more)
        found.append(ActivationSources(int(most), int(top) - int(most), messages, largest, tuple(waiting), flying))
    return found


def _on_device(plan: Plan, own: Own, kept: ActivationSources) -> RankMemory:
    """The bytes that stay on the device, and those that go to the host."""
    moved, states = {name: name in plan.offload for name in keys.OFFLOADS}, own.states
    held = min(kept.held, 2 * kept.layer) if moved["activations"] else kept.held  # one layer in use, one under way
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


# the formulas written out ---------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """Bytes of one kind on one rank: the formula in letters, the formula with numbers, and a note."""

    kind: str
    bytes: int
    formula: str
    filled: str
    note: str = ""


def size(count: float) -> str:
    """Bytes as text: `564.54 MiB`."""
    for unit, whole in _UNITS:
        if abs(count) >= whole:
            return f"{count / whole:,.2f} {unit}"
    return f"{count:,.0f} B"


def terms(plan: Plan, detail: Detail) -> list[Term]:
    """One term for each of KINDS."""
    return [
        *(_states_term(plan, detail, kind) for kind in KINDS[:3]),
        _activations_term(plan, detail),
        _buffers_term(detail),
    ]


def _states_term(plan: Plan, detail: Detail, kind: str) -> Term:
    own, each = detail.own, getattr(PRECISIONS[plan.precision], kind.removesuffix("s"))
    shared = list(own.shared) if plan.zero >= _SHARED_FROM[kind] else []
    whole = own.whole + (0 if shared else sum(numbers for numbers, _ in own.shared))
    cuts = [f"{numbers:,} ÷ {ranks}" for numbers, ranks in shared]
    letters = ["P", "Q"][: len(shared)]
    parts = [*([f"{whole:,}"] if whole or not shared else []), *cuts]
    names = [*(["W"] if whole and shared else [] if shared else ["P"]), *(f"{x} ÷ N" for x in letters)]
    copies = own.versions - 1 if kind == "parameters" else 0
    if copies:  # older versions of the weights stay whole
        total = own.whole + sum(numbers for numbers, _ in own.shared)
        parts, names = [*parts, f"{copies} × {total:,}"], [*names, "v P"]
    bracket = len(parts) > 1
    filled, formula = " + ".join(parts), " + ".join(names)
    filled = f"{each} B × ({filled})" if bracket else f"{each} B × {filled}"
    formula = f"{kind[0]} × ({formula})" if bracket else f"{kind[0]} × {formula}"
    bytes_here: int = getattr(detail.memory, kind)
    there: int = getattr(own.states, kind)
    if there and not bytes_here:
        return Term(kind, 0, "0", "0 B", f"{size(there)} wait on the {plan.offload_to}: {filled}")
    note = f"{each} bytes for each parameter"
    if shared:
        note += f"; ZeRO {plan.zero} shares out {'all of them' if not whole else 'those of layers'} among N replicas"
    elif own.shared and plan.dp > 1:
        note += f"; ZeRO would share them out from stage {_SHARED_FROM[kind]} on"
    return Term(kind, bytes_here, formula, filled, note)


def _activations_term(plan: Plan, detail: Detail) -> Term:
    kept, bytes_here = detail.kept, detail.memory.activations
    if not detail.rows:
        return Term("activations", bytes_here, "0", "0 B", "this replica gets no rows of the batch")
    more = f" + {size(kept.more)}" if kept.more else ""
    rows = several(detail.rows, "row")
    if detail.memory.held < kept.held:
        filled = f"2 × {size(kept.layer)}{more}"
        moved = size(kept.held - detail.memory.held)
        note = f"2 layers are on the device, one in use and one on its way; {moved} wait on the {plan.offload_to}"
        return Term("activations", bytes_here, "2 l" + " + b" * bool(more), filled, note)
    flying = [(n, each) for n, each in zip(kept.flying, kept.each, strict=True) if n]
    filled = " + ".join(f"{n} × {size(each)}" for n, each in flying) + more
    formula = "f × a" if len(flying) == 1 else "Σ f × a"
    note = f"f micro-batches of {rows} wait for their backward, each with a"
    note += "; b more while one goes backward" if more else ""
    return Term("activations", bytes_here, formula + " + b" * bool(more), filled or "0 B", note)


def _buffers_term(detail: Detail) -> Term:
    named = (
        ("c", detail.own.gathered, "parameters of two layers that come from elsewhere"),
        ("d", detail.own.buckets, "two buckets of gradients"),
        ("m", detail.kept.messages, "messages that arrive or wait"),
    )
    there = [one for one in named if one[1]]
    filled = " + ".join(size(number) for _, number, _ in there) or "0 B"
    note = "; ".join(f"{letter} {words}" for letter, _, words in there) or "nothing travels"
    return Term("buffers", detail.memory.buffers, " + ".join(x for x, _, _ in there) or "0", filled, note)


# what would fit ------------------------------------------------------------------------------------------------------


def ways_that_fit(
    plan: Plan, model: str, batch: int, capacity: int, division: Division = WHOLE, most: int = 3, **overrides: Any
) -> list[tuple[str, int]]:
    """At most `most` changes of the plan with which every rank fits, the smallest change of each kind. Each comes with
    the bytes of the fullest rank."""
    found: list[tuple[str, int]] = []
    keys: list[set[str]] = []
    families = nearby(plan, batch) + [[_with(plan, offload=what)] for what in ("optimizer", "activations")]
    families += [[_with(plan, precision="bf16")]] if plan.precision == "float32" else []
    for family in families:
        for made in family:
            if len(found) == most:
                return found
            words = _difference(plan, made)
            if not words or any(known <= set(words.split()) for known in keys):
                continue  # (a smaller change was enough)
            try:
                peak = max(rank.total for rank in per_rank(made, model, batch, division, **overrides))
            except MiniparError:  # (the changed plan may not fit the model)
                continue
            if peak <= capacity:
                found.append((words, peak))
                keys.append(set(words.split()))
                break
    return found


def verdict(
    plan: Plan, model: str, batch: int, capacity: int, division: Division = WHOLE, device: str = "", **overrides: Any
) -> str:
    """A sentence that says whether the plan fits, and if it does not, what to change."""
    totals = [one.memory.total for one in details(plan, model, batch, division, **overrides)]
    top = max(range(len(totals)), key=totals.__getitem__)
    where = f"{device} has" if device else "there are"
    if totals[top] <= capacity:
        free = size(capacity - totals[top])
        return (
            f"Fits: the fullest rank, {top}, needs {size(totals[top])}; {where} {size(capacity)}, so {free} are free."
        )
    lack = size(totals[top] - capacity)
    text = f"Does not fit: rank {top} needs {size(totals[top])}, but {where} {size(capacity)}: {lack} too little."
    found = ways_that_fit(plan, model, batch, capacity, division, **overrides)
    if found:
        ways = [f"{words} ({size(peak)})" for words, peak in found]
        return f"{text} It would fit with {' or with '.join(ways)}."
    larger = holding(totals[top])
    last = f"; it would fit on {', '.join(larger)}" if larger else ", and no device of the presets holds it"
    return f"{text} No small change of the plan is enough: divide the model among more ranks (pp, tp){last}."


def _with(plan: Plan, **change: Any) -> Plan:
    if "offload" in change:
        change["offload"] = tuple({*plan.offload, change["offload"]})
    try:
        return replace(plan, **change)
    except PlanError:
        return plan


def _difference(plan: Plan, made: Plan) -> str:
    """The keys in which a plan differs, in a plan's words."""
    changed = [f.name for f in fields(Plan) if getattr(plan, f.name) != getattr(made, f.name)]
    words = [(name, getattr(made, name)) for name in changed]
    return " ".join(f"{name}={','.join(value) if isinstance(value, tuple) else value}" for name, value in words)


# what `minipar memory` prints -----------------------------------------------------------------------------------------


def report(plan: str, model: str, batch: int | None) -> dict[str, Any]:
    """The output of `minipar memory` as a dictionary for scripts: bytes of every rank by the formulas, and the hardware
    that can hold the fullest rank.

    Errors: `PlanError` for an impossible plan or an unknown model.
    """
    chosen = Plan.parse(plan)
    ranks = per_rank(chosen, model, batch)
    return {
        "plan": " ".join(plan.split()),
        "model": model,
        "batch": chosen.dp * chosen.total_microbatches if batch is None else batch,
        "per_rank": [
            {
                **{kind: getattr(rank, kind) for kind in KINDS},
                "total": rank.total,
                "activations_held": rank.held,
                "host": rank.host,
            }
            for rank in ranks
        ],
        "fits": list(holding(max(rank.total for rank in ranks))),
    }


def show_report(result: dict[str, Any]) -> str:
    """The table as text. Ranks with the same numbers share a line."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, rank in enumerate(result["per_rank"]):
        alike.setdefault(tuple(rank.values()), []).append(number)
    entries = [result["per_rank"][ranks[0]] for ranks in alike.values()]
    kinds = [*KINDS, "total", *(["host"] if any(entry["host"] for entry in entries) else [])]
    largest = max(entry["total"] for entry in entries)
    scale, unit = (2**30, "GiB") if largest >= 10 * 2**30 else (2**20, "MiB")
    rows = [("ranks", *kinds)]
    for entry, ranks in zip(entries, alike.values(), strict=True):
        rows.append((_listed(ranks), *(f"{entry[kind] / scale:.2f}" for kind in kinds)))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    title = (
        f"{result['model']}, {result['plan'] or 'one device'}, {several(result['batch'], 'row')} a step: "
        f"{unit} on each rank"
    )
    lines = [title]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    fits = result["fits"]
    others = [
        f"{name} ({spec.memory / scale:.3g} {unit})"
        for name, spec in HARDWARE.items()
        if name not in fits and spec.memory is not None
    ]
    lines.append(f"fits on: {', '.join(fits) or 'none of the hardware presets'}")
    if others:
        lines.append(f"too large for: {', '.join(others)}")
    return "\n".join(lines)


def _listed(ranks: list[int]) -> str:
    """Rank numbers as short text: a range, or the first ones and how many there are."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
