"""What it costs that a run proves itself: whole calls of `train` with and without it, and each other check alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.harness import Row
from minipar import Cluster, data, models, stepping, train
from minipar.execution.updating import Update, check_update, forms_of
from minipar.models.losses import Trial
from minipar.models.randomness import split_sensitive
from minipar.sharding import capture_model, whole

PLANS = ("dp=2", "pp=2 microbatches=4")
STEPS = 10


def measure(quick: bool = False) -> list[Row]:
    """Milliseconds that check="auto" adds to a run of few steps, and that `stepping` adds to a step."""
    rows = alone(3 if quick else 9)
    with Cluster(2, device="cpu") as cluster:
        for name, batch in (("mlp-tiny", 64), ("gpt-tiny", 16)):
            for plan in PLANS:
                keys: dict[str, Any] = {
                    "cluster": cluster, "steps": STEPS, "batch": batch, "loss": models.loss_of(name), "progress": False,
                    "optimizer": partial(torch.optim.AdamW, lr=1e-3),
                }  # fmt: skip
                given = partial(models.build, name), data.for_model(name), plan
                ways = {
                    "none": lambda given=given, keys=keys: train(*given, check=False, **keys),
                    "auto": lambda given=given, keys=keys: train(*given, **keys),
                    "loop": lambda given=given, keys=keys: sum(s.loss for s in stepping(*given, check=False, **keys)),
                }
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                for k in range(6 if quick else 21):
                    for way, run in ways.items():
                        start = time.perf_counter()
                        run()
                        seconds[way] += [time.perf_counter() - start] if k else []
                none, auto, loop = (median(seconds[way]) * 1e3 for way in ways)
                note = f"{none:.0f} ms without, {STEPS} steps"
                rows.append(Row(f"{name}, {plan}: what check=auto adds to a run", auto - none, "ms", None, None, note))
                rows.append(Row(f"{name}, {plan}: what stepping adds to a step", (loop - none) / STEPS, "ms"))
    return rows


class Mine(torch.optim.SGD):
    """An optimizer that is not torch's own: it is tried before the run."""


def alone(repeats: int) -> list[Row]:
    """Milliseconds of each check that comes before what it could spoil: loss, rows, optimizer, captured layers."""
    rows = []
    for name, batch in (("mlp-tiny", 64), ("gpt-tiny", 16)):
        model, (x, y) = models.build(name), data.for_model(name).batch(0, batch)
        mine = partial(_of, models.loss_of(name))  # (not torch's own: it is tried on parts of its rows)
        out, trial, own = model(x), Trial(mine), torch.nn.Sequential(*(_Foreign(layer) for layer in model))
        trial(out, y, 0)  # what follows is compared with earlier rows, too

        def layers(model: Any = model, x: Any = x) -> None:
            for layer in model:
                given, x = x, layer(x)
                flows = given.is_floating_point()
                assert not whole.difference(layer, layer, given.detach(), flows)

        checks: dict[str, Callable[[], Any]] = {
            "loss of a micro-batch tried": partial(trial, out, y, 1),
            "rows of layers tried apart": partial(split_sensitive, own, x),
            "optimizer tried": partial(check_update, Update(Mine, forms_of(model)), "zero=1"),
            "captured layers compared": layers,
        }
        capturing = _milliseconds(partial(capture_model, model, x), 3)
        step = _milliseconds(partial(_step, model, mine, x, y), repeats)
        for check, act in checks.items():
            note = f"a step takes {step:.1f} ms" + f", capturing {capturing:.0f}" * (
                check == "captured layers compared"
            )
            rows.append(Row(f"{name}: {check}", _milliseconds(act, repeats), "ms", None, None, note))
    return rows


def _of(loss: Callable[[Any, Any], torch.Tensor], output: Any, y: Any) -> torch.Tensor:
    return loss(output, y)


def _step(model: torch.nn.Module, loss: Callable[[Any, Any], torch.Tensor], x: Any, y: Any) -> None:
    loss(model(x), y).backward()


class _Foreign(torch.nn.Module):
    """A layer as a module that minipar does not know, so that its rows are tried."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)


def _milliseconds(act: Callable[[], Any], repeats: int) -> float:
    """The median of milliseconds of computing (of this process), after one call to warm up."""
    act()
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # (threads that wait for each other compute, too)
    for _ in range(repeats):
        start = time.process_time()
        act()
        found.append((time.process_time() - start) * 1e3)
    torch.set_num_threads(threads)
    return median(found)
