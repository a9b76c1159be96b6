"""How long a notebook's cell waits when ranks start, when it exchanges data with them, and when one of them dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.harness import Row
from minipar.cluster import Cluster, worker
from minipar.comm import communicator
from minipar.errors import RankDied

RANKS = 4
IMPORT = "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
START = f"""
import time; start = time.perf_counter()
from minipar import Cluster
cluster = Cluster({RANKS}, device="cpu")
cluster.run(lambda: None)
print(time.perf_counter() - start)
"""
MEGABYTES_40 = 10_000_000  # elements of float32


def measure(quick: bool = False) -> list[Row]:
    return [*_first_start(3 if quick else 9), *_later(5 if quick else 15), *_transfers(7 if quick else 25)]


def _first_start(rounds: int) -> list[Row]:
    imports, starts = [], []
    for _ in range(rounds):
        imports.append(_fresh(IMPORT))
        starts.append(_fresh(START))
    note = f"{median(starts):.2f} s, the import {median(imports):.2f} s"
    return [
        Row(
            f"first start of {RANKS} ranks, beyond an import of torch",
            median(starts) - median(imports),
            "s",
            0.5,
            note=note,
        )
    ]


def _fresh(script: str) -> float:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _later(rounds: int) -> list[Row]:
    later, healed, noticed, warm, optimizer = [], [], [], [], []
    with Cluster(RANKS, device="cpu"):  # starts the helper process
        for _ in range(rounds):
            start = time.perf_counter()
            with Cluster(RANKS, device="cpu") as cluster:
                cluster.run(lambda: None)
                later.append(time.perf_counter() - start)
                optimizer.append(max(cluster.run(_first_step)))
                warm += [_timed(lambda: cluster.run(lambda: None)) for _ in range(100)]
                noticed.append(_death(cluster))
                healed.append(_timed(lambda: cluster.run(lambda: None)))
    return [
        Row(f"another cluster of {RANKS} ranks, with its first run", median(later), "s", 0.2),
        Row("a rank is killed in a collective: until the error", median(noticed), "s", 0.1),
        Row("the next run, with the ranks that start anew", median(healed), "s", 0.2),
        Row(f"run(lambda: None) on {RANKS} warm ranks", median(warm) * 1e3, "ms", 1.0),
        Row("the first optimizer of a rank and its first step", median(optimizer), "s"),
    ]


def _first_step() -> float:
    start = time.perf_counter()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return time.perf_counter() - start


def _death(cluster: Cluster) -> float:
    """Seconds from the death of a rank to the error in the driver. The other ranks wait for the dead one."""
    when: list[float] = []
    with contextlib.suppress(RankDied):
        cluster.run_with(lambda _, moment: when.append(moment), _die)
    return time.perf_counter() - when[0]


def _die() -> None:
    comm = communicator.create()
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.05)
        worker.report(time.perf_counter())  # on Linux this clock is the same in all processes
        os.kill(os.getpid(), signal.SIGKILL)
    comm.allreduce([1.0])


def _transfers(rounds: int) -> list[Row]:
    tensor = torch.ones(MEGABYTES_40)
    with Cluster(RANKS, device="cpu") as cluster:
        first = _timed(lambda: cluster.run_on([0], _take, tensor))
        to_one, to_all, back, read = [], [], [], []
        cluster.run(_make)
        for _ in range(rounds):
            to_one.append(_timed(lambda: cluster.run_on([0], _take, tensor)))
            to_all.append(_timed(lambda: cluster.run(_take, tensor)))
            back.append(_timed(lambda: cluster.run_on([0], _give)))
            read.append(_timed(lambda: cluster.run_on([0], torch.sum, tensor)))
    note = f"the first one of a session {first * 1e3:.0f} ms"
    return [
        Row("a tensor of 40 MB to a rank", median(to_one) * 1e3, "ms", 10.0, note=note),
        Row("a tensor of 40 MB from a rank", median(back) * 1e3, "ms", 10.0),
        Row(f"a tensor of 40 MB to {RANKS} ranks", median(to_all) * 1e3, "ms"),
        Row("a tensor of 40 MB to a rank, which sums it", median(read) * 1e3, "ms"),
    ]


def _take(tensor: torch.Tensor) -> None:
    assert tensor[-1] == 1


held = types.SimpleNamespace()  # of this rank; kept between calls of the cluster


def _make() -> None:
    held.tensor = torch.ones(MEGABYTES_40)


def _give() -> torch.Tensor:
    found: torch.Tensor = held.tensor
    return found
