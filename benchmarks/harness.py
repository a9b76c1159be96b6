"""What the benchmarks share: rows of the table, and running contestants in turn so that noise hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from minipar.comm.communicator import Communicator


@dataclass(frozen=True)
class Row:
    """One line of the table. `must` and `aim` are upper bounds of `value`; None where there is no such target."""

    name: str
    value: float
    unit: str = ""
    must: float | None = None
    aim: float | None = None
    note: str = ""

    @property
    def missed(self) -> str:
        """ "must" or "aim" if the value is above it, else ""."""
        if self.must is not None and self.value > self.must:
            return "must"
        return "aim" if self.aim is not None and self.value > self.aim else ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"missed": self.missed}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'benchmark':<58} {'measured':>12} {'must':>8} {'aim':>8}  outcome"]
    for row in rows:
        bounds = ["" if row[key] is None else f"<= {row[key]:g}" for key in ("must", "aim")]
        targets = any(bounds)
        outcome = {"must": "MISSED", "aim": "aim missed", "": "ok" if targets else ""}[row["missed"]]
        note = f"  ({row['note']})" if row["note"] else ""
        value = f"{row['value']:.3f} {row['unit']}".strip()
        lines.append(f"{row['name']:<58} {value:>12} {bounds[0]:>8} {bounds[1]:>8}  {outcome}{note}")
    return "\n".join(lines)


Times = dict[str, list[tuple[float, float]]]


def in_turn(
    comm: Communicator, contestants: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 3
) -> Times:
    """Run every contestant once a round, all ranks together: (start, end) clock readings of each run, on this rank."""
    times: Times = {name: [] for name in contestants}
    for k in range(warm_up + rounds):
        for name, run in contestants.items():
            comm.barrier()
            start = time.perf_counter()
            run()
            end = time.perf_counter()
            if k >= warm_up:
                times[name].append((start, end))
    return times


def medians(per_rank: Sequence[Times]) -> dict[str, float]:
    """Median over the rounds of the time from the first rank's start to the last rank's end, in seconds."""
    return {
        name: median(
            max(end for _, end in runs) - min(start for start, _ in runs)
            for runs in zip(*(times[name] for times in per_rank), strict=True)
        )
        for name in per_rank[0]
    }
