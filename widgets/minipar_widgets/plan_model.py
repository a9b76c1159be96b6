"""What PlanExplorer shows, computed by the planner's own search; nothing here depends on pixels.

    problem(shelf, "gpt3-175b", "a100-80gb", 1024, 1536, (("tp", "8"),))     what is asked
    solved(that)          the best plans (`planner.exhaustive.solve`), or why there are none
    instead(that, "pp")   what each value of a key would cost instead
    traded(that, 3)       the front of time against memory, as far as the first three budgets

Each of them takes about a second for 1,024 GPUs, so that a view asks for one at a time. Times are those of the
formulas: what `search` also simulates can move by a few percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from minipar.costs.hardware import PRESETS, Hardware, hardware
from minipar.costs.rates import Calibration
from minipar.errors import PlanError
from minipar.models.sizes import MODELS, Sizes, sizes
from minipar.planner.exhaustive import Alternative, Found, alternatives, solve
from minipar.planner.planned import Planned, difference
from minipar.planner.space import INNER, OUTER, Space, space
from minipar.planner.way_out import smallest
from minipar.prediction.rank_memory import KINDS

PLANS = 8  # that are shown
BUDGETS = 6  # of memory, on the front
# Keys of a plan, in the order of the table's columns, with their heads.
HEADS = {
    "tp": "tp", "pp": "pp", "dp": "dp", "context_parallel": "cp", "ep": "ep", "micro_batch_size": "rows",
    "schedule": "schedule", "chunks": "chunks", "zero": "zero", "reduce": "reduce", "checkpoint": "recompute",
    "sequence_parallel": "seq. par.", "offload": "offload",
}  # fmt: skip
SEARCHED = tuple(key for key in HEADS if key in (*OUTER, *INNER))  # keys of which `instead` knows all values
NEVER = "–"  # a key that means nothing in a plan: a schedule without a pipeline
Pins = tuple[tuple[str, str], ...]


class Problem(NamedTuple):
    """What is asked: a model, a machine that has its nodes, rows of a step, and keys that are fixed."""

    model: Sizes
    machine: Hardware
    batch: int
    pins: Pins = ()


@dataclass(frozen=True)
class Shelf:
    """Models and machines to choose from, by name: the presets, and those of the user."""

    models: Mapping[str, Sizes] = field(default_factory=lambda: dict(MODELS))
    machines: Mapping[str, Hardware] = field(default_factory=lambda: dict(PRESETS))

    def with_model(self, given: str | Sizes) -> tuple[Shelf, str]:
        """The shelf with a model on it, and its name there. Errors: PlanError, as `sizes`."""
        built = sizes(given)
        name = given if isinstance(given, str) else built.name or "your model"
        return replace(self, models={**self.models, name: built}), name

    def with_machine(self, given: str | Hardware | Calibration) -> tuple[Shelf, str]:
        """The shelf with a machine on it, and its name there. Errors: PlanError, as `hardware`."""
        built = hardware(given)
        name = given if isinstance(given, str) else built.name
        return replace(self, machines={**self.machines, name: built}), name


def problem(shelf: Shelf, model: str, machine: str, gpus: int, batch: int, pins: Pins = ()) -> Problem:
    """The problem of some names and numbers.

    Errors: PlanError for numbers below 1, and for more GPUs than a node has that fill no whole number of nodes.
    """
    for name, value in (("gpus", gpus), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name}={value!r}: must be a whole number of at least 1")
    one = shelf.machines[machine]
    inside = min(gpus, one.per_node)
    if gpus % inside:
        raise PlanError(f"gpus={gpus}: must be a multiple of {inside}, the GPUs of a node of {machine}, or fewer")
    return Problem(shelf.models[model], replace(one, nodes=gpus // inside, per_node=inside), batch, pins)


@lru_cache(512)
def solved(asked: Problem) -> Found | str:
    """The best plans; or why there are none, with what would do."""
    try:
        return solve(_space(asked), PLANS)
    except PlanError as error:
        return str(error)


def _space(asked: Problem) -> Space:
    return space(asked.model, asked.machine, asked.batch, dict(asked.pins))


@lru_cache(512)
def instead(asked: Problem, key: str) -> tuple[Alternative, ...]:
    """What each value of a key would cost instead of the best plan, all others free but for pins.

    A pin of the key itself does not count. Errors: PlanError for a key that is not searched.
    """
    found = solved(asked)
    if isinstance(found, str):
        return ()
    free = asked._replace(pins=tuple(pin for pin in asked.pins if pin[0] != key))
    return alternatives(_space(free), key, found.plan).rows


@lru_cache(512)
def traded(asked: Problem, budgets: int) -> tuple[Planned, ...]:
    """The fastest plans for less and less memory, from the smallest to the fastest one: after the first `budgets` sizes
    of memory of BUDGETS, each as much smaller than the one before."""
    found = solved(asked)
    if isinstance(found, str):
        return ()
    if budgets == 0:
        return _undominated(found.best)
    before = traded(asked, budgets - 1)
    if budgets == 1:
        more: Planned = smallest(found.space)
    else:
        low, high = min(one.memory for one in before), min(found.best, key=lambda one: one.time).memory
        budget = round(high * (low / high) ** ((budgets - 1) / BUDGETS))
        machine = replace(found.space.machine, memory=budget)
        more = min(solve(replace(found.space, machine=machine), 1).best, key=lambda one: one.time)
    return _undominated((*before, more))


def _undominated(plans: Sequence[Planned]) -> tuple[Planned, ...]:
    """The plans than which no other one is faster with as little memory, the smallest first."""
    kept: list[Planned] = []
    for one in sorted(plans, key=lambda plan: (plan.memory, plan.time)):
        if not kept or one.time < kept[-1].time:
            kept.append(one)
    return tuple(kept)


# In words ------------------------------------------------------------------------------------------------------------


def cells(plan: Planned) -> dict[str, str]:
    """Of each key the plan's value, as a pin takes it; NEVER where the key means nothing."""
    n = plan.numbers
    return {
        "tp": str(n.tp), "pp": str(n.pp), "dp": str(n.dp), "context_parallel": str(n.cp), "ep": str(n.ep),
        "micro_batch_size": f"{n.rows:g}", "schedule": n.schedule if n.pp > 1 else NEVER,
        "chunks": str(n.chunks) if n.pp > 1 and n.chunks > 1 else NEVER, "zero": str(n.zero),
        "reduce": ("microbatch" if n.every else "step") if n.zero >= 2 else NEVER,
        "checkpoint": str(n.checkpoint) if n.checkpoint else "none",
        "sequence_parallel": ("true" if n.sequence_parallel else "false") if n.tp > 1 else NEVER,
        "offload": ",".join(n.offload) or "none",
    }  # fmt: skip


def columns(plans: Sequence[Planned], pins: Pins) -> list[str]:
    """The keys that are worth a column: of the mesh, and all that a plan uses or that is pinned."""
    always = {"tp", "pp", "dp", "micro_batch_size", "schedule", "zero", "checkpoint"} | {key for key, _ in pins}
    plain = {"1", "none", "false", NEVER}
    used = {key for plan in plans for key, value in cells(plan).items() if value not in plain}
    return [key for key in HEADS if key in always | used]


def gigabytes(count: float) -> str:
    """Bytes in words, in powers of ten, as memory of accelerators is sold."""
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"


def clock(seconds: float) -> str:
    """Seconds in words."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def percent(slower: float) -> str:
    """How much slower: 0.021 is +2.1 %."""
    return f"{slower * 100:+.1f} %" if abs(slower) >= 5e-4 else "+0 %"


def why(best: Planned, other: Planned) -> str:
    """What another plan has or takes more than the best one."""
    found = difference(best, other).reason
    if found:
        return found
    if other.memory == best.memory:
        return "as fast, and as large"
    less = "less" if other.memory < best.memory else "more"
    return f"as fast, with {gigabytes(abs(other.memory - best.memory))} {less} memory"


def described(plan: Planned, best: Planned) -> dict[str, Any]:
    """A plan for the browser; `why` says what makes it slower than the best one."""
    same = plan.numbers == best.numbers
    return {
        "time": clock(plan.time), "seconds": plan.time, "over": "best" if same else percent(plan.time / best.time - 1),
        "memory": gigabytes(plan.memory), "total": plan.memory, "bytes": [plan.cost.bytes.get(k, 0) for k in KINDS],
        "host": gigabytes(plan.cost.host) if plan.cost.host else "", "tflops": f"{plan.tflops_per_gpu:.4g}",
        "cells": cells(plan), "words": plan.words, "why": parts(plan) if same else why(best, plan),
    }  # fmt: skip


def parts(plan: Planned) -> str:
    """Where most of a plan's time goes."""
    most = sorted(plan.cost.seconds.items(), key=lambda one: -one[1])[:3]
    return "most time: " + ", ".join(f"{part} {seconds / plan.time:.0%}" for part, seconds in most)


def price(free: Planned, pinned: Planned) -> str:
    """What pins cost against the best plan without them."""
    if pinned.time <= free.time * (1 + 5e-4):
        return f"costs nothing: {clock(pinned.time)}, as without"
    reason = difference(free, pinned).reason
    more = f" ({reason})" if reason else ""
    return f"costs {percent(pinned.time / free.time - 1)}: {clock(pinned.time)} instead of {clock(free.time)}{more}"


def searched(found: Found) -> str:
    """How many plans were looked at, and how."""
    return (
        f"{found.searched:,} plans: {found.tried:,} by formulas, all others cannot be faster than the last one here, "
        "or do not fit"
    )
