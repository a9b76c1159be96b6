"""The reference in a rank: a job in plain torch, beside the program that must equal it."""

from __future__ import annotations

import time
from functools import partial

from minipar.cluster import worker
from minipar.execution import Job
from minipar.reference import Reference, train_locally, train_plainly
from minipar.saving.contents import outline_of
from minipar.saving.keeping import NOTHING, Storing
from minipar.updating import forms_of, scheduled


def run_plainly(
    job: Job,
    steps: int,
    keep_gradients: bool = True,
    clip: float | None = None,
    storing: Storing = NOTHING,
    replicas: tuple[int, int, int] | None = None,
) -> tuple[Reference, float] | None:
    """In the ranks, of which only the first works: the job in plain torch, and its seconds per step.

    replicas   how many train by themselves, with how many micro-batches each, for how many steps between averages
    """
    if worker.context().rank:
        return None
    model = job.build()
    names = [form.name for form in forms_of(model)]
    saved = None if storing.saved is None else storing.saved.header.schedule
    optimizer = scheduled(job.optimizer, names, job.scheduler, saved)
    begin = partial(storing.begin_plainly, outline_of(model))
    start = time.perf_counter()
    if replicas is not None:
        locally = train_locally(
            model, job.batches, job.loss, optimizer, steps, *replicas, job.seed, keep_gradients, worker.report,
            storing.first, begin,
        )  # fmt: skip
        return locally, (time.perf_counter() - start) / steps
    result = train_plainly(
        model,
        job.batches,
        job.loss,
        optimizer,
        steps,
        job.seed,
        keep_gradients,
        worker.report,
        clip,
        storing.first,
        begin,
    )
    return result, (time.perf_counter() - start) / steps
