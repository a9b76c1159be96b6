"""Plans near one that does not fit into memory: what may be tried, not whether it fits.

Whether one of them fits, a formula says before anything is measured (memory_formula.py), and the tapes of the layers
say after a run that did not fit (advice.py). No torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minipar.errors import PlanError
from minipar.strategies.plan import Plan


def nearby(plan: Plan, batch: int) -> list[list[Plan]]:
    """Families of changed plans for the same number of ranks. In each family the smaller changes come first."""
    more = "microbatches" if plan.pp == 1 else "accumulate"  # a pipeline holds several micro-batches at once
    count = getattr(plan, more)
    families: list[list[dict[str, Any]]] = [[{more: count * k} for k in (2, 4, 8, 16)]]
    families.append([{"checkpoint": value} for value in ("sqrt", 1)])
    if plan.dp > 1:
        families.append([{"zero": stage} for stage in (1, 2, 3)])
        families.append([{"dp": plan.dp // k, "pp": plan.pp * k} for k in (2, 4) if plan.dp % k == 0])
    families.append([{"checkpoint": "sqrt", more: count * k} for k in (2, 4, 8, 16)])
    if plan.dp > 1:
        families.append([{"zero": 3, "checkpoint": "sqrt", more: count * k} for k in (1, 2, 4, 8)])
    return [[made for change in family if (made := _changed(plan, change, batch)) is not None] for family in families]


def _changed(plan: Plan, change: dict[str, Any], batch: int) -> Plan | None:
    try:
        made = replace(plan, **change)
    except PlanError:
        return None
    return made if made != plan and made.dp * made.total_microbatches <= batch else None
