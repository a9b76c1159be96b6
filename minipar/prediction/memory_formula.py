"""Bytes on every rank of a plan as minipar itself runs it, from formulas: for `minipar memory` and MemoryExplorer.

    per_rank("pp=4 ...", "gpt2-xl", batch)      the numbers of `minipar.estimate` for every rank, without a device
    details(...)                                the same, with what they consist of

The formula is that of rank_memory.py. An estimate for a device, in which embedding and head are no layers unless the
plan says so, is `minipar.estimate`; `found.ranks` are then the bytes of its ranks.

`terms` writes the formula for one rank, in letters and with numbers:

    optimizer      o (P0 + P1 / N)       12 B × (38,597,376 + 85,842,432 ÷ 8)        = 564.54 MiB
    activations    f a + b               4 × 98.62 MiB + 31.5 MiB                    = 425.98 MiB

`verdict` says whether a plan fits, and which changes would make it fit. `report` and `show_report` make the output of
`minipar memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minipar.costs.analytic import WHOLE, Division
from minipar.costs.device import holding, known_hardware
from minipar.errors import PlanError
from minipar.models import table
from minipar.models.sizes import Sizes, Transformer, of_preset, sizes
from minipar.models.table import Branchy
from minipar.prediction import fitting
from minipar.prediction.plan_numbers import PRECISIONS as PRECISIONS
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_numbers import Precision as Precision
from minipar.prediction.plan_words import check, default_precision, numbers_of, table_of
from minipar.prediction.rank_memory import KINDS, Detail, RankMemory, of_ranks
from minipar.prediction.rank_memory import States as States
from minipar.prediction.rank_memory import in_flight as in_flight
from minipar.prediction.rank_memory import states as states
from minipar.program.rows import split_rows
from minipar.strategies.plan import Plan
from minipar.wording import several

_SHARED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # stage of ZeRO
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def per_rank(
    plan: Plan, model: str | Sizes, batch: int | None = None, division: Division = WHOLE, **overrides: Any
) -> list[RankMemory]:
    """Bytes of each rank, in rank order, for a step of `batch` rows; default: one row for every micro-batch.

    division    how further ranks share each layer, which the plan does not say: the bytes are those of one of them, and
                the ranks of ep are some of the plan's replicas
    overrides   numbers that replace the model's, such as layers=48
    Errors: `PlanError` for an unknown model, and for a plan that does not fit it.
    """
    return [detail.memory for detail in details(plan, model, batch, division, **overrides)]


def details(
    plan: Plan, model: str | Sizes, batch: int | None = None, division: Division = WHOLE, **overrides: Any
) -> list[Detail]:
    """As `per_rank`, with the origin of the bytes."""
    chosen = model_of(model, **overrides) if isinstance(model, str) else model
    division.check(chosen, plan.dp)
    if isinstance(chosen, Transformer):
        chosen = division.of(chosen)
    numbers = own_numbers(plan, chosen, division)
    count = plan.total_microbatches
    batch = plan.dp * count if batch is None else batch
    edges = split_rows(batch, plan.dp * count)
    largest = [len(edges[replica * count]) for replica in range(plan.dp)]  # the first micro-batches have more rows
    found = {rows: of_ranks(numbers._replace(rows=float(rows * division.ep)), chosen) for rows in set(largest)}
    return [detail for rows in largest for detail in found[rows] for _ in range(plan.sharing)]


def model_of(model: str, **overrides: Any) -> Sizes:
    """A model by its name or words. Errors: PlanError for an unknown one, and for one whose layers branch."""
    if model not in table.names():
        return sizes(" ".join([model, *(f"{key}={value}" for key, value in overrides.items())]))
    numbers = table.numbers(model, **overrides)
    if isinstance(numbers, Branchy):
        raise PlanError(f"memory: no formula for {model}, whose layers branch; possible is `minipar run --memory`")
    return of_preset(numbers, model)


def own_numbers(plan: Plan, model: Sizes, division: Division = WHOLE) -> PlanNumbers:
    """A plan as minipar runs it, with one row in each micro-batch. Errors: PlanError for what has no formula."""
    if plan.slice_count > 1:
        raise PlanError(
            f"memory: no formula for schedule={plan.schedule}, whose slices differ; possible are `minipar memory` of a "
            f"model that can be built ({', '.join(table.presets())}), or `minipar run --memory`"
        )
    if plan.place is not None:
        raise PlanError(
            "memory: no formula for place=, which cuts stages in pieces; possible are `minipar memory` of a model that "
            f"can be built ({', '.join(table.presets())}), or `minipar run --memory`"
        )
    found = numbers_of(table_of(plan), model)
    found = found._replace(
        dp=found.dp // division.ep, ep=found.ep * division.ep, tp=found.tp * division.tp, cp=found.cp * division.cp,
        sequence_parallel=found.sequence_parallel or division.sequence,
    )  # fmt: skip
    check(found, model)
    return found


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
    own, late = detail.own, kind == "gradients" and plan.reduce == "step"  # (then they are whole until the step)
    shared = list(own.shared) if plan.zero >= _SHARED_FROM[kind] and not late else []
    precision = own.each
    each = getattr(precision.kept(plan.zero) if shared else precision, kind.removesuffix("s"))
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
    formula = f"{kind[0]} × " + (f"({formula})" if bracket else formula)
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
    rows = several(round(detail.rows), "row")
    if detail.memory.held < kept.held:
        filled = f"2 × {size(kept.layer)}{more}"
        moved = size(kept.held - detail.memory.held)
        note = f"2 layers are on the device, one in use and one on its way; {moved} wait on the {plan.offload_to}"
        return Term("activations", bytes_here, "2 l" + " + b" * bool(more), filled, note)
    flying = [(n, each) for n, each in zip(kept.flying, kept.each, strict=True) if n]
    filled = " + ".join(f"{n} × {size(each)}" for n, each in flying) + more
    formula = "f × a" if len(flying) == 1 else "Σ f × a"
    halves = any(kept.flying[len(kept.flying) // 2 :])
    note = f"f micro-batches of {rows} wait for their backward{' or its weight half' * halves}, each with a"
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

    def peak(built: Plan) -> int:
        return max(rank.total for rank in per_rank(built, model, batch, division, **overrides))

    return fitting.ways_that_fit(fitting.lighter(plan, batch), peak, capacity, most)


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


# what `minipar memory` prints -----------------------------------------------------------------------------------------


def report(plan: str, model: str, batch: int | None, known: Sequence[RankMemory] | None = None) -> dict[str, Any]:
    """The output of `minipar memory` as a dictionary for scripts: bytes of every rank by the formulas, or as they are
    `known`, and the hardware that can hold the fullest rank.

    Errors: `PlanError` for an impossible plan or an unknown model.
    """
    chosen, asked = Plan.parse(plan), model_of(model) if known is None else None
    if asked is not None and "precision=" not in plan:
        chosen = replace(chosen, precision=default_precision(asked))
    ranks = per_rank(chosen, model, batch) if known is None else known
    return {
        "plan": " ".join(plan.split()),
        "model": model,
        "precision": chosen.precision,
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
        f"{result['model']}, {result['plan'] or 'one device'}, {several(result['batch'], 'row')} a step, "
        f"{result['precision']}: "
        f"{unit} on each rank"
    )
    lines = [title]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    fits = result["fits"]
    others = [
        f"{name} ({spec.memory / scale:.3g} {unit})"
        for name, spec in known_hardware().items()
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
