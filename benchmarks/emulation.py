"""Emulated devices: the measured step beside the predicted one, 4 ranks, 8 micro-batches, forwards of 20 ms.

A step is measured on real processes; its prediction comes from the device's times and links alone.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import torch
from torch import nn

from benchmarks.harness import Row
from minipar import Cluster, Plan, simulate
from minipar.costs.device import DeviceSpec, link_presets
from minipar.execution.execution import Job, execute, profile_job
from minipar.models.parameter_groups import shape_of
from minipar.prediction.program_costs import ProgramCosts, microbatch_rows

TIMES = {"forward": 0.020, "backward": 0.040}
PLANS = ("pp=4 schedule=gpipe microbatches=8", "pp=4 schedule=1f1b microbatches=8", "dp=4 microbatches=8")
PIPELINES = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "chimera", "dualpipe",
    "dualpipe-v", "pipedream", "pipedream-vertical", "pipedream-2bw", "ampnet",
)  # fmt: skip
WIDTH, ROWS, LAYERS = 256, 256, 8


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def measure(quick: bool = False) -> list[Row]:
    torch.manual_seed(1)
    job = Job(_build, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)), loss=nn.functional.mse_loss)
    rows = []
    devices = [DeviceSpec(costs=TIMES, name="20 ms forwards")]
    devices += [replace(preset, costs=TIMES) for preset in link_presets().values()]
    for device in devices[: 1 if quick else None]:
        with Cluster(4, device=device) as cluster:
            pipelines = [f"pp=4 schedule={name} microbatches=8" for name in PIPELINES]
            for plan in dict.fromkeys([*PLANS, *(pipelines if device is devices[0] else [])]):
                program = Plan.parse(plan).compile(shape_of(list(_build())))
                sizes = microbatch_rows(job.batch, program.replicas, program.microbatches)
                (facts,) = cluster.run_on([0], profile_job, job, sizes)
                prediction = simulate(program, ProgramCosts(program, facts.profile, job.batch, device))
                predicted = prediction.time
                done = execute(
                    program, job, cluster=cluster, passes=3 if quick else 7, keep_gradients=False, check=False
                )
                measured = median(done.times[1:])
                late = sum(map(len, done.trace.overruns))
                note = f"{predicted * 1e3:.0f} ms predicted, {measured * 1e3:.0f} ms measured, {late} overruns"
                rows.append(
                    Row(f"emulated, {device}, {plan}: |measured / predicted - 1|", abs(measured / predicted - 1), "",
                        0.05, None, note)
                )  # fmt: skip
                if Plan.parse(plan).pp > 1:
                    bubbles = prediction.bubble_of_total(), done.trace.bubble_of_total()
                    text = f"emulated, {device}, {plan}: |measured - predicted bubble of total|"
                    note = f"{bubbles[0]:.1%} predicted, {bubbles[1]:.1%} measured"
                    rows.append(Row(text, abs(bubbles[1] - bubbles[0]), "", 0.05, None, note))
    return rows
