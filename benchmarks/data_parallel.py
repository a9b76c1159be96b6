"""Data parallel in three variants beside torch's DistributedDataParallel: same model, same rows, SGD, gloo.

DDP runs in processes as torch starts them, and a second time in ranks of minipar's own (see `pipelines`).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row, contestants, in_turn
from minipar import Cluster, Plan
from minipar.comm import communicator
from minipar.costs.profiler import shape_of
from minipar.executor import Executor

WIDTH, LAYERS, ROWS = 1000, 10, 64  # 10 million parameters; rows per rank
VARIANTS: dict[str, float | str] = {"buckets of 25 MiB": 25, "one flat buffer": "flat", "per parameter": "none"}
MUST, AIM = 1.0, 0.95


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def _enter_torch() -> None:
    dist.init_process_group("gloo")
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    ddp = DistributedDataParallel(_build())
    update = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step() -> None:
        update.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        update.step()

    contestants["DDP"] = step


def _enter_minipar() -> None:
    comm = communicator.create()
    batch = torch.randn(ROWS * comm.size, WIDTH), torch.randn(ROWS * comm.size, WIDTH)
    for name, bucket in VARIANTS.items():
        model = _build()
        program = Plan(dp=comm.size, bucket=bucket).compile(shape_of(list(model)))
        executor = Executor(program, comm, model, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.01))
        contestants[name] = partial(executor.run, lambda step: batch)


def measure(quick: bool = False) -> list[Row]:
    rows = []
    for ranks in (2, 4):
        with Cluster(ranks) as ours, Cluster(ranks, keep_freed_memory=False) as plain, Cluster(ranks) as like_ours:
            ours.run(_enter_minipar)
            for cluster in (plain, like_ours):
                cluster.run(_enter_torch)
            for kind, theirs in (("", plain), (" in ranks like ours", like_ours)):
                found = in_turn({"DDP": theirs, **dict.fromkeys(VARIANTS, ours)}, 8 if quick else 30)
                for name in VARIANTS:
                    targets = (MUST, AIM) if name == "buckets of 25 MiB" and not kind else (None, None)
                    text = f"data parallel, {ranks} ranks, {name}: time / DDP{kind}"
                    rows.append(
                        Row(
                            text,
                            found[name] / found["DDP"],
                            "",
                            targets[0],
                            targets[1],
                            f"DDP {found['DDP'] * 1e3:.0f} ms",
                        )
                    )
    return rows
