"""Pipelines beside torch.distributed.pipelining: 16 x (Linear 512 + GELU), 8 micro-batches of 8 rows, 4 ranks;
then of 128 rows.

torch runs twice: in processes as torch starts them, and in minipar's ranks, which are scheduled as batch jobs and
whose C library keeps freed memory (both make a step faster). The targets are for the first; the second compares the
executors alone. All of them are started several times over, and the medians are those of all rounds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.harness import Row, as_torch_starts_them, contestants, in_turn, times_in_turn
from minipar import Cluster, Plan
from minipar.comm import communicator
from minipar.execution.executor import Executor
from minipar.execution.split_backward import input_half, weight_half
from minipar.models.parameter_groups import shape_of
from minipar.program.shape import uniform

RANKS, LAYERS, WIDTH, MICROBATCHES, ROWS = 4, 16, 512, 8, 8
LARGER = 128  # rows of a micro-batch
MUST = {"gpipe": 0.75, "1f1b": 0.85, "interleaved": 0.85, "zb-v": 0.85}
TORCHS = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}  # fmt: skip
AIM = 0.7


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def _rows(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(MICROBATCHES * rows, WIDTH), torch.randn(MICROBATCHES * rows, WIDTH)


def _enter_torch(rows: int) -> None:
    """In a rank: make torch's pipelines ready to run."""
    rank = communicator.create().rank
    dist.init_process_group("gloo")
    x, y = _rows(rows)
    for name, schedule_class in TORCHS.items():
        held = Plan(pp=RANKS, schedule=name, microbatches=MICROBATCHES).layout(uniform(LAYERS))
        count = len(held.split)
        layers = list(_build())
        modules = [nn.Sequential(*(layers[k] for k in held.layers(stage))) for stage in held.placement[rank]]
        # (a stage infers its shapes in its first step)
        stages = [
            PipelineStage(module, stage, count, torch.device("cpu"))
            for module, stage in zip(modules, held.placement[rank], strict=True)
        ]
        several = stages if count > RANKS else stages[0]
        schedule = schedule_class(several, n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
        ends = count - 1 in held.placement[rank]
        module = nn.Sequential(*modules)
        update = torch.optim.SGD(module.parameters(), lr=0.01)

        def step(schedule: Any = schedule, update: torch.optim.Optimizer = update, ends: bool = ends) -> None:
            update.zero_grad()
            schedule.step(*([x] if rank == 0 else []), **({"target": y} if ends else {}))
            update.step()

        contestants[f"torch {name}"] = step


def _enter_minipar(rows: int) -> None:
    """In a rank: make minipar's pipelines ready to run."""
    comm = communicator.create()
    batch = _rows(rows)
    for name in MUST:
        model = _build()
        program = Plan(pp=RANKS, schedule=name, microbatches=MICROBATCHES).compile(shape_of(list(model)))
        update = partial(torch.optim.SGD, lr=0.01)
        executor = Executor(program, comm, model, nn.functional.mse_loss, update)
        contestants[name] = partial(_run, executor, batch)

    share = LAYERS // RANKS
    module = nn.Sequential(*list(_build())[:share])
    update_alone = torch.optim.SGD(module.parameters(), lr=0.01)
    gradient = torch.randn(rows, WIDTH)

    def compute_alone() -> None:
        for x in batch[0].split(rows):
            module(x.detach().requires_grad_()).backward(gradient)
        update_alone.step()
        update_alone.zero_grad()

    contestants["compute alone"] = compute_alone


def _run(executor: Executor, batch: Any) -> None:
    """In a rank: a step."""
    executor.run(lambda step: batch)


def _halves(rounds: int) -> tuple[float, float]:
    """In a rank: seconds of the whole backward of one stage for one micro-batch, and of its two halves together."""
    module = nn.Sequential(*list(_build())[: LAYERS // RANKS])
    parameters = list(module.parameters())
    gradient = torch.randn(ROWS, WIDTH)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for split, found in enumerate(times):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            edges = [get_gradient_edge(module(x))]
            start = time.perf_counter()
            if split:
                weight_half(input_half(edges, [gradient], [x], parameters)[1])
            else:
                torch.autograd.backward(edges, [gradient])
            found.append(time.perf_counter() - start)
    return median(times[0]), median(times[1])


def measure(quick: bool = False) -> list[Row]:
    starts, rounds = (2, 10) if quick else (4, 20)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(starts):
        for name, found in _started(rounds).items():
            times[name] += found
    seconds = {name: median(found) for name, found in times.items()}
    rows = []
    for name, must in MUST.items():
        for kind in ("", " in ranks like ours"):
            mine, torchs = seconds[name + kind], seconds[f"torch {name}{kind}"]
            targets = (must, AIM) if not kind else (None, None)
            text = f"{name}, {RANKS} ranks, {MICROBATCHES} x {ROWS} rows: time / torch{kind}"
            rows.append(
                Row(text, mine / torchs, "", targets[0], targets[1], f"{mine * 1e3:.0f} and {torchs * 1e3:.0f} ms")
            )
        alone = seconds[f"{name} alone"]
        text = f"  {name}'s layers alone on {RANKS} ranks, no pipeline at all: time / torch"
        rows.append(Row(text, alone / seconds[f"torch {name}"], "", note=f"{alone * 1e3:.0f} ms: no executor is below"))
    whole, halves = median(times["whole"]), median(times["halves"])
    note = f"{whole * 1e3:.2f} and {halves * 1e3:.2f} ms; 4 layers, 8 rows"
    rows.append(Row("backward in halves / whole backward, all ranks busy", halves / whole, "", note=note))
    return rows + _larger(quick)


def _started(rounds: int) -> dict[str, list[float]]:
    """Seconds of every contestant in newly started ranks. The memory that ranks happen to get changes their times by
    some percent for as long as they live, so one start is not enough."""
    times: dict[str, list[float]] = {}
    with Cluster(RANKS) as ours, Cluster(RANKS, keep_freed_memory=False) as plain, Cluster(RANKS) as like_ours:
        ours.run(_enter_minipar, ROWS)
        for cluster in (plain, like_ours):
            cluster.run(_enter_torch, ROWS)
        plain.run(as_torch_starts_them)
        for name in MUST:  # one schedule at a time
            first = times_in_turn({name: ours, f"torch {name}": plain, "compute alone": ours}, rounds)
            times[f"{name} alone"] = first.pop("compute alone")
            second = times_in_turn({name: ours, f"torch {name}": like_ours}, rounds)
            times |= first | {f"{key} in ranks like ours": found for key, found in second.items()}
        (whole, halves), *_ = ours.run(_halves, 4 * rounds)
    return times | {"whole": [whole], "halves": [halves]}


def _larger(quick: bool) -> list[Row]:
    """Rows for larger micro-batches, whose time depends on the layers more than on the executor."""
    rows = []
    with Cluster(RANKS) as ours, Cluster(RANKS, keep_freed_memory=False) as plain:
        ours.run(_enter_minipar, LARGER)
        plain.run(_enter_torch, LARGER)
        plain.run(as_torch_starts_them)
        for name in MUST:
            found = in_turn({name: ours, f"torch {name}": plain}, 5 if quick else 15)
            mine, torchs = found[name], found[f"torch {name}"]
            text = f"{name}, {RANKS} ranks, {MICROBATCHES} x {LARGER} rows: time / torch"
            rows.append(Row(text, mine / torchs, "", 1.05, note=f"{mine * 1e3:.0f} and {torchs * 1e3:.0f} ms"))
    return rows
