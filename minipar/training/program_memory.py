"""The memory of every rank of a plan that no formula knows: the program is built, and the model's layers are profiled.

    with first_batch(model, data, loss, 16) as job:     # what `train` takes
        of_ranks(Plan.parse("pp=2 schedule=terapipe"), job)

Slices of sequences keep keys and values of the slices before, with place= a rank has pieces of stages, and nobody knows
a user's own model: what they need is what their layers allocate on one rank (execution/memory/tape.py), played along
the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from minipar.cluster import Cluster
from minipar.data import loading
from minipar.execution.execution import Job, profile_job
from minipar.models.losses import Own
from minipar.prediction.forecast import Forecast
from minipar.prediction.program_costs import microbatch_rows
from minipar.prediction.rank_memory import RankMemory
from minipar.strategies.plan import Plan


@contextmanager
def first_batch(model: Any, data: Any, loss: Any, batch: int, seed: int = 0) -> Iterator[Job]:
    """A job of one step, of what `train` takes; with AdamW."""
    loss = Own() if loss is None else loss
    pairing = loading.Pairing(isinstance(loss, Own), loading.takes_of(model))
    with loading.read_ahead(data, 1, 0, seed, batch, pairing) as (rows, size):
        yield Job(model, rows, size, loss=loss, optimizer=partial(torch.optim.AdamW, lr=1e-3), seed=seed)


def of_ranks(plan: Plan, job: Job) -> list[RankMemory]:
    """Bytes of each rank at its peak, in rank order. `buffers` has what operations need for a moment.

    Errors: PlanError for a plan that does not fit the model.
    """
    batch = job.batch
    rows = microbatch_rows(batch, plan.dp, plan.total_microbatches)
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
