"""The formulas of a rank's memory in letters and with numbers, and whether a plan fits.

optimizer      o (P0 + P1 / N)       12 B × (38,597,376 + 85,842,432 ÷ 8)        = 564.54 MiB
activations    f a + b               4 × 98.62 MiB + 31.5 MiB                    = 425.98 MiB
"""

from __future__ import annotations

from typing import NamedTuple

from minipar.costs.analytic import WHOLE, Division
from minipar.costs.device import holding
from minipar.costs.quantities import size
from minipar.models.sizes import Sizes
from minipar.prediction import fitting
from minipar.prediction.on_paper import details, per_rank
from minipar.prediction.rank_memory import KINDS, Detail
from minipar.strategies.plan import Plan
from minipar.wording import several

_SHARED_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}  # stage of ZeRO


class Term(NamedTuple):
    """Bytes of one kind on one rank: the formula in letters, the formula with numbers, and a note."""

    kind: str
    bytes: int
    formula: str
    filled: str
    note: str = ""


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
    plan: Plan, model: str | Sizes, batch: int, capacity: int, division: Division = WHOLE
) -> list[tuple[str, int]]:
    """Changes of the plan with which every rank fits, the smallest of each kind, with the bytes of the fullest rank."""

    def peak(built: Plan) -> int:
        return max(rank.total for rank in per_rank(built, model, batch, division))

    near = fitting.changes(plan.dp, plan.pp, plan.microbatches, plan.accumulate)
    families = [*near, *fitting.lighter(plan.offload, plan.precision)]
    return fitting.ways_that_fit(fitting.changed(plan, batch, families), peak, capacity)


def verdict(
    plan: Plan, model: str | Sizes, batch: int, capacity: int, division: Division = WHOLE, device: str = ""
) -> str:
    """A sentence that says whether the plan fits, and if it does not, what to change."""
    totals = [one.memory.total for one in details(plan, model, batch, division)]
    top = max(range(len(totals)), key=totals.__getitem__)
    where = f"{device} has" if device else "there are"
    if totals[top] <= capacity:
        free = size(capacity - totals[top])
        return (
            f"Fits: the fullest rank, {top}, needs {size(totals[top])}; {where} {size(capacity)}, so {free} are free."
        )
    lack = size(totals[top] - capacity)
    text = f"Does not fit: rank {top} needs {size(totals[top])}, but {where} {size(capacity)}: {lack} too little."
    found = ways_that_fit(plan, model, batch, capacity, division)
    if found:
        ways = [f"{words} ({size(peak)})" for words, peak in found]
        return f"{text} It would fit with {' or with '.join(ways)}."
    larger = holding(totals[top])
    last = f"; it would fit on {', '.join(larger)}" if larger else ", and no device of the presets holds it"
    return f"{text} No small change of the plan is enough: divide the model among more ranks (pp, tp){last}."
