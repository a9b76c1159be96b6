"""A script for torchrun: `over_namespaces.py WHAT FOLDER` does the functions below that WHAT names, with commas, and
writes what each found to FOLDER/NAME. test_namespaces.py starts it on two hosts, which are network namespaces."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipar import Run, StepInfo, communicator, models, train

RANK = int(os.environ.get("RANK", "0"))
SIZES = (6, 8, 12, 8, 10, 8, 12, 8, 10)


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
        globals()[name](Path(sys.argv[2], name))
