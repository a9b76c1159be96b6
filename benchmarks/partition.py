"""How long the exact partition of 1,000 layers takes: for equal ranks, and for ranks with speeds from 0.5 to 2.

With few micro-batches the sum of the stages matters as much as the slowest one, and many bounds have to be tried.
"""

from __future__ import annotations

import random
import time
from statistics import median

from benchmarks.harness import Row
from minipar.costs.partition import partition

LAYERS, RANKS = 1000, 64


def measure(quick: bool = False) -> list[Row]:
    chance = random.Random(0)
    costs = [chance.uniform(0.5, 1.5) for _ in range(LAYERS)]
    speeds = [chance.uniform(0.5, 2.0) for _ in range(RANKS)]
    rows = []
    for name, given in (("equal", None), ("unequal", speeds)):
        for microbatches in (4, 8, 64, 256):
            times = []
            for _ in range(2 if quick else 5):
                start = time.perf_counter()
                partition(costs, RANKS, microbatches, speeds=given)
                times.append(time.perf_counter() - start)
            what = f"partition of {LAYERS:,} layers, {RANKS} {name} ranks, {microbatches} micro-batches"
            rows.append(Row(what, median(times), "s", 1.0))
    return rows
