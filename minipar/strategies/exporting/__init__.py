"""Plans for other systems: Megatron-LM's flags, DeepSpeed's and torchtitan's configuration; a script for torchrun.

    print(Plan.parse("tp=8 pp=4 dp=2 microbatches=16").export("megatron", "gpt3-175b", batch=64))

Each system has a module with one table: a key of a plan, and the rule that says it to the system or refuses it. What
maps to what, and the versions whose own parsers read the results, stand in docs/export.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minipar.errors import PlanError
from minipar.models import table
from minipar.models.sizes import Sizes, sizes
from minipar.models.table import Preset
from minipar.strategies.exporting import deepspeed, megatron, torchrun, torchtitan
from minipar.strategies.exporting.rules import Export, Given

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan

_SYSTEMS: dict[str, tuple[str, Callable[[Given], Export]]] = {
    "megatron": ("Megatron-LM", megatron.export),
    "deepspeed": ("DeepSpeed", deepspeed.export),
    "torchtitan": ("torchtitan", torchtitan.export),
}


def systems() -> tuple[str, ...]:
    """The names of the systems that plans can be exported to."""
    return tuple(_SYSTEMS)


def export(
    plan: Plan,
    system: str,
    model: str | Preset | Sizes | None = None,
    batch: int | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
) -> Export:
    """See `Plan.export`."""
    if system not in (*_SYSTEMS, "torchrun"):
        raise PlanError(f"system {system!r}: unknown; possible are {', '.join(_SYSTEMS)}, torchrun")
    name, say = _SYSTEMS.get(system, ("torchrun", lambda given: torchrun.export(given, model)))
    numbers: Preset | Sizes | None = None if isinstance(model, str) else model
    if isinstance(model, str):
        numbers = table.numbers(model) if model in table.names() else sizes(model)
    rows, batch = _rows(plan, batch)
    nodes, gpus = _machines(plan, nodes, gpus_per_node)
    return say(Given(name, plan, rows, batch, nodes, gpus, numbers))


def _rows(plan: Plan, batch: int | None) -> tuple[int, int]:
    """Rows of a micro-batch on one rank, and rows of a step. Errors: PlanError for a batch that does not divide."""
    parts = plan.dp * plan.ep * plan.total_microbatches
    if batch is None:
        return 1, parts
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise PlanError(f"batch={batch!r}: must be a whole number; possible are multiples of {parts}")
    if batch % parts:
        below = batch // parts * parts
        nearest = f"{below} and {below + parts}" if below else str(parts)
        raise PlanError(
            f"batch={batch}: other systems divide it evenly among replicas and micro-batches, {parts} of this plan; "
            f"the nearest possible: {nearest}"
        )
    return batch // parts, batch


def _machines(plan: Plan, nodes: int | None, gpus: int | None) -> tuple[int, int]:
    """Nodes, and ranks of each. Errors: PlanError unless they are the plan's ranks together."""
    for key, value in (("nodes", nodes), ("gpus_per_node", gpus)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PlanError(f"{key}={value}: must be a whole number of at least 1")
    if nodes is None:
        nodes, gpus = (1, plan.ranks) if gpus is None else (max(1, plan.ranks // gpus), gpus)
    elif gpus is None:
        gpus = max(1, plan.ranks // nodes)
    if nodes * gpus != plan.ranks:
        more, rest = divmod(nodes * gpus, plan.ranks // plan.dp)
        other = f", or dp={more}" if not rest else ""
        raise PlanError(
            f"nodes={nodes} gpus_per_node={gpus}: {nodes * gpus} GPUs, but plan {plan} needs {plan.ranks}; "
            f"possible are as many GPUs as that{other}"
        )
    return nodes, gpus
