"""What would fit: the question that comes after "does not fit", for all that ask it.

    changes(dp, pp, ...), lighter(...)      families of changes for as many ranks, the smaller changes first
    changed(plan, batch, families)          the changed plans that can be
    ways_that_fit(families, peak, capacity) the first plan of each family that fits, by any judge of memory
    smallest(numbers, model, machine)       the fewest devices of this kind
    holding (costs/device.py)               the devices that would hold the plan as it is

Who judges: the formula, before anything is measured (on_paper.py, estimating.py); or the tapes of measured
layers, after a run that did not fit (advice.py). No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

from minipar.costs.hardware import Hardware
from minipar.errors import MiniparError, PlanError
from minipar.models.sizes import Chain, Sizes
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import ROWS, check, numbers_of, table_of, words
from minipar.prediction.rank_memory import fullest
from minipar.strategies.keys import offloaded
from minipar.strategies.plan import Plan

T = TypeVar("T")
MOST = 3  # ways that are named


def ways_that_fit(
    families: Iterable[Sequence[tuple[str, T]]], peak: Callable[[T], int], capacity: int
) -> list[tuple[str, int]]:
    """At most MOST ways to fit, with the bytes of the fullest rank: the first plan of each family that fits.

    families   of plans with their words, the smaller changes of each family first. A plan is left out if a smaller
               change, some of its words, was enough
    peak       bytes of the fullest rank of a plan; it raises an error for a plan that cannot be
    """
    found: list[tuple[str, int]] = []
    enough: list[set[str]] = []
    for family in families:
        for text, built in family:
            if len(found) == MOST:
                return found
            if not text or any(known <= set(text.split()) for known in enough):
                continue
            try:
                size = peak(built)
            except MiniparError:  # (the changed plan may not fit the model)
                continue
            if size <= capacity:
                found.append((text, size))
                enough.append(set(text.split()))
                break
    return found


Change = dict[str, Any]  # of a plan's keys
Families = list[list[Change]]


def changes(dp: int, pp: int, microbatches: int, accumulate: int = 1) -> Families:
    """Families of changes for the same number of ranks. In each family the smaller changes come first."""
    more = "microbatches" if pp == 1 else "accumulate"  # a pipeline holds several micro-batches at once
    count = microbatches if pp == 1 else accumulate
    families: Families = [[{more: count * k} for k in (2, 4, 8, 16)]]
    families.append([{"checkpoint": value} for value in ("sqrt", 1)])
    if dp > 1:
        families.append([{"zero": stage} for stage in (1, 2, 3)])
        families.append([{"dp": dp // k, "pp": pp * k} for k in (2, 4) if dp % k == 0])
    families.append([{more: count * k, "checkpoint": "sqrt"} for k in (2, 4, 8, 16)])
    if dp > 1:
        families.append([{more: count * k, "checkpoint": "sqrt", "zero": 3} for k in (1, 2, 4, 8)])
    return families


def lighter(offload: Iterable[str], precision: str = "bf16") -> Families:
    """Changes by which one more kind of value waits on the host, or numbers are shorter."""
    away: Families = [[{"offload": offloaded((*offload, what))}] for what in ("optimizer", "activations")]
    return [*away, [{"precision": "bf16"}]] if precision == "float32" else away


def described(change: Change) -> str:
    """A change in a plan's words."""
    return " ".join(f"{key}={','.join(x) if isinstance(x, tuple) else x}" for key, x in change.items())


def more_ranks(plan: Plan) -> Families:
    """Changes for two and four times as many ranks: a longer pipeline, and ZeRO 3."""
    return [[{"pp": plan.pp * k} for k in (2, 4)], [{"dp": plan.dp * k, "zero": 3} for k in (2, 4)]]


def changed(plan: Plan, batch: int, families: Families) -> list[list[tuple[str, Plan]]]:
    """The changed plans that can be, and have rows for all their micro-batches, with the words of what is changed."""
    found: list[list[tuple[str, Plan]]] = []
    for family in families:
        found.append([])
        for change in family:
            new = {key: value for key, value in change.items() if getattr(plan, key) != value}
            try:
                built = replace(plan, **new)
            except PlanError:
                continue
            if new and built.dp * built.total_microbatches <= batch:
                found[-1].append((described(new), built))
    return found


def ways_of_numbers(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> list[tuple[str, int]]:
    """Ways to fit on as many devices of a machine, with the same rows in a step."""
    n, batch = numbers, round(numbers.batch)
    table = {key: value for key, value in table_of(words(n)).items() if key != ROWS}
    families = [*changes(n.dp, n.pp, n.microbatches // n.rounds, n.rounds), *lighter(n.offload)]

    def peak(change: Change) -> int:
        built = numbers_of({**table, **change}, model, machine, batch, n.stack)
        check(built, model, machine)
        return fullest(built, model).total

    def named(change: Change) -> tuple[str, Change]:
        return described({key: value for key, value in change.items() if table.get(key) != value}), change

    return ways_that_fit([list(map(named, family)) for family in families], peak, machine.memory)


def smallest(numbers: PlanNumbers, model: Sizes, machine: Hardware) -> PlanNumbers | None:
    """The plan with the fewest devices that fits, among those that differ only in tp, pp and dp; None: there is none.

    The number of rows of a step stays as it is, or grows with dp.
    """
    n = numbers
    shares = [1] if isinstance(model, Chain) else [
        t for t in _powers(machine.per_node) if model.heads % t == 0 and (t > 1 or not n.sequence_parallel)
    ]  # fmt: skip
    pipes = [p for p in range(1, model.layers // max(1, n.chunks) + 1) if model.layers % p == 0]
    copies = sorted({n.dp, *(_powers(4096) if n.zero else ())})
    for tp, pp, dp in sorted(product(shares, pipes, copies), key=lambda one: (one[0] * one[1] * one[2], -one[0])):
        count = max(1, n.microbatches * n.dp // dp) if n.zero else n.microbatches
        built = n._replace(tp=tp, pp=pp, dp=dp, microbatches=count, split=())
        try:
            check(built, model, machine)
            if fullest(built, model).total <= machine.memory:
                return built
        except PlanError:
            continue
    return None


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]
