"""The executor's own cost per instruction, in a pipeline so small that the computation itself takes almost no time.

Two values: the CPU time of an instruction with all torch calls (layers of width 8, messages of 256 bytes); and
minipar's own part of it, from a second run without torch's work: layers return a constant, messages and backward calls
do nothing.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.harness import Row
from minipar import Cluster, Plan
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.models.parameter_groups import shape_of


class _Done:
    def wait(self) -> None:
        pass


def _build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def _measure(plan: Plan, steps: int) -> tuple[float, float]:
    comm = communicator.create()
    model = _build()
    program = plan.compile(shape_of(list(model)))
    executor = Executor(program, comm, model, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.0))
    x, y = torch.randn(64, 8), torch.randn(64, 8)

    def cpu(run: Any) -> float:
        times = []
        for _ in range(steps):
            comm.barrier()
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        return median(times) / len(program.ranks[comm.rank])

    whole = cpu(lambda: executor.run(lambda step: (x, y)))
    own = cpu(lambda: _without_torch(executor, x, y))
    return whole, own


def _without_torch(executor: Executor, x: torch.Tensor, y: torch.Tensor) -> None:
    """The same step; the calls of torch are replaced by functions that do nothing."""
    nothing = mock.Mock(return_value=None)
    cheap = torch.zeros(8, 8)
    made: tuple[torch.Tensor, torch.Tensor | None] = (cheap, None)  # an output, and no loss
    with (
        mock.patch.object(type(executor.compute), "_run_piece", lambda *_: made),
        mock.patch.object(type(executor.comm), "isend", lambda *_: _Done()),
        mock.patch.object(type(executor.comm), "irecv", lambda *_: _Done()),
        mock.patch.object(type(executor.comm), "receive", lambda *_: True),
        mock.patch("minipar.comm.links.allocate", lambda *_: cheap),
        mock.patch.object(torch.autograd, "backward", lambda *_: None),
        mock.patch("minipar.execution.compute.detach", lambda value, requires_grad=False: value),
    ):
        for optimizer in executor.state.optimizers.values():
            optimizer.step = nothing  # type: ignore[method-assign]
        executor.run(lambda step: (x, y))


def measure(quick: bool = False) -> list[Row]:
    with Cluster(4) as cluster:
        found = cluster.run(_measure, Plan(pp=4, microbatches=8), 20 if quick else 100)
    whole, own = (median(column) * 1e3 for column in zip(*found, strict=True))
    return [
        Row("executor, own time per instruction, without torch calls", own, "ms", 0.03),
        Row("executor, CPU time per instruction, with torch calls", whole, "ms", 0.25),
    ]
