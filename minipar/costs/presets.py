"""Models by name for costs on paper: the toys that minipar builds, and published ones of which only numbers exist.

    numbers = presets.model("gpt3-175b")                  a plain dataclass: dataclasses.replace(numbers, layers=48)
    program = Plan(pp=8).compile(presets.shape("gpt3-175b"))

The tables are in `minipar.models.table`; formulas on these numbers in `analytic.py`.
"""

from __future__ import annotations

from typing import Any

from minipar.costs import analytic
from minipar.costs.divided import WHOLE, Division
from minipar.costs.recomputation import LayerCosts
from minipar.models import shapes, table
from minipar.program.shape import Shape


def names() -> tuple[str, ...]:
    """All names, the toys first."""
    return (*table.PRESETS, *table.PUBLISHED)


def model(name: str, **overrides: Any) -> table.Preset:
    """The numbers of a model, some of them replaced. Errors: `PlanError` for an unknown name or number."""
    return table.numbers(name, **overrides)


def shape(name: str, *, element_size: int = 4, **overrides: Any) -> Shape:
    """What a plan must know of a model; as `models.shape`."""
    return shapes.shape(name, element_size=element_size, **overrides)


def layer_costs(
    name: str,
    rows: int,
    element: int = 4,
    *,
    selective: bool = False,
    division: Division = WHOLE,
    **overrides: Any,
) -> LayerCosts:
    """Every layer for `rows` rows: a toy's as minipar runs it, a published model's as in the papers."""
    fused, numbers = name not in table.PUBLISHED, model(name, **overrides)
    return analytic.layer_costs(numbers, rows, element, fused=fused, selective=selective, division=division)
