"""Recomputation beside torch.utils.checkpoint: peak bytes above the model, and time, on one rank.

A `tanh` layer saves one tensor, an `mlp` block four, so that its best segment is shorter than sqrt(N). Both are thin:
their outputs are much larger than their weights. In `gpt` blocks, as in real models, matrix products take nearly all
the time. checkpoint_sequential is torch's own tool, which does not checkpoint its last segment; `checkpoint` with equal
segments is the best that torch can do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.harness import Row, contestants, in_turn
from minipar import Cluster, Plan
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.execution.measuring.profiler import profile
from minipar.execution.memory.storages import Storages
from minipar.models import transformer
from minipar.models.parameter_groups import shape_of

LAYERS = {"tanh": 64, "mlp": 64, "gpt": 16}
SIZES = {"tanh": (8192, 64), "mlp": (4096, 64), "gpt": (8, 128, 384)}  # shape of an activation, width last
SEGMENTS = {"tanh": 8, "mlp": 4, "gpt": 1}  # layers in the segment that is best by the formula


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def _build(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    width = SIZES[kind][-1]
    one: Callable[[], nn.Module] = {
        "tanh": lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        "mlp": lambda: Block(width),
        "gpt": lambda: transformer.Block(width, width // 64, 0.0, fused=True),
    }[kind]
    return nn.Sequential(*(one() for _ in range(LAYERS[kind])))


def _of_mean_square(result: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(result, y)


def _enter(kind: str) -> None:
    """In a rank: make every contestant ready to run."""
    size = SIZES[kind]
    batch = torch.randn(size), torch.randn(size)
    comm = communicator.create()
    costs = profile(list(_build(kind)), batch, _of_mean_square, [size[0]], repeats=1)
    for choice in dict.fromkeys(("none", str(SEGMENTS[kind]), "sqrt")):
        model = _build(kind)
        program = Plan(checkpoint=choice).compile(shape_of(list(model)), costs=costs)
        executor = Executor(program, comm, model, _of_mean_square, partial(torch.optim.SGD, lr=1e-3))
        contestants[f"{kind} minipar {choice}"] = partial(executor.run, lambda step: batch)

    def torchs(run: Any) -> Any:
        model = _build(kind)
        update = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            _of_mean_square(run(model, batch[0]), batch[1]).backward()
            update.step()
            update.zero_grad()

        return step

    def even(model: nn.Sequential, x: Tensor, length: int) -> Tensor:
        layers = list(model)
        for start in range(0, len(layers), length):
            x = checkpoint(nn.Sequential(*layers[start : start + length]), x, use_reentrant=False)
        return x

    contestants[f"{kind} torch none"] = torchs(lambda model, x: model(x))
    length = SEGMENTS[kind]
    contestants[f"{kind} torch {length}"] = torchs(partial(even, length=length))
    contestants[f"{kind} torch sequential {length}"] = torchs(
        lambda model, x: checkpoint_sequential(model, LAYERS[kind] // length, x, use_reentrant=False)
    )


class _Peak(Storages):
    top = 0

    def changed(self, held: Any, delta: int) -> None:
        self.top = max(self.top, self.live)


def _peak(name: str) -> int:
    """In a rank: the peak of a contestant's live bytes, without those that it keeps between steps."""
    contestants[name]()
    with _Peak() as peak:
        contestants[name]()
    return peak.top


def measure(quick: bool = False) -> list[Row]:
    rows: list[Row] = []
    with Cluster(1) as cluster:
        for kind, size in SIZES.items():
            cluster.run(_enter, kind)
            best = str(SEGMENTS[kind])
            names = ["minipar none", "torch none", *(f"minipar {k}" for k in dict.fromkeys((best, "sqrt")))]
            names += [f"torch {best}", f"torch sequential {best}"]
            unit = math.prod(size) * 4
            peaks = {name: cluster.run(_peak, f"{kind} {name}")[0] for name in names}
            times = in_turn({f"{kind} {name}": cluster for name in names}, 3 if quick else 15, 1)
            for name in names:
                text = f"{kind} x {LAYERS[kind]}, {name}: peak, in outputs of a layer"
                rows.append(Row(text, peaks[name] / unit, "", note=f"{times[f'{kind} {name}'] * 1e3:.0f} ms a step"))
            mine, even, torchs = (f"minipar {best}", f"torch {best}", f"torch sequential {best}")
            for other, what in ((torchs, "checkpoint_sequential"), (even, "checkpoint, even segments")):
                rows += [
                    Row(f"{kind}, segments of {best}: peak / {what}", round(peaks[mine] / peaks[other], 3), "", 1.0),
                    Row(f"{kind}, segments of {best}: time / {what}",
                        times[f"{kind} {mine}"] / times[f"{kind} {other}"], "", 1.05),
                ]  # fmt: skip
            longer = times[f"{kind} {mine}"] / times[f"{kind} minipar none"]
            rows.append(Row(f"{kind}: time / without recomputation", longer, "", None, 1.33))
    return rows
