"""What it costs that a model has a forward of its own: the first `train` on new ranks, beside an nn.Sequential of the
same layers, and the second one."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.harness import Row
from minipar import Cluster, train

MUST = 1.3


class Net(nn.Module):
    """A small model as one writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Looking(Net):
    """It looks at its input, so that its forward is run again in each layer."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.isnan().any()):
            raise ValueError("the batch has numbers that are none")
        return super().forward(x)


def chain() -> nn.Module:
    """The same layers as an nn.Sequential."""
    net = Net()
    return nn.Sequential(nn.Sequential(net.embed, net.norm), *net.blocks, net.head)


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "cut": Net, "replayed": Looking}


def measure(quick: bool = False) -> list[Row]:
    """Ratios of medians of milliseconds of computing, of the driver and the ranks together."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in MODELS}
    for k in range(5 if quick else 12):
        for name, make in MODELS.items():
            with Cluster(2, device="cpu") as cluster:
                pair = _computing(cluster, make), _computing(cluster, make)
            found[name] += [pair] if k else []  # (the driver imports what it needs)
    rows = []
    for number, which in enumerate(("first", "second")):
        times = {name: median(pair[number] for pair in pairs) * 1e3 for name, pairs in found.items()}
        for name in ("cut", "replayed"):
            note = f"{times[name]:.0f} and {times['chain']:.0f} ms, dp=2, 2 steps"
            must = MUST if which == "first" else None
            ratio = times[name] / times["chain"]
            rows.append(Row(f"{which} train of a model that is {name} / of its layers", ratio, "", must, None, note))
    return rows


def _computing(cluster: Cluster, make: Callable[[], nn.Module]) -> float:
    """Seconds of computing for one training."""
    data = torch.randn(32, 16), torch.arange(32) % 10
    before = time.process_time() + sum(cluster.run(time.process_time))
    train(make, data, "dp=2", cluster=cluster, steps=2, check=False, progress=False)
    return time.process_time() + sum(cluster.run(time.process_time)) - before
