"""Priority beside first come, first served, on emulated devices whose link is as slow as their layers: 2 ranks.

Each step is measured on real processes; the predictions come from the device's times and link alone.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.harness import Row
from minipar import Cluster, Plan, train
from minipar.costs.device import DeviceSpec

WIDTH, LAYERS = 256, 8
SIZE = (WIDTH * WIDTH + WIDTH) * 4  # bytes of a layer
COMPUTE = {"forward": 0.2, "backward": 0.2}  # seconds of all forwards, and of all backwards, of a step
LINK = 0.4  # seconds of a step's messages
PLANS = {"first come, first served": "dp=2 bucket=none", "priority": f"dp=2 bucket={SIZE / 2 / 2**20} overlap=priority"}


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def measure(quick: bool = False) -> list[Row]:
    """The gain of priority, and how well it is predicted."""
    device = DeviceSpec(costs=COMPUTE, bandwidth=LAYERS * SIZE / LINK, name="a link of 400 ms a step")
    torch.manual_seed(1)
    rows, times = [], {}
    with Cluster(2, device=device) as cluster:
        for name, plan in PLANS.items():
            run = train(
                _build, (torch.randn(32, WIDTH), torch.randn(32, WIDTH)), Plan.parse(plan), cluster=cluster,
                steps=16 if quick else 32, loss=nn.functional.mse_loss, progress=False,
                optimizer=partial(torch.optim.SGD, lr=0.01),
            )  # fmt: skip
            n = run.program.steps
            times[name] = predicted, measured = run.predicted.time / n, run.trace.time / n
            note = f"{predicted * 1e3:.0f} ms predicted, {measured * 1e3:.0f} ms measured"
            rows.append(Row(f"{device}, {name}: |measured / predicted - 1|", abs(measured / predicted - 1), "", 0.05,
                            None, note))  # fmt: skip
    (slow, slow_measured), (fast, fast_measured) = times.values()
    note = f"{fast / slow:.3f} predicted"
    rows.append(Row(f"{device}: time of priority / first come", fast_measured / slow_measured, "", 0.85, None, note))
    return rows
