"""Data parallel in three variants beside torch's DistributedDataParallel: same model, same rows, SGD, gloo.

The models are an MLP of 10 million parameters, and a GPT. DDP runs in processes as torch starts them, and a second time
in minipar's ranks (see `pipelines`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row, as_torch_starts_them, contestants, in_turn
from minipar import Cluster, Plan, data, models
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.models.parameter_groups import shape_of

WIDTH, LAYERS, ROWS = 1000, 10, 64  # 10 million parameters; rows per rank
GPT, GPT_ROWS = "gpt-demo", 8
VARIANTS: dict[str, float | str] = {"buckets of 25 MiB": 25, "one flat buffer": "flat", "per parameter": "none"}
MUST, AIM = 1.0, 0.95


def _mlp(ranks: int) -> tuple[nn.Sequential, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
    return model, (torch.randn(ROWS * ranks, WIDTH), torch.randn(ROWS * ranks, WIDTH)), nn.functional.mse_loss


def _gpt(ranks: int) -> tuple[nn.Sequential, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    return models.build(GPT), data.for_model(GPT).batch(0, GPT_ROWS * ranks), nn.functional.cross_entropy


def _same(batch: tuple[Tensor, Tensor], step: int) -> tuple[Tensor, Tensor]:
    return batch


MODELS: dict[str, Any] = {"MLP of 10M": _mlp, GPT: _gpt}


def _enter_torch() -> None:
    dist.init_process_group("gloo")
    for name, make in MODELS.items():
        model, (x, y), loss = make(1)
        ddp = DistributedDataParallel(model)
        update = torch.optim.SGD(ddp.parameters(), lr=0.01)

        def step(ddp: Any = ddp, update: Any = update, x: Tensor = x, y: Tensor = y, loss: Any = loss) -> None:
            update.zero_grad()
            loss(ddp(x), y).backward()
            update.step()

        contestants[f"{name}, DDP"] = step


def _enter_minipar() -> None:
    comm = communicator.create()
    for name, make in MODELS.items():
        for variant, bucket in VARIANTS.items():
            model, batch, loss = make(comm.size)
            program = Plan(dp=comm.size, bucket=bucket).compile(shape_of(list(model)))
            executor = Executor(program, comm, model, loss, partial(torch.optim.SGD, lr=0.01))
            contestants[f"{name}, {variant}"] = partial(executor.run, partial(_same, batch))


def measure(quick: bool = False) -> list[Row]:
    rows = []
    for ranks in (2, 4):
        with Cluster(ranks) as ours, Cluster(ranks, keep_freed_memory=False) as plain, Cluster(ranks) as like_ours:
            ours.run(_enter_minipar)
            for cluster in (plain, like_ours):
                cluster.run(_enter_torch)
            plain.run(as_torch_starts_them)
            for kind, theirs in (("", plain), (" in ranks like ours", like_ours)):
                for model in MODELS:
                    ddp, mine = f"{model}, DDP", [f"{model}, {variant}" for variant in VARIANTS]
                    found = in_turn({ddp: theirs, **dict.fromkeys(mine, ours)}, 8 if quick else 30)
                    for name in mine:
                        judged = name.endswith("buckets of 25 MiB") and not kind
                        must, aim = (MUST, AIM) if judged else (None, None)
                        text = f"data parallel, {ranks} ranks, {name}: time / DDP{kind}"
                        note = f"DDP {found[ddp] * 1e3:.0f} ms"
                        rows.append(Row(text, found[name] / found[ddp], "", must, aim, note))
    return rows
