"""Data parallel in three variants beside torch's DistributedDataParallel: same model, same rows, SGD, gloo."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row, Times, in_turn, medians
from minipar import Cluster, Plan
from minipar.comm import communicator
from minipar.costs.profiler import shape_of
from minipar.executor import Executor

WIDTH, LAYERS, ROWS = 1000, 10, 64  # 10 million parameters; rows per rank
VARIANTS: dict[str, float | str] = {"buckets of 25 MiB": 25, "one flat buffer": "flat", "per parameter": "none"}


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def _measure(ranks: int, rounds: int) -> Times:
    comm = communicator.create()
    dist.init_process_group("gloo")
    x, y = torch.randn(ROWS * ranks, WIDTH), torch.randn(ROWS * ranks, WIDTH)
    mine = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    loss = nn.functional.mse_loss

    ddp = DistributedDataParallel(_build())
    update = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def torch_step() -> None:
        update.zero_grad()
        loss(ddp(x[mine]), y[mine]).backward()
        update.step()

    contestants: dict[str, Any] = {"torch": torch_step}
    for name, bucket in VARIANTS.items():
        model = _build()
        program = Plan(dp=ranks, bucket=bucket).compile(shape_of(list(model)))
        executor = Executor(program, comm, model, loss, partial(torch.optim.SGD, lr=0.01))
        contestants[name] = partial(executor.run, lambda step: (x, y))
    times = in_turn(comm, contestants, rounds)
    dist.destroy_process_group()
    return times


def measure(quick: bool = False) -> list[Row]:
    rows = []
    for ranks in (2, 4):
        with Cluster(ranks) as cluster:
            found = medians(cluster.run(_measure, ranks, 8 if quick else 40))
        note = f"DDP {found['torch'] * 1e3:.0f} ms"
        for name in VARIANTS:
            best = name == "buckets of 25 MiB"
            rows.append(
                Row(
                    f"data parallel, {ranks} ranks, {name}: time / DDP's",
                    found[name] / found["torch"],
                    "",
                    1.0 if best else None,
                    0.95 if best else None,
                    note,
                )
            )
    return rows
