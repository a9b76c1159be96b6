"""What the benchmarks share: rows of the table, and contestants that run in turn, so that noise affects all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from minipar.cluster import Cluster
from minipar.comm import communicator


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


contestants: dict[str, Callable[[], object]] = {}  # of this rank; kept between calls of the cluster


def as_torch_starts_them() -> None:
    """In a rank: be scheduled as an ordinary process. (Ranks of a Cluster are batch jobs: `yield_to_others`.)"""
    if hasattr(os, "sched_setscheduler"):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def once(name: str) -> tuple[float, float]:
    """In a rank: run a contestant on all ranks together. Returns the times of its start and its end."""
    communicator.create().barrier()
    start = time.perf_counter()
    contestants[name]()
    return start, time.perf_counter()


def in_turn(entries: Mapping[str, Cluster], rounds: int, warm_up: int = 3) -> dict[str, float]:
    """Run every contestant once in each round, each on its cluster. Returns the medians of the seconds from the first
    rank's start to the last rank's end."""
    return {name: median(found) for name, found in times_in_turn(entries, rounds, warm_up).items()}


def times_in_turn(entries: Mapping[str, Cluster], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """As `in_turn`, but with the seconds of every round instead of medians."""
    times: dict[str, list[float]] = {name: [] for name in entries}
    for k in range(warm_up + rounds):
        for name, cluster in entries.items():
            runs = cluster.run(once, name)
            if k >= warm_up:
                times[name].append(max(end for _, end in runs) - min(start for start, _ in runs))
    return times
