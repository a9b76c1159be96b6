"""GPipe and 1F1B beside torch.distributed.pipelining: 16 x (Linear 512 + GELU), 8 micro-batches of 8 rows, 4 ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.harness import Row, Times, in_turn, medians
from minipar import Cluster, Plan
from minipar.comm import communicator
from minipar.costs.profiler import shape_of
from minipar.executor import Executor

RANKS, LAYERS, WIDTH, MICROBATCHES, ROWS = 4, 16, 512, 8, 8
MUST = {"gpipe": 0.7, "1f1b": 0.85}


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def _measure(rounds: int) -> Times:
    comm = communicator.create()
    dist.init_process_group("gloo")
    x, y = torch.randn(MICROBATCHES * ROWS, WIDTH), torch.randn(MICROBATCHES * ROWS, WIDTH)
    loss = nn.functional.mse_loss
    contestants: dict[str, Any] = {}
    for name, schedule_class in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        model = _build()
        share = LAYERS // RANKS
        module = nn.Sequential(*list(model)[comm.rank * share : (comm.rank + 1) * share])
        stage = PipelineStage(module, comm.rank, RANKS, torch.device("cpu"))  # its first step infers the shapes
        schedule = schedule_class(stage, n_microbatches=MICROBATCHES, loss_fn=loss)
        update = torch.optim.SGD(module.parameters(), lr=0.01)

        def torch_step(schedule: Any = schedule, update: torch.optim.Optimizer = update) -> None:
            update.zero_grad()
            if comm.rank == 0:
                schedule.step(x)
            elif comm.rank == RANKS - 1:
                schedule.step(target=y)
            else:
                schedule.step()
            update.step()

        contestants[f"torch {name}"] = torch_step
        program = Plan(pp=RANKS, schedule=name, microbatches=MICROBATCHES).compile(shape_of(list(model)))
        executor = Executor(program, comm, model, loss, partial(torch.optim.SGD, lr=0.01))
        contestants[name] = partial(executor.run, lambda step: (x, y))
    times = in_turn(comm, contestants, rounds)
    dist.destroy_process_group()
    return times


def measure(quick: bool = False) -> list[Row]:
    with Cluster(RANKS) as cluster:
        found = medians(cluster.run(_measure, 15 if quick else 60))
    return [
        Row(
            f"{name}, {RANKS} ranks, 8 x {ROWS} rows: time / torch pipelining's",
            found[name] / found[f"torch {name}"],
            "",
            must,
            0.7,
            f"{found[name] * 1e3:.0f} and {found[f'torch {name}'] * 1e3:.0f} ms",
        )
        for name, must in MUST.items()
    ]
