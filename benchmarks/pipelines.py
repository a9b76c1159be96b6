"""GPipe and 1F1B beside torch.distributed.pipelining: 16 x (Linear 512 + GELU), 8 micro-batches of 8 rows, 4 ranks.

torch runs twice: in processes as torch starts them, and in ranks of minipar's own, whose C library keeps freed memory
(which makes both faster). The targets are for the first; the second is the executors alone. minipar's ranks keep to the
cores on which `execute` holds them while it trains (`as_in_training`); torch's are left to the system, as torch does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.harness import Row, as_in_training, contestants, in_turn
from minipar import Cluster, Plan
from minipar.comm import communicator
from minipar.costs.profiler import shape_of
from minipar.executor import Executor

RANKS, LAYERS, WIDTH, MICROBATCHES, ROWS = 4, 16, 512, 8, 8
MUST = {"gpipe": 0.7, "1f1b": 0.85}
AIM = 0.7


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(MICROBATCHES * ROWS, WIDTH), torch.randn(MICROBATCHES * ROWS, WIDTH)


def _enter_torch() -> None:
    """In a rank: torch's pipelines, ready to run."""
    rank = communicator.create().rank
    dist.init_process_group("gloo")
    x, y = _rows()
    for name, schedule_class in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        share = LAYERS // RANKS
        module = nn.Sequential(*list(_build())[rank * share : (rank + 1) * share])
        stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))  # its first step infers the shapes
        schedule = schedule_class(stage, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
        update = torch.optim.SGD(module.parameters(), lr=0.01)

        def step(schedule: Any = schedule, update: torch.optim.Optimizer = update) -> None:
            update.zero_grad()
            if rank == 0:
                schedule.step(x)
            elif rank == RANKS - 1:
                schedule.step(target=y)
            else:
                schedule.step()
            update.step()

        contestants[f"torch {name}"] = step


def _enter_minipar() -> None:
    """In a rank: minipar's pipelines, ready to run."""
    comm = communicator.create()
    as_in_training()
    batch = _rows()
    for name in MUST:
        model = _build()
        program = Plan(pp=RANKS, schedule=name, microbatches=MICROBATCHES).compile(shape_of(list(model)))
        update = partial(torch.optim.SGD, lr=0.01)
        executor = Executor(program, comm, model, nn.functional.mse_loss, update)
        contestants[name] = partial(executor.run, lambda step: batch)

    share = LAYERS // RANKS
    module = nn.Sequential(*list(_build())[:share])
    update_alone = torch.optim.SGD(module.parameters(), lr=0.01)
    gradient = torch.randn(ROWS, WIDTH)

    def compute_alone() -> None:
        for x in batch[0].split(ROWS):
            module(x.detach().requires_grad_()).backward(gradient)
        update_alone.step()
        update_alone.zero_grad()

    contestants["compute alone"] = compute_alone


def measure(quick: bool = False) -> list[Row]:
    with Cluster(RANKS) as ours, Cluster(RANKS, keep_freed_memory=False) as plain, Cluster(RANKS) as like_ours:
        ours.run(_enter_minipar)
        for cluster in (plain, like_ours):
            cluster.run(_enter_torch)
        rows = []
        for name, must in MUST.items():
            # One schedule at a time. The same contestant has two names, so that the table can have both.
            first = in_turn({name: ours, f"torch {name}": plain, "compute alone": ours}, 20 if quick else 80)
            second = in_turn({name: ours, f"torch {name}": like_ours}, 20 if quick else 80)
            for found, kind in ((first, ""), (second, " in ranks like ours")):
                mine, torchs = found[name], found[f"torch {name}"]
                targets = (must, AIM) if not kind else (None, None)
                text = f"{name}, {RANKS} ranks, {MICROBATCHES} x {ROWS} rows: time / torch{kind}"
                rows.append(
                    Row(text, mine / torchs, "", targets[0], targets[1], f"{mine * 1e3:.0f} and {torchs * 1e3:.0f} ms")
                )
            alone = first["compute alone"]
            text = f"  {name}'s layers alone on {RANKS} ranks, no pipeline at all: time / torch"
            rows.append(
                Row(text, alone / first[f"torch {name}"], "", note=f"{alone * 1e3:.0f} ms: no executor is below")
            )
    return rows
