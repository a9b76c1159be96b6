"""What the communicator's checks cost, and how soon the driver learns of a death or a stop.

A small allreduce runs with and without the announcement by which a mismatch is found before gloo sees it, and with
torch's own wait instead of the wait that the stop button can end. All variants take turns on the same group.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.harness import Row
from minipar import Cluster
from minipar.cluster import worker
from minipar.comm import communicator
from minipar.comm.handles import Handle
from minipar.comm.queues import Queue, Starter
from minipar.comm.transport.calls import Steps
from minipar.errors import RankDied

_CALLS = 50  # of one variant, one after the other


def _measure(rounds: int) -> dict[str, float]:
    """Microseconds of one allreduce for each variant: medians over rounds."""
    comm = communicator.create()
    everyone = tuple(range(comm.size))
    group = comm.group().backend
    unchecked = Queue((comm.rank,), Starter("starts collectives"))  # nothing is announced to others
    x, y = torch.zeros(256), torch.zeros(65536)

    def plain() -> None:
        group.allreduce([x]).wait()

    def steps() -> Steps:
        yield from ()
        return group.allreduce([x])

    def sliced() -> None:
        Handle(unchecked.submit("allreduce", steps()), x, comm.pending).wait()

    def checked() -> None:
        comm.iallreduce(x, everyone).wait()

    def whole() -> None:
        comm.allreduce(x)

    def large_plain() -> None:
        group.allreduce([y]).wait()

    def large_checked() -> None:
        comm.iallreduce(y, everyone).wait()

    variants: dict[str, Callable[[], None]] = {
        "plain": plain,
        "sliced": sliced,
        "checked": checked,
        "whole": whole,
        "large plain": large_plain,
        "large checked": large_checked,
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for k in range(rounds):
        names = list(variants)
        for name in names[k % len(names) :] + names[: k % len(names)]:
            comm.barrier()
            start = time.perf_counter()
            for _ in range(_CALLS):
                variants[name]()
            if k >= 2:
                times[name].append((time.perf_counter() - start) / _CALLS * 1e6)
    return {name: median(found) for name, found in times.items()}


def _wait_for_rank_0(end: bool) -> None:
    comm = communicator.create()
    comm.barrier()
    if comm.rank == 0:
        time.sleep(0.2)
        worker.report(time.monotonic())
        if end:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    comm.allreduce([1.0])


def _until(cluster: Cluster, end: bool) -> float:
    """Seconds from rank 0's death, or from a stop, until the driver has the exception."""
    since: list[float] = []

    def heard(rank: int, moment: float) -> None:
        since.append(moment)
        if not end:
            since[0] = time.monotonic()
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    try:
        cluster.run_with(heard, _wait_for_rank_0, end)
    except (RankDied, KeyboardInterrupt):
        return time.monotonic() - since[0]
    raise AssertionError("the run ended by itself")


def measure(quick: bool = False) -> list[Row]:
    rows = []
    for ranks in (2, 4):
        with Cluster(ranks, device="cpu") as cluster:
            found = cluster.run(_measure, 12 if quick else 102)
            t = {name: max(one[name] for one in found) for name in found[0]}
            what = f"allreduce of 1 KB, {ranks} ranks"
            rows += [
                Row(f"{what}, torch's gloo", t["plain"], "us"),
                Row(f"{what}, wait that can be stopped / gloo", t["sliced"] / t["plain"], "", None, 1.05),
                Row(f"{what}, checked for mismatches / gloo", t["checked"] / t["plain"], "", 1.1),
                Row(f"{what}, comm.allreduce", t["whole"], "us"),
                Row(f"allreduce of 256 KB, {ranks} ranks, torch's gloo", t["large plain"], "us"),
                Row(f"allreduce of 256 KB, {ranks} ranks, checked / gloo", t["large checked"] / t["large plain"]),
            ]
            tries = range(2 if quick else 7)
            rows += [
                Row(f"{ranks} ranks, SIGKILL until RankDied", median(_until(cluster, True) for _ in tries), "s", 1.0),
                Row(f"{ranks} ranks, stop until control", median(_until(cluster, False) for _ in tries), "s", 1.0),
            ]
    return rows
