"""A plan run on real ranks, and held to plain torch: the losses and the gradients of all parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import cloudpickle
import torch

from minipar import Cluster, Plan, train
from minipar.cluster.ranks import Ranks
from minipar.execution.execution import Execution, Job, PickledGraphs, captured_once, execute
from minipar.models.parameter_groups import shape_of
from minipar.program import Synchronous
from minipar.program.mesh import Mesh
from minipar.training.plainly import task_of
from minipar.training.reference import Reference, gradient_error, run
from minipar.training.training import Run, annotations_of

mse = torch.nn.functional.mse_loss
sgd = partial(torch.optim.SGD, lr=0.5)


def check(
    clusters: Callable[[int], Cluster],
    plan: Plan,
    model: Any,
    data: Any,
    loss: Any = mse,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    bound: float = 1e-12,
) -> Execution:
    """Run a synchronous plan, without the profile and the prediction of `train`."""
    job = Job(model, data, loss=loss, optimizer=sgd, dtype=dtype)
    known = _plainly(cloudpickle.dumps((model, data, loss, dtype)), steps, plan.clip)
    ranks, built = clusters(plan.ranks), job.build()
    if plan.sharing > 1:
        job = captured(replace(job, annotations=annotations_of(plan)), plan.sharing, plan.cut, ranks)
        shape = shape_of(job.share(built, 0, Mesh(plan.shared), plan.inputs, plan.cut))
    else:
        shape = replace(shape_of(built), names=tuple(built._modules))
    program = plan.compile(shape)
    assert isinstance(program.contract, Synchronous), "for others there is `trained`"
    done = execute(program, job, cluster=ranks, passes=steps // program.steps, check=False)
    _compare(done, known, bound)
    return done


def trained(
    clusters: Callable[[int], Cluster],
    plan: Plan,
    model: Any,
    data: Any,
    loss: Any = mse,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    bound: float = 1e-12,
) -> Run:
    """The same by `train`, which profiles the model and predicts the run first."""
    done = train(
        model, data, plan, cluster=clusters(plan.ranks), steps=steps, loss=loss, optimizer=sgd, dtype=dtype, check=True,
        progress=False,
    )  # fmt: skip
    assert done.reference is not None
    _compare(done, done.reference, bound)
    return done


def captured(job: Job, count: int, slices: int | tuple[int, ...], ranks: Ranks, short: str = "") -> Job:
    """What `captured_once` gives, which captures a model once for all ranks of a run; here once for all tests, too."""
    if count == 1:
        return job
    key = cloudpickle.dumps((job.model, job.data, job.dtype, job.evaluate, count, slices, short))
    if key not in _captured:
        _captured[key] = captured_once(job, count, slices, ranks, short).graphs
    return replace(job, graphs=_captured[key])


_captured: dict[bytes, PickledGraphs | None] = {}


@cache
def _plainly(job: bytes, steps: int, clip: float | None) -> Reference:
    """What plain torch makes of a job, in this process. Many plans are compared with the same."""
    model, data, loss, dtype = cloudpickle.loads(job)
    with torch.random.fork_rng(devices=[]):
        return run(task_of(Job(model, data, loss=loss, optimizer=sgd, dtype=dtype), steps, clip=clip))


def _compare(found: Run | Execution, expected: Reference, bound: float) -> None:
    assert len(found.losses) == len(expected.losses)
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        assert gradient_error(mine, theirs) <= bound
    for mine, theirs in zip(found.losses, expected.losses, strict=True):
        assert abs(mine - theirs) <= bound * max(1.0, abs(theirs))
