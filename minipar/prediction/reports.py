"""What `minipar memory` prints: bytes by rank and kind, as a dictionary for scripts and as a table for people."""

from __future__ import annotations

from typing import Any

from minipar.wording import several

_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "total")


def memory(plan: str, model: str, batch: int | None) -> dict[str, Any]:
    """Bytes of every rank by the formulas of `memory_formula`, and which hardware presets hold the largest.

    Errors: `PlanError` for a plan or model that cannot be.
    """
    from minipar.costs.device import holding
    from minipar.prediction import memory_formula
    from minipar.strategies.plan import Plan

    chosen = Plan.parse(plan)
    ranks = memory_formula.per_rank(chosen, model, batch)
    return {
        "plan": " ".join(plan.split()),
        "model": model,
        "batch": chosen.dp * chosen.total_microbatches if batch is None else batch,
        "per_rank": [
            {
                **{kind: getattr(rank, kind) for kind in _KINDS},
                "activations_held": rank.held,
                "host": rank.host,
            }
            for rank in ranks
        ],
        "fits": list(holding(max(rank.total for rank in ranks))),
    }


def show_memory(result: dict[str, Any]) -> str:
    """The table: one line for all ranks with the same numbers."""
    from minipar.costs.device import HARDWARE

    alike: dict[tuple[int, ...], list[int]] = {}
    for number, rank in enumerate(result["per_rank"]):
        alike.setdefault(tuple(rank.values()), []).append(number)
    entries = [result["per_rank"][ranks[0]] for ranks in alike.values()]
    kinds = [*_KINDS, *(["host"] if any(entry["host"] for entry in entries) else [])]
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
    """Rank numbers, short: all of a run, or the first ones and how many there are."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"
