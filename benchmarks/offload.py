"""Offload: step time and peak of a rank with and without each kind; how fast the tiers are. A GPT, AdamW, one rank.

Times are medians; the plans take turns, step by step. Before every step the pages that the disk store has written are
dropped from the page cache, so that the times are those of the disk. (Where the file system allows it, the store
bypasses the cache.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.harness import Row
from minipar import Cluster, Plan, models
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.execution.memory.disk import DiskStore
from minipar.execution.memory.tracker import Tracker
from minipar.execution.streams import HostStreams
from minipar.models.parameter_groups import shape_of

LAYERS, WIDTH, VOCAB, LENGTH, ROWS = 8, 256, 1024, 64, 8
KINDS = ("activations", "optimizer", "parameters", "activations,optimizer,parameters")
MiB = 1 << 20
BLOCK = 32 * MiB  # bytes of a copy that is timed


def _executor(plan: str) -> Executor:
    torch.manual_seed(0)
    model = models.gpt(layers=LAYERS, width=WIDTH, heads=4, context=LENGTH, vocab=VOCAB)
    program = Plan.parse(plan).compile(shape_of(list(model)))
    adam = partial(torch.optim.AdamW, lr=1e-4)
    return Executor(program, communicator.create(), model, torch.nn.functional.cross_entropy, adam)


def _steps(plans: dict[str, str], rounds: int) -> dict[str, tuple[float, int]]:
    """In a rank: for each plan the median seconds of a step, and the peak of its device memory in bytes."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    executors = {name: _executor(plan) for name, plan in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in plans}
    for k in range(2 + rounds):
        for name, executor in executors.items():
            if executor.copies is not None and executor.copies.disk is not None:
                _forget(executor.copies.disk)
            start = time.perf_counter()
            executor.run(lambda step: (x, y))
            if k >= 2:
                times[name].append(time.perf_counter() - start)
    peaks = {}
    for name, executor in executors.items():
        tracker = Tracker(executor)
        with tracker:
            executor.run(lambda step: (x, y))
        peaks[name] = tracker.passes[0].peak().bytes
        tracker.close()
        executor.close()
    return {name: (median(times[name]), peaks[name]) for name in plans}


def _forget(disk: DiskStore) -> None:
    """Ask the system to forget what it holds of the file, so that the disk is read."""
    if hasattr(os, "posix_fadvise"):
        os.fsync(disk.file)
        os.posix_fadvise(disk.file, 0, 0, os.POSIX_FADV_DONTNEED)


def _rates(rounds: int) -> dict[str, float]:
    """In a rank: bytes per second to and from each tier, for one large tensor."""
    tensor, back, streams, disk = torch.randn(BLOCK // 4), torch.empty(BLOCK // 4), HostStreams(), DiskStore()
    room = streams.room(tensor)
    acts: dict[str, Callable[[], object]] = {
        "to host": lambda: streams.copy(tensor, room, "to").result(),
        "from host": lambda: streams.copy(room, back, "from").result(),
        "to disk": lambda: disk.put("block", tensor).result(),
        "from disk": lambda: disk.fetch("block", back).result(),
    }
    found: dict[str, float] = {}
    for name, act in acts.items():
        times = []
        for _ in range(1 + rounds):
            if name == "from disk":
                _forget(disk)
            start = time.perf_counter()
            act()
            times.append(time.perf_counter() - start)
        found[name] = BLOCK / median(times[1:])
    streams.close()
    disk.close()
    return found


def measure(quick: bool = False) -> list[Row]:
    """Rows of the table; `quick` means few rounds, and only the host."""
    rounds = 3 if quick else 15
    plans = {"nothing": "microbatches=1"}
    for to in ("host",) if quick else ("host", "disk"):
        plans |= {f"{kind} to {to}": f"microbatches=1 offload={kind} offload_to={to}" for kind in KINDS}
    with Cluster(1, device="cpu") as cluster:
        steps = cluster.run(_steps, plans, rounds)[0]
        rates = {} if quick else cluster.run(_rates, rounds)[0]
    base, whole = steps["nothing"]
    rows = []
    for name, (seconds, peak) in steps.items():
        if name != "nothing":
            note = f"{seconds * 1e3:.0f} ms, {peak / MiB:.1f} MiB; without {base * 1e3:.0f} ms, {whole / MiB:.1f} MiB"
            rows.append(Row(f"offload: step time, {name}", seconds / base, "x", note=note))
            rows.append(Row(f"offload: peak, {name}", peak / whole, "x", 1.0))
    return rows + [Row(f"offload: bytes a second {way}", rate / 1e9, "GB/s") for way, rate in rates.items()]
