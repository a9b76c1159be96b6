"""Benchmarks compare minipar with torch's own tools in one run: they give ratios of medians of interleaved runs.

`make bench`, `minipar bench [NAME...]` or `python -m benchmarks [NAME...]` print one table: measured values beside
their targets, with missed targets marked. A *must* is a condition, an *aim* is a goal of the project.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Row, table
from minipar.errors import PlanError

NAMES = (
    "simulator",
    "explorer",
    "cluster",
    "communicator",
    "comm",
    "executor",
    "data_parallel",
    "priority",
    "pipelines",
    "emulation",
    "predictions",
    "tensor_parallel",
    "zero",
    "recompute",
    "offload",
    "partition",
    "memory",
    "server",
    "checking",
    "own_model",
    "widgets",
    "site",
    "gpu",
)

PICTURES = ("comm",)  # the benchmarks that draw a picture

__all__ = ["NAMES", "Row", "run", "table"]


def run(
    names: Sequence[str] = (), quick: bool = False, show: bool = True, picture: str | None = None
) -> dict[str, Any]:
    """Run the named benchmarks (default: all) and return `{"rows": [...], "missed": n}`. `show` prints each name as it
    begins.

    picture   the PNG or SVG file into which a benchmark draws its picture, if it draws one
    """
    if picture and not set(names or NAMES) & set(PICTURES):
        raise PlanError(f"--picture {picture}: {', '.join(names)} draws none; possible are {', '.join(PICTURES)}")
    for name in names:
        if name not in NAMES:
            raise PlanError(f"benchmark {name!r}: unknown; possible are {', '.join(NAMES)}")
    rows: list[Row] = []
    for name in names or NAMES:
        if show:
            print(f"... {name}", flush=True)
        module = importlib.import_module(f"benchmarks.{name}")
        rows += module.measure(quick, picture) if name in PICTURES else module.measure(quick)
    return {"rows": [row.as_dict() for row in rows], "missed": sum(row.missed == "must" for row in rows)}
