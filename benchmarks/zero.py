"""ZeRO beside torch's own: DDP, DDP with ZeroRedundancyOptimizer, FSDP2; a GPT of 12 layers of width 512, Adam, gloo.

Times are medians; the contestants take turns, step by step. Peaks are those of live tensors, measured by the same
tracker for all; FSDP2 and minipar sum gradients layer by layer. For torch, bytes are those that a process writes to its
sockets in a step, as the kernel counts them (`/proc/self/io`): gloo's reduce-scatter, which FSDP2 uses, sends twice
what is necessary. minipar's messages go through shared memory; their bytes are those of the program.

torch runs in processes as torch starts them, and a second time in minipar's ranks (see `pipelines`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import Row, as_torch_starts_them, contestants, in_turn
from minipar import Cluster, Plan, models
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.execution.memory.storages import FollowedStorage, Storages
from minipar.models.parameter_groups import shape_of
from minipar.trace import Trace

LAYERS, WIDTH, VOCAB, LENGTH, ROWS = 12, 512, 2048, 128, 2  # 40 million parameters; sequences per rank
ZRO = "DDP + ZeroRedundancyOptimizer"
THEIRS = ("DDP", ZRO, "FSDP2")
OURS = {
    "ZeRO-1": "zero=1",
    "ZeRO-2": "zero=2",
    "ZeRO-3": "zero=3",
    "ZeRO-3 without prefetch": "zero=3 prefetch=0",
}
# name -> the contestant it is compared with, and the targets (must, aim) of the ratio of times
TIMES = {"ZeRO-1": ("DDP", 1.05, 1.0), "ZeRO-2": ("DDP", 1.05, 1.0), "ZeRO-3": ("FSDP2", 0.85, 0.75)}
BYTES_MUST = 0.76
PEAKS = {
    "ZeRO-1": (ZRO, 1.0),
    "ZeRO-2": (ZRO, 1.0),
    "ZeRO-3": ("FSDP2", 1.10),
    "ZeRO-3 without prefetch": ("FSDP2", 1.06),
}


def _build(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return models.gpt(layers=layers, width=WIDTH, heads=8, context=LENGTH, vocab=VOCAB)


def _batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCAB, (rows, LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _torch_step(name: str, layers: int) -> Callable[[], object]:
    """In a rank: the step of one of torch's contestants."""
    x, y = _batch(ROWS)
    model: nn.Module = _build(layers)
    if name == "FSDP2":
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    if name == ZRO:
        update: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-4)
    else:
        update = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        update.step()
        update.zero_grad()

    return step


def _minipar_step(name: str, layers: int) -> Callable[[], object]:
    """In a rank: the step of one of minipar's contestants."""
    comm = communicator.create()
    batch = _batch(ROWS * comm.size)
    model = _build(layers)
    program = Plan.parse(f"dp={comm.size} {OURS[name]}").compile(shape_of(list(model)))
    executor = Executor(program, comm, model, nn.functional.cross_entropy, partial(torch.optim.Adam, lr=1e-4))
    return partial(executor.run, lambda step: batch)


def _enter_torch(layers: int) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    contestants.update({name: _torch_step(name, layers) for name in THEIRS})


def _enter_minipar(layers: int) -> None:
    contestants.update({name: _minipar_step(name, layers) for name in TIMES})


class _Peak(Storages):
    """The peak of the bytes of live tensors. (A DTensor has no memory of its own: the tensor that it wraps is
    counted.)"""

    peak = 0

    def changed(self, held: FollowedStorage, delta: int) -> None:
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def _peak_of(name: str, layers: int) -> int:
    """In a rank: the peak of live bytes in a contestant's third step, with its model and everything else it keeps."""
    if name in THEIRS and not dist.is_initialized():
        dist.init_process_group("gloo")
    with _Peak() as watch:
        step = (_torch_step if name in THEIRS else _minipar_step)(name, layers)
        for _ in range(2):
            step()
        watch.settle()
        watch.peak = 0
        step()
    del step
    gc.collect()
    return watch.peak


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar:")))


def _bytes_of(name: str) -> int:
    """In a rank: bytes sent in one step of a contestant."""
    communicator.create().barrier()
    before = _written()
    contestants[name]()
    return _written() - before


def _bytes_of_program(name: str, layers: int, ranks: int) -> list[int]:
    """The bytes that minipar's ranks send each other, here by shared memory (for gloo, see
    tests/execution/test_zero.py)."""
    program = Plan.parse(f"dp={ranks} {OURS[name]}").compile(shape_of(list(_build(layers))))
    never = ((),) * ranks  # no instruction has run
    return Trace(program, never, never, lambda rank, value: 0).bytes_sent()


def measure(quick: bool = False) -> list[Row]:
    rows: list[Row] = []
    layers, rounds, warm_up = (2 if quick else LAYERS), 9, 2
    for ranks in (2,) if quick else (2, 4):
        with Cluster(ranks) as ours, Cluster(ranks, keep_freed_memory=False) as plain:
            ours.run(_enter_minipar, layers)
            plain.run(_enter_torch, layers)
            plain.run(as_torch_starts_them)
            found = in_turn(dict.fromkeys(THEIRS, plain) | dict.fromkeys(TIMES, ours), rounds, warm_up)
            sent = {name: max(plain.run(_bytes_of, name)) for name in THEIRS}
            sent |= {name: max(_bytes_of_program(name, layers, ranks)) for name in TIMES}
        rows += _rows(found, sent, ranks)
        with Cluster(ranks) as cluster:  # a new cluster, since the others keep their contestants
            peaks = {name: max(cluster.run(_peak_of, name, layers)) for name in (*THEIRS, *OURS)}
        for name, (other, must) in PEAKS.items():
            text = f"{name}, {ranks} ranks: peak of live bytes / {other}"
            note = f"{peaks[name] / 2**20:.0f} MiB"
            rows.append(Row(text, peaks[name] / peaks[other], "", must, 1.0 if other == "FSDP2" else None, note))
        if not quick:
            with Cluster(ranks) as ours, Cluster(ranks) as like_ours:
                ours.run(_enter_minipar, layers)
                like_ours.run(_enter_torch, layers)
                found = in_turn(dict.fromkeys(THEIRS, like_ours) | dict.fromkeys(TIMES, ours), rounds, warm_up)
            for name, (other, _, _) in TIMES.items():
                text = f"{name}, {ranks} ranks: time / {other} in ranks like ours"
                rows.append(Row(text, found[name] / found[other], note=f"{other} {found[other] * 1e3:.0f} ms"))
    return rows


def _rows(found: dict[str, float], sent: dict[str, int], ranks: int) -> list[Row]:
    rows = []
    for name, (other, must, aim) in TIMES.items():
        note = f"{other} {found[other] * 1e3:.0f} ms"
        rows.append(Row(f"{name}, {ranks} ranks: time / {other}", found[name] / found[other], "", must, aim, note))
    for name in ("ZeRO-1", "ZeRO-2"):
        rows.append(Row(f"{name}, {ranks} ranks: time / {ZRO}", found[name] / found[ZRO]))
        rows.append(Row(f"{name}, {ranks} ranks: bytes sent / {ZRO}", sent[name] / sent[ZRO]))
    text = f"ZeRO-3, {ranks} ranks: bytes sent / FSDP2"
    note = f"FSDP2 {sent['FSDP2'] / 2**20:.0f} MiB a step"
    rows.append(Row(text, sent["ZeRO-3"] / sent["FSDP2"], "", BYTES_MUST, None, note))
    return rows
