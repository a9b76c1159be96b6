"""Tensor parallelism beside torch's own: `parallelize_module` on DTensor, the same blocks, gloo, SGD.

A block has attention of separate projections (torch's column-parallel layers cannot cut a fused one by heads), without
the fused operator (which DTensor has no rule for on the CPU), and a perceptron. Times are medians; the contestants take
turns, step by step. torch sums the gradient of the block's input once for each of the three projections: 2 all-reduces
forward and 4 backward. minipar has them read one value, whose gradient is summed once: 2 and 2.

torch runs in processes as torch starts them, and a second time in minipar's ranks (see `pipelines`).

The last row has `batch_copies=2` beside one copy, on two emulated devices: two micro-batches go through the layers in
step, so that the collectives of one overlap the other's compute.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from benchmarks.harness import Row, as_torch_starts_them, contestants, in_turn
from minipar import Cluster, Plan, Program, data, models, train
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.models.parameter_groups import shape_of
from minipar.program import repartitions
from minipar.sharding.sharded import local_model

LAYERS, WIDTH, HEADS, LENGTH, ROWS = 6, 512, 8, 128, 4
MUST, AIM = 0.8, 0.5  # minipar's time of a step, of DTensor's
DEVICE = "flops=1GFLOP/s bandwidth=20MB/s latency=1ms"  # computes about as long as it sends
FORMS = {"*.q|*.k|*.v|*.up": "S-1 on tp", "*.o|*.down": "P on tp"}


class Block(nn.Module):
    """A transformer's block whose code does not say how many heads it has, so that it runs on some of them, too."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm1(x)
        q, k, v = (
            made.view(*made.shape[:2], -1, self.size).transpose(1, 2)
            for made in (self.q(given), self.k(given), self.v(given))
        )
        scores = (q @ k.transpose(-2, -1)) * self.size**-0.5
        seen = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.o(seen)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def _build(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(layers)))


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH)


def _enter_torch(layers: int, ranks: int) -> dict[str, int]:
    """In a rank: make torch's contestant. Returns how many collectives a step has."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,))
    model = _build(layers)
    columns, rows = ("q", "k", "v", "up"), ("o", "down")
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows}
    for block in model:
        parallelize_module(block, mesh, plan)
    x, y = _batch()
    update = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        nn.functional.mse_loss(model(x), y).backward()
        update.step()
        update.zero_grad()

    contestants["DTensor"] = step
    with CommDebugMode() as counted:
        step()
    return {str(op): count for op, count in counted.get_comm_counts().items()}


def _shared(layers: int, ranks: int, index: int = 0) -> nn.Sequential:
    return local_model(_build(layers), index, ranks, _batch()[0], FORMS)


def _program(layers: int, ranks: int) -> Program:
    return Plan(tp=ranks).compile(shape_of(_shared(layers, ranks)))


def _enter_minipar(layers: int, program: Program) -> None:
    """In a rank: make minipar's contestant."""
    comm, batch = communicator.create(), _batch()
    model = _shared(layers, comm.size, comm.rank)
    executor = Executor(program, comm, model, nn.functional.mse_loss, partial(torch.optim.SGD, lr=1e-4))
    contestants["minipar"] = partial(executor.run, lambda step: batch)


def measure(quick: bool = False) -> list[Row]:
    rows: list[Row] = []
    layers, rounds, warm_up = (2, 3, 1) if quick else (LAYERS, 15, 3)
    for ranks in (2,) if quick else (2, 4):
        program = _program(layers, ranks)
        with Cluster(ranks) as ours, Cluster(ranks, keep_freed_memory=False) as plain:
            ours.run(_enter_minipar, layers, program)
            counts = plain.run(_enter_torch, layers, ranks)[0]
            plain.run(as_torch_starts_them)
            found = in_turn({"DTensor": plain, "minipar": ours}, rounds, warm_up)
        own = sum(repartitions(ins) for ins in program.ranks[0])
        size = ROWS * LENGTH * WIDTH * 4 / 2**20
        note = (
            f"DTensor {found['DTensor'] * 1e3:.0f} ms; all-reduces of {size:.1f} MiB a step: "
            f"{own} beside {sum(counts.values())}"
        )
        text = f"tensor parallel, {ranks} ranks: time / DTensor"
        rows.append(Row(text, found["minipar"] / found["DTensor"], "", MUST, AIM, note))
        if not quick:
            with Cluster(ranks) as ours, Cluster(ranks) as like_ours:
                ours.run(_enter_minipar, layers, program)
                like_ours.run(_enter_torch, layers, ranks)
                found = in_turn({"DTensor": like_ours, "minipar": ours}, rounds, warm_up)
            text = f"tensor parallel, {ranks} ranks: time / DTensor in ranks like ours"
            note = f"DTensor {found['DTensor'] * 1e3:.0f} ms"
            rows.append(Row(text, found["minipar"] / found["DTensor"], note=note))
    return [*rows, _copies()]


def _copies() -> Row:
    """A step in which two micro-batches go in step, of one in which they follow each other."""
    model, text = partial(models.build, "gpt-tiny", layers=4), data.for_model("gpt-tiny")
    with Cluster(2, device=DEVICE) as cluster:
        one, two = (
            train(model, text, f"tp=2 microbatches=4 batch_copies={copies}", cluster=cluster, batch=32, steps=4,
                  progress=False)
            for copies in (1, 2)
        )  # fmt: skip
    note = (
        f"{two.predicted.time / one.predicted.time:.3f} predicted; "
        f"{one.trace.time * 1e3:.0f} and {two.trace.time * 1e3:.0f} ms measured"
    )
    return Row("tensor parallel, emulated: time with two copies / one", two.trace.time / one.trace.time, "", note=note)
