"""train(): a plan, a model and data on a cluster; a prediction first, then the run, then both side by side."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from minipar.cluster import Cluster
from minipar.costs.measured import Profile
from minipar.costs.profiled import ProfiledCosts, microbatch_rows
from minipar.errors import MiniparError, PlanError
from minipar.execution import Job, Loss, Model, Optimizer, at_least_1, execute, profile_job, run_plainly
from minipar.plan import Plan
from minipar.program import Program
from minipar.reference import Reference, gradient_error
from minipar.shared_cores import available_cores
from minipar.simulator import simulate
from minipar.trace import Trace


@dataclass(frozen=True)
class Run:
    """What a training run gave.

    losses        the mean loss of every step, before its update
    trace         the measured trace of one typical step (the one of median duration, the first left out)
    predicted     the trace that was predicted before the run
    step_times    seconds of every step
    reference     losses of plain torch on one process, and its gradients if `check` was asked for
    """

    plan: Plan
    program: Program
    losses: list[float]
    trace: Trace
    predicted: Trace
    step_times: list[float]
    gradients: list[dict[str, Tensor]] = field(default_factory=list, repr=False)
    reference: Reference | None = field(default=None, repr=False)
    plain_time: float | None = None

    @property
    def bytes_sent(self) -> list[int]:
        """Per rank the bytes sent in one step."""
        return self.trace.bytes_sent()

    @property
    def peak_memory(self) -> list[int]:
        """Per rank the measured peak of the executor's own values, in bytes."""
        return [int(peak) for peak in self.trace.peak_memory()]

    def max_gradient_error(self) -> float:
        """Largest deviation from plain torch over all steps and elements, relative to the largest gradient."""
        if self.reference is None or not self.gradients:
            raise MiniparError("max_gradient_error: needs train(..., check=True), which also trains the reference")
        pairs = zip(self.gradients, self.reference.gradients, strict=True)
        return max((gradient_error(found, expected) for found, expected in pairs), default=0.0)

    def __repr__(self) -> str:
        return (
            f"<Run of {self.plan}: {len(self.losses)} steps, loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f}, "
            f"step {self.trace.time * 1e3:.1f} ms measured, {self.predicted.time * 1e3:.1f} ms predicted>"
        )


def train(
    model: Model,
    data: Any,
    plan: Plan | str,
    *,
    cluster: Cluster | None = None,
    steps: int = 10,
    batch: int = 32,
    loss: Loss = torch.nn.functional.cross_entropy,
    optimizer: Optimizer = partial(torch.optim.SGD, lr=0.1),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    reference: bool = False,
    check: bool = False,
    progress: bool = True,
) -> Run:
    """Train a model by a plan, on real processes.

    model       a function that makes an nn.Sequential (or list) of layers, such as partial(models.gpt, layers=12)
    data        has `batch(step, size) -> (x, y)`, such as data.stdlib_text(); or one fixed pair (x, y)
    cluster     ranks to run on, plan.ranks of them; default: made for this call
    batch       rows of a step, over all replicas and micro-batches
    loss        loss(output, y) -> scalar mean over rows (or target elements)
    optimizer   makes an optimizer of a list of parameters
    reference   train plain torch on one process beside it, to compare the losses
    check       that, and keep every gradient of both, to compare them too (memory: twice the model per step)

    Raises PlanError where plan, model, batch and cluster do not fit together; what a rank raises; RankDied.
    """
    plan = Plan.parse(plan)
    steps = at_least_1("steps", steps)
    job = Job(model, data, batch, loss, optimizer, seed, dtype)
    if cluster is not None and cluster.size != plan.ranks:
        raise PlanError(f"plan {plan} needs {plan.ranks} ranks, but the cluster has {cluster.size}")
    with nullcontext(cluster) if cluster is not None else Cluster(plan.ranks) as ranks:
        bar = partial(tqdm, disable=not progress, leave=False)
        with bar(total=1, desc="profile, one layer at a time") as meter:
            rows = microbatch_rows(job.batch, plan.dp, plan.total_microbatches)
            (facts,) = ranks.run_on([0], profile_job, job, rows)
            meter.update()
        if facts.split_sensitive:
            names = ", ".join(facts.split_sensitive)
            warnings.warn(f"not equal to one device's, however it is split: {names}", stacklevel=2)
        program = plan.compile(facts.shape)
        cores = available_cores() if ranks.device == "cpu" else None
        predicted = predict(program, facts.profile, job.batch, cores, facts.data_bytes)
        with bar(total=steps, desc=str(plan)) as meter:
            done = execute(
                program,
                job,
                cluster=ranks,
                passes=steps,
                keep_gradients=check,
                check=False,
                report=lambda k: meter.update(),
            )
        plain, plain_time = None, None
        if reference or check:
            with bar(total=steps, desc="plain torch, one process") as meter:
                plain, plain_time = ranks.run_with(lambda rank, k: meter.update(), run_plainly, job, steps, check)[0]
    return Run(plan, program, done.losses, done.trace, predicted, done.times, done.gradients, plain, plain_time)


def predict(
    program: Program, measured: Profile, batch: int, cores: int | None = None, data_bytes: tuple[int, int] = (0, 0)
) -> Trace:
    """The predicted trace of a program, from a profile of its model's layers.

    cores        shared by all ranks; None: every rank computes on its own
    data_bytes   of a whole batch's x and y; the ranks with the first and the last layer hold their rows of them
    """
    costs = ProfiledCosts(program, measured, batch)
    trace = simulate(program, costs, cores=cores)
    count = len(program.ranks)
    data = [
        round(
            costs.rows_of(rank) / batch * ((0 in held) * data_bytes[0] + (program.layers - 1 in held) * data_bytes[1])
        )
        for rank, held in enumerate(program.placement)
    ]
    note = "predicted from a profile of one layer at a time on one device"
    if cores is not None and cores < count:
        note += f"; {count} ranks share {cores} core" + "s" * (cores > 1)
    return replace(trace, note=note, data=data)
