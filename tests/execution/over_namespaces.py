"""A script for torchrun: `over_namespaces.py WHAT FOLDER` does the functions below that WHAT names, with commas, and
writes what each found to FOLDER/NAME. test_namespaces.py starts it on two hosts, which are network namespaces. Before
each function it waits until FOLDER/NAME exists, since the cable may have to change first."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from minipar import Run, StepInfo, calibrate, communicator, models, train
from minipar.cluster.launched import Launched

RANK = int(os.environ.get("RANK", "0"))
SIZES = (6, 8, 12, 8, 10, 8, 12, 8, 10)
PLANS = (
    "dp=2 pp=2 schedule=1f1b microbatches=3",
    "pp=4 schedule=interleaved microbatches=4",
    "dp=4 zero=3 microbatches=2",
    "pp=4 offload=optimizer,parameters,activations microbatches=2",
)
DEEP, BROAD = (64, 64, 1024, 64, 64), (512, 1024, 512, 1024, 512)  # much to send, or to sum
Limited = tuple[tuple[str, tuple[int, ...], int], ...]
LIMITED: Limited = (  # plan, model and batch: nearly all of a step is the time of a slow cable
    ("pp=4 microbatches=4", DEEP, 2048),
    ("dp=4 zero=3", BROAD, 32),
    ("dp=2 pp=2 microbatches=2", BROAD, 32),
)
DECIDING = ("dp=2 sync=ps servers=2", "pp=4 schedule=ampnet microbatches=4")


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(17, SIZES[0], generator=generator), torch.randint(SIZES[-1], (17,), generator=generator)


def trained(plan: str, cluster: Any = None, steps: int = 3, **options: Any) -> Run:
    """Some steps, in float64."""
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.0 if "zero" in plan else 0.9)
    return train(partial(models.mlp, SIZES), rows(), plan, cluster=cluster, steps=steps, optimizer=optimizer,
                 dtype=torch.float64, progress=False, **options)  # fmt: skip


def write(path: Path, told: dict[str, Any]) -> None:
    """A file that is whole as soon as it is there."""
    path.with_suffix(".new").write_text(json.dumps(told))
    path.with_suffix(".new").rename(path)


def plans(folder: Path) -> None:
    """Every plan, beside plain torch."""
    for number, plan in enumerate((*PLANS, *DECIDING)):
        run = trained(plan, check=True)
        if RANK == 0:
            told = {"losses": run.losses, "error": run.max_gradient_error(), "clock_error": run.trace.clock_error}
            write(folder / f"{number}.json", told)


def slow(folder: Path) -> None:
    """With a cable of 100 Mbit/s."""
    timed(folder, LIMITED[1:])


def slower(folder: Path) -> None:
    """With a cable of 50 Mbit/s."""
    timed(folder, LIMITED[:1])


def timed(folder: Path, limited: Limited, steps: int = 4) -> None:
    """Plans that send much between the hosts: the time of a step, predicted and measured, in seconds."""
    for number, (plan, sizes, batch) in enumerate(limited):
        generator = torch.Generator().manual_seed(5)
        xs, ys = (
            torch.randn(batch, sizes[0], generator=generator),
            torch.randint(sizes[-1], (batch,), generator=generator),
        )
        for _ in range(3):  # (another load while it is calibrated than while it runs: not each time)
            measured = calibrate(Launched.here(), seconds=0.5, algorithms=False, progress=False)
            run = train(
                partial(models.mlp, sizes), (xs, ys), plan, steps=steps, batch=batch, calibration=measured,
                progress=False,
            )  # fmt: skip
            told = {"predicted": run.predicted.time, "measured": run.step_times[1:]}
            if near(**told):
                break
        if RANK == 0:
            write(folder / f"{number}.json", told)


def near(predicted: float, measured: list[float]) -> bool:
    """Within 15 %: not below the shortest step by more, nor above the median."""
    return 0.85 * min(measured) <= predicted <= 1.15 * median(measured)


def reported(folder: Path, error: BaseException) -> None:
    write(folder / f"reported-{RANK}.json", {"at": time.time(), "text": str(error)})


def cut(folder: Path) -> None:
    """Train for a long time, and say when the end came."""

    def told(info: StepInfo) -> None:
        if info.step == 40:
            (folder / "begun").touch()

    try:
        trained("dp=2 pp=2 microbatches=2", steps=1_000_000, save=folder / "saved", save_every=10, callback=told)
    except BaseException as error:
        reported(folder, error)
        raise


def sums(folder: Path) -> None:
    """Ranks that have nothing but a communicator."""
    comm, x = communicator.create(), torch.ones(1000)
    try:
        for k in range(1_000_000_000):
            comm.iallreduce(x, (0, 1, 2, 3)).wait()
            if k == 20 and comm.rank == 0:
                (folder / "begun").touch()
    except BaseException as error:
        reported(folder, error)
        raise


if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        while not Path(sys.argv[2], name).exists():
            time.sleep(0.05)
        globals()[name](Path(sys.argv[2], name))
