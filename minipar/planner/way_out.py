"""What would do, where no plan does: the smallest memory, more nodes, another batch, or another value of a pin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from minipar.errors import PlanError
from minipar.planner.planned import Planned
from minipar.planner.space import INNER, NAMES, Space, space
from minipar.prediction.closed_form import closed_form
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import check
from minipar.wording import several

MOST_DEVICES = 65_536  # that an error looks at
MOST_TRIED = 4_096  # smaller numbers of nodes, or of devices of one


def smallest(given: Space) -> Planned:
    """A plan of a space that needs least memory, whatever its time: one row at a time, the largest stage of ZeRO, and
    all on the host that may be there. Errors: PlanError, if no plan can be at all."""
    found = _smallest(given)
    if found is None:
        raise PlanError(_no_plan(given))
    return found


def _smallest(given: Space) -> Planned | None:
    d = given.domains
    rows = d["micro_batch_size"] if d["ep"] != (1,) else d["micro_batch_size"][:1]
    zero = tuple(sorted({min(d["zero"]), max(d["zero"])}))  # (a single replica can only have stage 0)
    ends = {**d, "micro_batch_size": rows, "schedule": d["schedule"][:3], "zero": zero}
    ends["offload"] = (max(d["offload"], key=len),)
    best: Planned | None = None
    small = replace(given, domains=ends)
    for outer in small.outer():
        for numbers in small.inner(outer):
            for chosen in [*small.offloaded(numbers)] or [numbers]:
                try:
                    cost = closed_form(chosen, given.model, given.machine)
                    if best is None or (cost.memory, cost.time) < (best.memory, best.cost.time):
                        check(chosen, given.model, given.machine)
                        best = Planned(chosen, cost)
                except PlanError:
                    continue
    return best


def nothing_fits(given: Space) -> str:
    """What would do: the smallest memory of a device, and a number of nodes."""
    least, machine = smallest(given), given.machine
    if given.runs and least.memory <= machine.memory:
        return (
            f"{given.model.name or 'model'} on {several(given.devices, 'device')}: minipar itself can run none of the "
            "plans that fit; possible is a search for others, too (without runs)"
        )
    text = (
        f"{given.model.name or 'model'} on {several(given.devices, 'device')}: no plan fits in "
        f"{machine.memory / 1e9:.4g} GB; the smallest needs {least.memory / 1e9:.4g} GB ({least.words}): possible is a "
        "budget of that size"
    )
    nodes = machine.nodes
    while nodes * machine.per_node < MOST_DEVICES:
        nodes *= 2
        try:
            more = _smallest(space(given.model, replace(machine, nodes=nodes), given.batch, dict(given.pins), 0.0))
        except PlanError:  # a pin that so many nodes cannot have
            continue
        if more is not None and more.memory <= machine.memory:
            return f"{text}, or nodes={nodes}"
    return text


def _no_plan(given: Space) -> str:
    """Why no plan can be at all: a pin that the others leave no plan for; or a batch, or a number of devices."""
    pins = dict(given.pins)
    for key in pins:
        others = {other: value for other, value in pins.items() if other != key}
        free = space(given.model, given.machine, given.batch, others, 0.0)
        possible = sorted({_value(key, plan) for plan in _plans(free, key in (*INNER, "chunks"))})
        if possible:
            return (
                f"{key}={pins[key]}: no plan for {_asked(given, others)} has it; possible "
                f"{'are' if len(possible) > 1 else 'is'} {key}={', '.join(map(str, possible))}"
            )
    ways = [*_batches(given), *_fewer(given), *(["fewer pins"] if pins else [])]
    return (
        f"{_asked(given, pins)}: no plan divides both evenly; possible are "
        f"{', '.join(ways) or 'another batch, or another number of nodes'}"
    )


def _asked(given: Space, pins: dict[str, Any]) -> str:
    words = " ".join(f"{key}={value}" for key, value in pins.items())
    return f"batch={given.batch} on {several(given.devices, 'device')}{f' with {words}' if words else ''}"


def _value(key: str, plan: PlanNumbers) -> Any:
    """The value of a key in a plan, as a pin takes it."""
    if key == "reduce":
        return "microbatch" if plan.every else "step"
    if key == "overlap":
        return "backward" if plan.overlap else "none"
    value = getattr(plan, NAMES.get(key, key))
    if key == "offload":
        return ",".join(value) or "none"
    if key == "checkpoint":
        return str(value or "none")
    return int(value) if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else value


def _plans(given: Space, every: bool = False) -> Iterator[PlanNumbers]:
    """The plans of a space that can be, whatever their memory: `every` one, or one for each way to compute a
    micro-batch."""
    for outer in given.outer():
        for plan in given.inner(outer):
            try:
                check(plan, given.model, given.machine)
            except PlanError:
                continue
            yield plan
            if not every:
                break


def _batches(given: Space) -> list[str]:
    """The nearest smaller and larger batch that some plan divides."""
    d, below, above = given.domains, [], []
    for tp, cp, ep, pp in product(d["tp"], d["context_parallel"], d["ep"], d["pp"]):
        dp, rest = divmod(given.devices, tp * cp * ep * pp)
        if dp and not rest:
            below.append(given.batch // dp * dp)
            above.append(-(-given.batch // dp) * dp)
    near = [max(below, default=0), min(above, default=0)]
    pins = dict(given.pins)
    return [
        f"batch={one}"
        for one in dict.fromkeys(near)
        if one > 0 and next(_plans(space(given.model, given.machine, one, pins, 0.0)), None)
    ]


def _fewer(given: Space) -> list[str]:
    """The largest smaller number of nodes, or of devices of one node, that some plan divides."""
    machine, pins = given.machine, dict(given.pins)
    ways = [(f"nodes={k}", replace(machine, nodes=k)) for k in range(min(machine.nodes, MOST_TRIED) - 1, 0, -1)]
    ways += [
        (f"gpus-per-node={k}", replace(machine, per_node=k))
        for k in range(min(machine.per_node, MOST_TRIED) - 1, 0, -1)
    ]
    return next(
        ([text] for text, less in ways if next(_plans(space(given.model, less, given.batch, pins, 0.0)), None)), []
    )
