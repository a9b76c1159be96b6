"""Memory: the peak predicted from one layer at a time, beside the measured peak of every rank; and the tracker's cost.

A row is for a model and a plan: the largest |predicted / measured - 1| of its ranks, and both peaks of every rank in
MiB. The tracker's cost is the CPU time of a step with and without it; the two take turns.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch

from benchmarks.harness import Row
from minipar import Cluster, Plan, data, models
from minipar.comm import communicator
from minipar.execution.execution import Job, execute, profile_job
from minipar.execution.executor import Executor
from minipar.execution.memory.tracker import Tracker
from minipar.prediction.forecast import Forecast
from minipar.prediction.program_costs import microbatch_rows

PLANS = (
    "dp=1",
    "microbatches=4 accumulate=2",
    "dp=2 bucket=none",
    "dp=2 bucket=flat microbatches=2",
    "dp=4 bucket=1 microbatches=2",
    "pp=2 microbatches=4 schedule=naive",
    "pp=3 microbatches=8 schedule=gpipe",
    "pp=3 microbatches=8 schedule=1f1b",
    "pp=2 dp=2 microbatches=4",
    "microbatches=2 checkpoint=sqrt",
    "pp=3 microbatches=4 schedule=gpipe checkpoint=1",
    "dp=2 zero=1",
    "dp=4 zero=2 microbatches=2",
    "dp=4 zero=3 microbatches=2",
    "pp=2 dp=2 zero=3 checkpoint=1 microbatches=2",
    "microbatches=2 offload=activations",
    "microbatches=2 offload=parameters",
    "dp=2 zero=1 offload=optimizer",
    "dp=2 zero=3 offload=optimizer,activations,parameters offload_to=disk",
    "pp=2 microbatches=4 offload=optimizer,activations",
    "dp=2 zero=2 precision=bf16",
    "microbatches=2 precision=bf16 offload=optimizer",
)
MODELS = ("gpt-tiny", "gpt-demo", "mlp-digits", "mlp-wide")
QUICK = ("gpt-tiny", "mlp-digits")


def _compare(cluster: Cluster, name: str, plan: Plan, batch: int) -> list[tuple[int, int]]:
    """Predicted and measured peak of every rank, in bytes."""
    job = Job(partial(models.build, name), data.for_model(name), batch, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    rows = microbatch_rows(batch, plan.dp, plan.total_microbatches)
    (facts,) = cluster.run_on([0], profile_job, job, rows, True, plan)
    program = plan.compile(facts.shape, costs=facts.profile)
    predicted = Forecast(facts, batch).of(program)
    run = execute(program, job, cluster=cluster, passes=3, keep_gradients=False, check=False, memory=True)
    return [(a.peak().bytes, b.peak().bytes) for a, b in zip(predicted.series, run.trace.series, strict=True)]


def _cost(name: str, batch: int, rounds: int) -> tuple[float, float]:
    """In a rank: CPU seconds of a step without the tracker, and with it. The two take turns."""
    model = models.build(name)
    program = Plan(microbatches=2).compile(models.shape(name))
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    executor = Executor(program, communicator.create(), model, torch.nn.functional.cross_entropy, optimizer)
    batches = {0: data.for_model(name).batch(0, batch)}
    times: dict[bool, list[float]] = {False: [], True: []}
    for k in range(rounds + 1):
        for tracked in (False, True):
            tracker = Tracker(executor) if tracked else None
            start = time.process_time()
            if tracker is None:
                executor.run(batches.__getitem__)
            else:
                with tracker:
                    executor.run(batches.__getitem__)
            if k:  # the first step warms up
                times[tracked].append(time.process_time() - start)
            if tracker is not None:
                tracker.close()
    return median(times[False]), median(times[True])


def measure(quick: bool = False) -> list[Row]:
    rows = []
    clusters = {size: Cluster(size) for size in (1, 2, 3, 4)}
    try:
        for name in QUICK if quick else MODELS:
            for text in PLANS:
                plan = Plan.parse(text)
                found = _compare(clusters[plan.ranks], name, plan, 16)
                worst = max(abs(mine / real - 1) for mine, real in found)
                peaks = ", ".join(f"{mine / 2**20:.2f}/{real / 2**20:.2f}" for mine, real in found)
                rows.append(Row(f"peak, {name} {text}", 100 * worst, "%", 5, 1, f"predicted/measured MiB: {peaks}"))
        for name, batch in (("gpt-tiny", 16), ("gpt-demo", 8)):
            ((plain, tracked),) = clusters[1].run(_cost, name, batch, 5 if quick else 20)
            note = f"{plain * 1e3:.1f} -> {tracked * 1e3:.1f} ms CPU a step"
            rows.append(Row(f"{name}: step with the tracker, without it = 1", tracked / plain, "", note=note))
    finally:
        for cluster in clusters.values():
            cluster.close()
    return rows
