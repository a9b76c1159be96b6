"""What it costs that a run proves itself, and that ranks stop after every step: whole calls of `train`, in turn."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.harness import Row
from minipar import Cluster, data, models, stepping, train

PLANS = ("dp=2", "pp=2 microbatches=4")
STEPS = 10


def measure(quick: bool = False) -> list[Row]:
    """Milliseconds that check="auto" adds to a run of few steps, and that `stepping` adds to a step."""
    rows = []
    with Cluster(2, device="cpu") as cluster:
        for name, batch in (("mlp-tiny", 64), ("gpt-tiny", 16)):
            for plan in PLANS:
                keys: dict[str, Any] = {
                    "cluster": cluster, "steps": STEPS, "batch": batch, "loss": models.loss_of(name), "progress": False,
                    "optimizer": partial(torch.optim.AdamW, lr=1e-3),
                }  # fmt: skip
                given = partial(models.build, name), data.for_model(name), plan
                ways = {
                    "none": lambda given=given, keys=keys: train(*given, check=False, **keys),
                    "auto": lambda given=given, keys=keys: train(*given, **keys),
                    "loop": lambda given=given, keys=keys: sum(s.loss for s in stepping(*given, check=False, **keys)),
                }
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                for k in range(6 if quick else 21):
                    for way, run in ways.items():
                        start = time.perf_counter()
                        run()
                        seconds[way] += [time.perf_counter() - start] if k else []
                none, auto, loop = (median(seconds[way]) * 1e3 for way in ways)
                note = f"{none:.0f} ms without, {STEPS} steps"
                rows.append(Row(f"{name}, {plan}: what check=auto adds to a run", auto - none, "ms", None, None, note))
                rows.append(Row(f"{name}, {plan}: what stepping adds to a step", (loop - none) / STEPS, "ms"))
    return rows
