"""A script for torchrun: `under_torchrun.py WHAT FOLDER` does one of the functions below, and every process writes what
it found to FOLDER/WHAT-RANK.json. test_launched.py starts it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minipar import Cluster, Launched, Run, StepInfo, cli, communicator, evaluate, models, resume, stepping, train
from minipar.cluster import worker

RANK = int(os.environ.get("RANK", "0"))
SIZES = (6, 16, 12, 10)
TWO = ("dp=2 microbatches=2", "pp=2 microbatches=4 schedule=1f1b", "dp=2 zero=3", "tp=2", "dp=1 sync=ps")
FOUR = ("dp=2 pp=2 microbatches=2 schedule=1f1b zero=1", "dp=4 zero=2 bucket=flat", "dp=2 sync=ps servers=2")


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(16, 6, generator=generator), torch.randint(10, (16,), generator=generator)


def trained(plan: str, cluster: Any = None, **options: Any) -> Run:
    """Three steps, in float64 beside plain torch."""
    known: dict[str, Any] = {"steps": 3, "batch": 16, "dtype": torch.float64, "check": True, "progress": False}
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return train(partial(models.mlp, SIZES), rows(), plan, cluster=cluster, optimizer=optimizer, **(known | options))


def facts(run: Run) -> dict[str, Any]:
    """What is compared of a run."""
    starts = [min(row) for row in run.trace.starts if row]
    return {
        "losses": run.losses, "error": run.max_error(), "ranks": len(run.trace.starts),
        "recorded": all(len(a) == len(b) for a, b in zip(run.trace.starts, run.trace.program.ranks, strict=True)),
        "begin": min(starts), "time": run.trace.time,
    }  # fmt: skip


def raised(call: Any) -> dict[str, Any]:
    """The error of a call: its class, its text, its notes."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        return {"kind": type(error).__name__, "text": str(error), "notes": notes, "took": time.monotonic() - start}
    return {"kind": "none"}


def only_rank_1() -> None:
    if worker.context().rank == 1:
        raise ValueError("only here")
    time.sleep(60)


def minipar(*words: str) -> dict[str, Any]:
    """The command line: its status, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(list(words))
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


def two(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {TWO[0]: facts(trained(TWO[0])), "compiler": "torch._dynamo" in sys.modules}
    found |= {plan: facts(trained(plan)) for plan in TWO[1:]}
    found["command"] = minipar(
        "run", str(folder / "plan.toml"), "--model", "mine:build", "--steps", "3", "--check", "--json"
    )
    run = trained(TWO[0])
    found["evaluated"] = evaluate(partial(models.mlp, SIZES), rows(), "dp=2", state=run, dtype=torch.float64).loss
    found["loop"] = []
    options: dict[str, Any] = {
        "batch": 16,
        "dtype": torch.float64,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    }
    for step in stepping(partial(models.mlp, SIZES), rows(), TWO[0], **options):
        found["loop"].append([step.loss, step.evaluate(rows()).loss, step.trace.time])
        if step.step == 2:
            break
    here = Launched.here()
    found["sums"] = here.run(lambda: communicator.create().allreduce(worker.context().rank + 1))
    found["one"] = here.run_on([1], lambda: (os.getpid(), os.environ["RANK"]))
    found["pid"] = os.getpid()
    found["cluster"] = raised(lambda: Cluster(2))
    found["size"] = raised(lambda: trained("dp=4"))
    found["refused"] = raised(lambda: trained("dp=1 sync=ps on_death=continue"))
    found["raised"] = raised(lambda: here.run(only_rank_1))
    call = partial(evaluate, partial(models.mlp, SIZES), rows(), "dp=2") if RANK else partial(trained, "dp=2")
    found["different"] = raised(call)
    found["unpicklable"] = raised(lambda: here.run(lambda: open(os.devnull)))  # noqa: SIM115
    seen: list[int] = []

    def enough(info: StepInfo) -> bool:
        seen.append(info.step)
        return info.step < 4

    found["stopped"] = len(trained(TWO[0], steps=40, check=False, callback=enough).losses)
    found["seen"] = seen
    run.save(folder / "saved")
    again = resume(folder / "saved", partial(models.mlp, SIZES), rows(), "pp=2", steps=2, progress=False,
                   optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))  # fmt: skip
    found["resumed"] = again.losses
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        here.run(lambda: None)
    found["warned"] = len(told)
    return found


def four(folder: Path) -> dict[str, Any]:
    return {plan: facts(trained(plan)) for plan in FOUR}


def interrupted(folder: Path) -> dict[str, Any]:
    """A run of 12 steps that is saved after every second one. In its first attempt, which `two` precedes, rank 1 is
    killed, in its second one the loss raises an error on rank 1; the third one ends well, `four` follows, and at last a
    command line that is refused, after which rank 0 ends first. Rank 0 notes where each attempt begins."""
    if not any(folder.glob("begin-*")):
        write("two", two(folder), folder)
    attempt, pids = len(list(folder.glob("begin-*"))), Launched.here().run(os.getpid)

    def disturb(info: StepInfo) -> None:
        with open(folder / f"begin-{attempt}", "a") as file:
            file.write(f"{info.step} {info.loss!r}\n")
        if attempt == 0 and info.step == 3:
            os.kill(pids[1], signal.SIGKILL)
            time.sleep(60)
        if attempt == 1 and info.step == 7:
            (folder / "now").write_text("")

    def loss(output: Tensor, y: Tensor) -> Tensor:
        if attempt == 1 and worker.in_rank() and worker.context().rank == 1 and (folder / "now").exists():
            raise ValueError("the loss of rank 1")
        return torch.nn.functional.cross_entropy(output, y)

    plan = f"dp={os.environ['WORLD_SIZE']}"
    last = attempt == 2
    run = trained(plan, steps=12, save=folder / "saves", save_every=2, callback=disturb, loss=loss, check=last)
    if last:
        write("four", four(folder), folder)
    return {"first": run.first_step, "losses": run.losses, "error": run.max_error()}


def write(what: str, found: dict[str, Any], folder: Path) -> None:
    (folder / f"{what}-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    write(what, globals()[what](folder), folder)
    sys.exit(cli.main(["run", "dp=2", "--model", "mlp-tiny", "--steps", "1"]))
