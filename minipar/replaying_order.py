"""A recorded order of an asynchronous pipeline, replayed in plain torch: one process, no executor, no messages.

It reads nothing but the order (`recorded_order.Order`): which rank did the forward or backward of which micro-batch
with which version of its parameters, and when it updated. Every version is a copy, every forward has leaves of its
own. Losses, gradients and parameters must be those of the run, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar import randomness
from minipar.cluster import worker
from minipar.costs.profiled import split_rows
from minipar.errors import ProgramError
from minipar.execution import Job
from minipar.losses import counted
from minipar.recorded_order import BACKWARD, FORWARD, Entry, Order
from minipar.reference import Reference
from minipar.saving.contents import outline_of
from minipar.saving.keeping import Storing
from minipar.tensors import count_rows, detach, differentiable, layers_of, map_tensors, take_rows
from minipar.updating import Update, forms_of, whole_piece

Versions = dict[int, dict[str, Tensor]]  # version -> parameters by name


class Replay(NamedTuple):
    """What plain torch makes of a recorded order: losses and gradients (of each update), and the last parameters."""

    reference: Reference
    parameters: dict[str, Tensor]


def replay(
    job: Job,
    order: Order,
    *,
    first: int = 0,
    keep_gradients: bool = True,
    begin: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
    report: Callable[[int], None] = lambda step: None,
    saved: dict[str, Any] | None = None,
) -> Replay:
    """Train by an order.

    first   the first step, after what `begin(model, optimizer)` put into both
    saved   the state of the scheduler then
    Raises ProgramError for an order that cannot be: it uses what is not there.
    """
    model = job.build()
    randomness.replace_dropout(model, job.seed)
    model.train()
    run = _Run(job, order, model, first, saved)
    for rank in run.ranks:
        if rank.update is not None:
            begin(model, rank.update)
            rank.versions[0] = _copies(rank.named)
    moved = True
    while moved:
        moved = False
        for r, rank in enumerate(run.ranks):
            while rank.at < len(order.ranks[r]) and run.ready(r, order.ranks[r][rank.at]):
                entry = order.ranks[r][rank.at]
                run.do(r, entry)
                rank.at += 1
                moved = True
                if r == 0 and entry.what == FORWARD and (entry.microbatch + 1) % order.microbatches == 0:
                    report(entry.microbatch // order.microbatches)
    for r, rank in enumerate(run.ranks):
        if rank.at < len(order.ranks[r]):
            raise ProgramError(f"the order cannot be: rank {r} waits for ever before {order.ranks[r][rank.at]}")
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Replay(Reference(run.losses, run.gradients if keep_gradients else []), parameters)


def _copies(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named.items()}


class _Rank:
    """What one rank has: its layers, the parameters that it trains by name, versions of them, and sums of gradients."""

    def __init__(self, whole: Update, layers: list[nn.Module], names: dict[int, str], delay: int) -> None:
        self.layers = nn.Sequential(*layers)
        self.named = {names[id(p)]: p for p in self.layers.parameters() if p.requires_grad}
        self.own = {name: names[id(p)] for name, p in self.layers.named_parameters(remove_duplicate=False)
                    if p.requires_grad}  # fmt: skip
        self.part = whole.part([whole_piece(*pair) for pair in self.named.items()], delay)
        self.update = self.part.optimizer if self.part.which else None
        self.versions: Versions = {0: _copies(self.named)}
        self.sums: dict[str, Tensor] = {}
        self.at = 0


class _Run:
    def __init__(self, job: Job, order: Order, model: nn.Module, first: int, saved: dict[str, Any] | None) -> None:
        self.job, self.order, self.first = job, order, first
        names = {id(p): name for name, p in model.named_parameters()}
        layers = layers_of(model)
        self.whole = Update(job.optimizer, forms_of(model), job.scheduler)
        if self.whole.schedule is not None:
            self.whole.schedule.load(saved)
        self.ranks = [
            _Rank(self.whole, [layers[k] for k in held], names, delay)
            for held, delay in zip(order.layers, order.delays, strict=True)
        ]
        self.outputs: dict[tuple[int, int], Any] = {}  # rank, micro-batch: what it gets
        self.arrived: dict[tuple[int, int], list[Tensor | None]] = {}  # gradients, the same
        self.graphs: dict[tuple[int, int], tuple[Any, list[Tensor], dict[str, Tensor]]] = {}
        count = 1 + max((e.microbatch for row in order.ranks for e in row), default=-1)
        self.losses = [0.0] * (count // order.microbatches if order.every is None else count)
        self.gradients: list[dict[str, Tensor]] = []
        self.last = [{e.version: k for k, e in enumerate(row)} for row in order.ranks]  # when a version is used last

    def ready(self, r: int, entry: Entry) -> bool:
        if entry.what == FORWARD:
            return r == 0 or (r, entry.microbatch) in self.outputs
        if entry.what == BACKWARD:
            there = (r, entry.microbatch) in self.graphs
            return there and (r == len(self.ranks) - 1 or (r, entry.microbatch) in self.arrived)
        return True

    def do(self, r: int, entry: Entry) -> None:
        rank = self.ranks[r]
        if entry.what == FORWARD:
            self.forward(r, entry)
        elif entry.what == BACKWARD:
            self.backward(r, entry)
        else:
            self.step(r, entry.version)
        newest = max(rank.versions)
        for version in [v for v in rank.versions if v != newest and self.last[r].get(v, -1) <= rank.at]:
            del rank.versions[version]

    def version(self, r: int, entry: Entry) -> dict[str, Tensor]:
        if entry.version not in self.ranks[r].versions:
            raise ProgramError(f"the order cannot be: rank {r} has no version {entry.version} for {entry}")
        return self.ranks[r].versions[entry.version]

    def rows(self, i: int) -> tuple[Any, Any, range, float]:
        """x, y and rows of a micro-batch, and what its own mean counts for."""
        m, every = self.order.microbatches, self.order.every
        x, y = self.job.batches(self.first + i // m)
        rows = split_rows(count_rows(x), m)[i % m]
        target = take_rows(y, rows)
        mine = counted(target, self.job.loss)
        share = (mine / counted(y, self.job.loss) if every is None else 1 / every) if mine else 0.0
        return take_rows(x, rows), target, rows, share

    def forward(self, r: int, entry: Entry) -> None:
        i, rank = entry.microbatch, self.ranks[r]
        x, y, rows, share = self.rows(i)
        leaves = {name: t.clone().requires_grad_() for name, t in self.version(r, entry).items()}
        given = detach(x if r == 0 else self.outputs.pop((r, i)), requires_grad=r > 0)
        value = map_tensors(given, torch.clone)  # (a layer may work in place)
        if not rows:
            ends: list[Tensor] = []
        else:
            randomness.at(randomness.row_dropouts(rank.layers), self.first + i // self.order.microbatches, rows.start)
            own = {name: leaves[names] for name, names in rank.own.items()}
            value = torch.func.functional_call(rank.layers, own, (value,))
            ends = differentiable(value)
            if r == len(self.ranks) - 1:
                ends = [self.job.loss(value, y) * share if share else torch.stack([t.sum() for t in ends]).sum() * 0]
                k = i if self.order.every is not None else i // self.order.microbatches
                self.losses[k] += ends[0].item() * (self.order.every or 1)
        self.graphs[r, i] = given, ends, leaves
        self.outputs[r + 1, i] = value

    def backward(self, r: int, entry: Entry) -> None:
        i, rank = entry.microbatch, self.ranks[r]
        given, ends, leaves = self.graphs.pop((r, i))
        for name, leaf in leaves.items():  # the weights as the backward finds them, if no version was kept
            leaf.data.copy_(self.version(r, entry)[name])
        wanted = differentiable(given) if r else []
        arrived = self.arrived.pop((r, i), [None] * len(ends))
        # (a micro-batch without rows has no graph)
        pairs = [(end, g) for end, g in zip(ends, arrived, strict=True) if end.requires_grad] if ends else []
        sources = [*(t for t in wanted if t.requires_grad), *leaves.values()]
        found: list[Tensor | None] = [None] * len(sources)
        if pairs and sources:
            starts, gradients = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(starts, sources, gradients, allow_unused=True))
        if r:
            self.arrived[r - 1, i] = [torch.zeros_like(t) if g is None else g
                                      for t, g in zip(wanted, found, strict=False)]  # fmt: skip
        for name, g in zip(leaves, found[len(wanted) :], strict=True):
            if g is not None:
                rank.sums[name] = rank.sums[name] + g if name in rank.sums else g

    def step(self, r: int, version: int) -> None:
        rank = self.ranks[r]
        while len(self.gradients) < version:
            self.gradients.append({})
        for name, p in rank.named.items():
            p.grad = rank.sums.get(name)
            self.gradients[version - 1][name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if rank.update is not None:
            if self.whole.schedule is not None:
                rank.part.follow(self.whole.schedule.at(version - 1))
            rank.update.step()
        rank.sums = {}
        rank.versions[version] = _copies(rank.named)


def run_order(job: Job, order: Order, keep_gradients: bool, storing: Storing) -> Reference | None:
    """In the ranks, of which only the first works: `replay`, after what a saved run gives."""
    if worker.context().rank:
        return None
    begin = partial(storing.begin_plainly, outline_of(job.build()))
    saved = None if storing.saved is None else storing.saved.header.schedule
    found = replay(
        job, order, first=storing.first, keep_gradients=keep_gradients, begin=begin, report=worker.report, saved=saved
    )
    return found.reference
