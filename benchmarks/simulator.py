"""Speed of building, verifying and simulating 1F1B with 64 stages and 512 micro-batches: 195 thousand instructions."""

from __future__ import annotations

import time
from statistics import median

from benchmarks.harness import Row
from minipar import Plan, simulate, verify


def measure(quick: bool = False) -> list[Row]:
    plan = Plan(pp=64, microbatches=512)
    build, check, predict = [], [], []
    for _ in range(2 if quick else 5):
        start = time.perf_counter()
        program = plan.compile(layers=64, check=False)
        build.append(time.perf_counter() - start)
        start = time.perf_counter()
        verify(program)
        check.append(time.perf_counter() - start)
        start = time.perf_counter()
        simulate(program)
        predict.append(time.perf_counter() - start)
    note = f"{len(program)} instructions"
    return [
        Row("build 1F1B, 64 stages x 512 micro-batches", median(build), "s", 2.5, 0.25, note),
        Row("verify it", median(check), "s", None, None),
        Row("simulate it", median(predict), "s", 1.0, 0.1),
    ]
