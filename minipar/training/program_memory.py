"""The memory of every rank of a plan that no formula knows: the program is built, and the model's layers are profiled.

    of_ranks(Plan.parse("pp=2 schedule=terapipe"), "gpt-tiny", batch=16)

Slices of sequences keep keys and values of the slices before, and with place= a rank has pieces of stages: what they
need is what their layers allocate on one rank (execution/memory/tape.py), played along the program.
"""

from __future__ import annotations

from functools import partial

import torch

from minipar import data, models
from minipar.cluster import Cluster
from minipar.execution.execution import Job, profile_job
from minipar.prediction.forecast import Forecast
from minipar.prediction.profiled import microbatch_rows
from minipar.prediction.rank_memory import RankMemory
from minipar.strategies.plan import Plan


def of_ranks(plan: Plan, model: str, batch: int | None = None) -> list[RankMemory]:
    """Bytes of each rank at its peak, in rank order, with AdamW. `buffers` has what operations need for a moment.

    Errors: PlanError for a plan that does not fit the model.
    """
    batch = plan.dp * plan.total_microbatches if batch is None else batch
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    job = Job(
        partial(models.build, model), data.for_model(model), batch, loss=models.loss_of(model), optimizer=optimizer
    )
    rows = microbatch_rows(batch, plan.dp, plan.total_microbatches)
    plan.compile(models.shape(model), check=False)  # (it refuses what cannot be before a rank starts)
    with Cluster(1) as cluster:
        (facts,) = cluster.run_on([0], profile_job, job, rows, True, plan, plan.splits)
    trace = Forecast(facts, batch).of(plan.compile(facts.shape, costs=facts.profile))
    peaks = [{kind: round(size) for kind, size in series.peak().by_kind.items()} for series in trace.series]
    return [
        RankMemory(
            now["parameters"], now["gradients"], now["optimizer"], now["activations"],
            now["buffers"] + now["temporary"], now["activations"], 0,
        ) for now in peaks
    ]  # fmt: skip
