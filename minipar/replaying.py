"""A recorded order of parameter servers, replayed in plain torch: one process, no executor, no messages.

It reads nothing but the order: who was given the parameters of which version, and which gradients went into which
update. Everything that training gave must be what this gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar import randomness
from minipar.costs.profiled import split_rows
from minipar.execution import Job
from minipar.losses import counted
from minipar.reference import Reference
from minipar.strategies.consistency import Kind, Row
from minipar.strategies.served_order import completed
from minipar.tensors import count_rows, take_rows
from minipar.updating import scheduled


class Step(NamedTuple):
    """A step that a worker has done: its share of the mean loss, of how many rows, and gradients by parameter name (if
    kept); and of a step on real ranks when each instruction ran, sizes as in `Compute`, and bytes of input rows."""

    worker: int
    step: int
    loss: float
    rows: int
    of: int
    gradients: dict[str, Tensor]
    times: Sequence[tuple[float, float]] = ()
    sizes: Mapping[tuple[str, int, int], int] = MappingProxyType({})
    data: int = 0


def losses_of(taken: Sequence[Step], count: int) -> list[float]:
    """The mean loss of each step, over the rows of the workers that did it."""
    of_step: dict[int, list[Step]] = {}
    for one in taken:
        of_step.setdefault(one.step, []).append(one)
    return [mean_loss(of_step.get(s, ())) for s in range(count)]


def mean_loss(here: Sequence[Step]) -> float:
    """The mean loss of a step, over the rows of these workers."""
    rows, whole = sum(t.rows for t in here), sum(t.loss for t in here)
    return whole * (here[0].of / rows) if rows and rows != here[0].of else whole


class Replay(NamedTuple):
    """What plain torch makes of a recorded order."""

    reference: Reference
    parameters: dict[str, Tensor]


def replay(job: Job, order: list[Row], workers: int, steps: int, microbatches: int) -> Replay:
    """Plain torch in one process, reading only the order: every gradient at the parameters that its worker was given,
    every update of the gradients that it took. Losses per step, gradients in the order in which they arrived."""
    model = job.build()
    randomness.replace_dropout(model, job.seed)
    model.train()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    update = scheduled(job.optimizer, list(named), job.scheduler)(list(named.values()))
    done = completed(order)
    wanted = {id(answer) for answer in done.values()}
    there: dict[tuple[int, int], Step] = {}
    arrived: list[Step] = []
    taking: list[Step] = []
    for k, row in enumerate(order):
        if id(row) in wanted:
            there[row.worker, row.step] = _plain_step(job, model, named, row, workers, microbatches)
        elif k in done:
            arrived.append(there.pop((row.worker, row.step)))
            if row.kind is Kind.TAKE:
                taking.append(arrived[-1])
        elif row.kind is Kind.APPLY:
            rows, of = sum(t.rows for t in taking), taking[0].of
            for name, p in named.items():
                p.grad = _sum([t.gradients[name] for t in taking])
                if 0 < rows != of:
                    p.grad *= of / rows
            update.step()
            taking = []
    reference = Reference(losses_of(arrived, steps), [t.gradients for t in arrived])
    return Replay(reference, {name: p.detach().clone() for name, p in named.items()})


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _plain_step(job: Job, model: nn.Module, named: dict[str, nn.Parameter], row: Row, workers: int, parts: int) -> Step:
    x, y = job.batches(row.step)
    rows_of = split_rows(count_rows(x), workers * parts)[row.worker * parts : (row.worker + 1) * parts]
    mine = range(rows_of[0].start, rows_of[-1].stop)  # (how they were cut into micro-batches changes nothing)
    weight, target = counted(y, job.loss), take_rows(y, mine)
    rows = counted(target, job.loss)
    if not rows:
        return Step(row.worker, row.step, 0.0, 0, weight, {name: torch.zeros_like(p) for name, p in named.items()})
    randomness.at(randomness.row_dropouts(model), row.step, mine.start)
    value = job.loss(model(take_rows(x, mine)), target) * (rows / weight)
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)
    }
    return Step(row.worker, row.step, value.item(), rows, weight, gradients)
