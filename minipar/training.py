"""train(): a plan, a model and data on a cluster; a prediction first, then the run, then both side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from minipar.cluster import Cluster, worker
from minipar.costs.measured import Profile
from minipar.costs.profiled import ProfiledCosts, microbatch_rows
from minipar.costs.profiler import profile, shape_of
from minipar.costs.shapes import Shape
from minipar.errors import MiniparError, PlanError
from minipar.plan import Plan
from minipar.program import Program, Value
from minipar.reference import Reference, gradient_error, train_plainly
from minipar.simulator import simulate
from minipar.tensors import count_rows, map_tensors
from minipar.trace import Trace

Model = nn.Module | Sequence[nn.Module] | Callable[[], nn.Module | Sequence[nn.Module]]
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Job:
    """Everything that a rank must know to do its part. Shipped to the ranks, so it holds no tensors of the run."""

    model: Model
    data: Any
    batch: int
    loss: Loss
    optimizer: Optimizer
    steps: int
    seed: int
    dtype: torch.dtype

    def build(self) -> nn.Module:
        """The whole model, the same in every process: parameters come from (seed, name) or the order of creation."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            made = self.model if isinstance(self.model, (nn.Module, list, tuple)) else self.model()
        model = made if isinstance(made, nn.Module) else nn.Sequential(*made)
        if not list(model.children()):
            raise PlanError(f"model: a {type(model).__name__} without layers; possible is an nn.Sequential or a list")
        return model.to(self.dtype)

    def batches(self, step: int) -> tuple[Any, Any]:
        """x and y of one step: the whole batch, of all replicas."""
        x, y = self.data if isinstance(self.data, tuple) else self.data.batch(step, self.batch)
        return map_tensors(x, self._cast), map_tensors(y, self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class Passed:
    """What one rank brings back of all steps."""

    losses: list[float]
    starts: list[list[float]]
    ends: list[list[float]]
    gradients: list[dict[str, Tensor]]
    sizes: dict[Value, int]
    data: int


@dataclass(frozen=True)
class Run:
    """What a training run gave.

    losses        the mean loss of every step, before its update
    trace         the measured trace of one typical step (the one of median duration, the first left out)
    predicted     the trace that was predicted before the run
    step_times    seconds of every step
    reference     losses and gradients of plain torch on one process, if `check` was asked for
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
    check       keep every gradient, and train plain torch on one process beside it, to compare

    Raises PlanError where plan, model, batch and cluster do not fit together; what a rank raises; RankDied.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    job = Job(model, data, _batch_size(data, batch), loss, optimizer, _positive("steps", steps), seed, dtype)
    if cluster is not None and cluster.size != plan.ranks:
        raise PlanError(f"plan {plan} needs {plan.ranks} ranks, but the cluster has {cluster.size}")
    with nullcontext(cluster) if cluster is not None else Cluster(plan.ranks) as ranks:
        rows = microbatch_rows(job.batch, plan.dp, plan.total_microbatches)
        bar = partial(tqdm, disable=not progress, leave=False)
        with bar(total=1, desc="profile") as meter:
            ((shape, measured),) = ranks.run_on([0], _profile, job, rows)
            meter.update()
        program = plan.compile(shape)
        predicted = predict(program, measured, job.batch)

        reference, plain_time = None, None
        if check:
            with bar(total=steps, desc="plain torch") as meter:
                ((reference, plain_time),) = ranks.run_on([0], _reference, job)
                meter.update(steps)
        with bar(total=steps, desc=str(plan)) as meter:
            told: dict[int, int] = {}

            def tell(rank: int, step: int) -> None:
                told[step] = told.get(step, 0) + 1
                if told[step] == plan.ranks:
                    meter.update()

            passed = ranks.run_with(tell, _train, job, program, check)
    losses = [sum(p.losses[s] for p in passed) for s in range(steps)]
    times = [max(max(p.ends[s]) for p in passed) - min(min(p.starts[s]) for p in passed) for s in range(steps)]
    typical = sorted(range(1, steps) if steps > 1 else [0], key=times.__getitem__)[max(0, steps - 1) // 2]
    gradients: list[dict[str, Tensor]] = [{} for _ in range(steps if check else 0)]
    for p in passed:
        for found, mine in zip(gradients, p.gradients, strict=False):
            found.update(mine)
    trace = _measured(program, passed, typical)
    return Run(plan, program, losses, trace, predicted, times, gradients, reference, plain_time)


def predict(program: Program, measured: Profile, batch: int) -> Trace:
    """The predicted trace of a program, from a profile of its model's layers."""
    trace = simulate(program, ProfiledCosts(program, measured, batch))
    return replace(trace, note="predicted from a profile of one layer at a time on one device")


# in the ranks ---------------------------------------------------------------------------------------------------------


def _profile(job: Job, rows: tuple[int, ...]) -> tuple[Shape, Profile]:
    model = job.build()
    x, y = job.batches(0)
    return shape_of(model), profile(model, x, y, job.loss, rows, optimizer=job.optimizer)


def _reference(job: Job) -> tuple[Reference, float]:
    start = time.perf_counter()
    result = train_plainly(job.build(), job.batches, job.loss, job.optimizer, job.steps, job.seed)
    return result, (time.perf_counter() - start) / job.steps


def _train(job: Job, program: Program, keep_gradients: bool) -> Passed:
    from minipar.comm import communicator
    from minipar.executor import Executor

    comm = communicator.create()
    executor = Executor(program, comm, job.build(), job.loss, job.optimizer, job.seed)
    records = []
    for step in range(job.steps):
        job_batch = job.batches(step)
        comm.barrier()  # so that a step begins on all ranks at once, as the prediction assumes
        records.append(executor.run(lambda _, given=job_batch: given, step, keep_gradients))  # type: ignore[misc]
        worker.report(step)
    values = {value for ins in program.ranks[comm.rank] for value in (*ins.reads, *ins.writes)}
    return Passed(
        [record.loss for record in records],
        [record.starts for record in records],
        [record.ends for record in records],
        [record.gradients for record in records] if keep_gradients else [],
        {value: executor.size(value) for value in values | program.state[comm.rank]},
        executor.data_bytes(),
    )


# in the driver --------------------------------------------------------------------------------------------------------


def _measured(program: Program, passed: Sequence[Passed], step: int) -> Trace:
    """The trace of one step, from the clocks of all ranks (one clock, on one machine)."""
    zero = min(min(p.starts[step]) for p in passed)
    starts = [[t - zero for t in p.starts[step]] for p in passed]
    ends = [[t - zero for t in p.ends[step]] for p in passed]
    sizes = [p.sizes for p in passed]

    def size(rank: int, value: Value) -> int:
        return sizes[rank].get(value, 0)

    return Trace(program, starts, ends, size, "measured", "bytes", [p.data for p in passed])


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{name}={value!r}: must be a whole number of at least 1")
    return value


def _batch_size(data: Any, batch: int) -> int:
    return count_rows(data[0]) if isinstance(data, tuple) else _positive("batch", batch)
