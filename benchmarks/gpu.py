"""On a GPU: one rank's step beside plain torch's, and predictions beside runs.

The model is a GPT of 12 layers of width 1024, in float32 with Adam; predictions are of one with half as many layers.
Without a GPU there are no rows, and it says so. Contestants take turns. Times are medians of whole steps, each until
the device is done; docs/gpu.md has figures of one GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Row
from minipar import Cluster, Plan, models, train
from minipar.cluster import worker
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.execution.streams import synchronize
from minipar.models.parameter_groups import shape_of

LAYERS, SMALL = 12, 2
SIZES: dict[str, Any] = {"width": 1024, "heads": 16, "context": 512, "vocab": 8192}
PLANS = (
    "microbatches=1",
    "microbatches=4",
    "microbatches=4 checkpoint=2",
    "microbatches=4 offload=activations",
    "offload=optimizer",
)
SHARED = ("pp=2 microbatches=4", "dp=2", "dp=2 zero=3", "tp=2")  # by two ranks that share the GPU
adam = partial(torch.optim.Adam, lr=1e-4)
loss = nn.functional.cross_entropy


def _build(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return models.gpt(layers=layers, **SIZES)


def _batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(SIZES["vocab"], (rows, SIZES["context"] + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _times(rows: int, layers: int, rounds: int) -> dict[str, float]:
    """In a rank: seconds of a step of plain torch, and of each plan."""
    device = torch.device(worker.context().device)
    batch = _batch(rows)
    steps: dict[str, Callable[[], object]] = {"plain torch": _plain_step(layers, batch, device)}
    for words in PLANS:
        model = _build(layers).to(device)
        program = Plan.parse(words).compile(shape_of(list(model)))
        executor = Executor(program, communicator.create(), model, loss, adam)
        steps[words] = partial(executor.run, lambda step: batch)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            found[name].append(time.perf_counter() - start)
    return {name: median(seconds[2:]) for name, seconds in found.items()}


def _plain_step(layers: int, batch: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> Callable[[], object]:
    model = _build(layers).to(device)
    optimizer = adam(model.parameters())
    x, y = (part.pin_memory() if device.type == "cuda" else part for part in batch)

    def step() -> None:
        loss(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(quick: bool = False, device: str = "cuda") -> list[Row]:
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu: there is no GPU here, so that nothing is measured", file=sys.stderr)
        return []
    layers, rounds = (SMALL, 3) if quick else (LAYERS, 9)
    found: list[Row] = []
    for rows in (2,) if quick else (8, 2):
        with Cluster(1, device=device) as cluster:
            (times,) = cluster.run(_times, rows, layers, rounds)
        plain = times.pop("plain torch")
        for words, seconds in times.items():
            must = 1.05 if words == "microbatches=1" else None
            text = f"GPU, {rows} rows: {words}, time / plain torch"
            found.append(Row(text, seconds / plain, "", must, None, f"plain torch {plain * 1e3:.1f} ms"))
    for words in (*PLANS, *SHARED):
        found += _predicted(words, layers // 2, device)
    return found


def _predicted(words: str, layers: int, device: str) -> list[Row]:
    """How far the predictions of memory and time are from a run."""
    plan = Plan.parse(words)
    with Cluster(plan.ranks, device=device) as cluster:
        run, watched = (
            train(partial(_build, layers), _batch(8), plan, cluster=cluster, steps=5, loss=loss, optimizer=adam,
                  progress=False, memory=memory)
            for memory in (False, True)
        )  # fmt: skip
    peaks = zip(watched.predicted.peak_memory(), watched.peak_memory, strict=True)
    worst = max(abs(predicted / measured - 1) for predicted, measured in peaks)
    note = f"{run.trace.time * 1e3:.1f} ms, predicted {run.prediction_error:+.1%}"
    return [
        Row(f"GPU: predicted peak memory of {words}, error", 100 * worst, "%", 1.0, None, "of the worst rank"),
        Row(f"GPU: predicted time of {words}, error", 100 * abs(run.prediction_error), "%", None, 5.0, note),
    ]
