"""Speed of building, verifying and simulating large programs.

1F1B with 64 stages and 512 micro-batches has 195 thousand instructions, each of which is made and visited. Of 1,024
ranks, 16 replicas of 8 stages that 8 ranks share each, only the first rank of each stage is. (96 layers and 96
micro-batches are those of GPT-3 on as many devices.) Its times are of the processor, and its memory is the peak of a
process of its own.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from statistics import median

from benchmarks.harness import Row
from minipar import Plan, simulate, verify


def measure(quick: bool = False) -> list[Row]:
    plan = Plan(pp=64, microbatches=512)
    build, check, predict = [], [], []
    for _ in range(1 if quick else 5):
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
    words = [sys.executable, "-c", "from benchmarks.simulator import many; many()"]
    seconds, mib, instructions = subprocess.run(words, capture_output=True, check=True, text=True).stdout.split()
    return [
        Row("build 1F1B, 64 stages x 512 micro-batches", median(build), "s", 2.5, 0.25, note),
        Row("verify it", median(check), "s", None, None),
        Row("simulate it", median(predict), "s", 1.0, 0.1),
        Row(
            "build, verify, simulate 1,024 ranks, 96 layers",
            float(seconds),
            "s",
            10,
            None,
            f"{instructions} instructions",
        ),
        Row("peak memory of that", float(mib), "MiB", 4096, None, "with torch"),
    ]


def many() -> None:
    """Build, verify and simulate a program of 1,024 ranks. Prints processor seconds, peak memory in MiB, and the number
    of instructions."""
    start = time.process_time()
    program = Plan(dp=16, pp=8, tp=8, microbatches=96, schedule="1f1b").compile(layers=96)
    assert simulate(program).time > 0
    seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(seconds, peak / (2**20 if sys.platform == "darwin" else 2**10), len(program))
