"""What flows between the slices of a sequence on one rank: carries forward, their gradients back.

F mb1   carry(l, 0) --as a leaf of the graph--> layer l --> carry(l, 1)     kept: the leaf, and the graph's edges
B mb1   grad_carry(l, 1) --into these edges, with the output's gradient--> the leaf's gradient is grad_carry(l, 0)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minipar.execution.sliced import carry_sizes, tokens_in
from minipar.models.tensors import detach, differentiable
from minipar.program import Instruction, Op, Program, Value, carry, grad_carry


class _Flow(NamedTuple):
    """Of one layer and slice: what it was given of the slice before, and where the gradient of what it gave enters."""

    given: Any
    edges: list[tuple[int, Any]]


class Carrying:
    """The carries of the layers that a rank holds, between the forward and the backward of each slice."""

    def __init__(self, program: Program) -> None:
        self.count, self.carries = program.slice_count, frozenset(program.carries)
        self.first = program.first_trainable
        self.starts: dict[tuple[int, int], int] = {}  # the first token of a slice
        self.flows: dict[tuple[int, int, int], _Flow] = {}

    def start(self, ins: Instruction, value: Any) -> int:
        """The first token of a slice whose input is `value`; the next slice begins where it ends."""
        start = self.starts.get((ins.microbatch, ins.step), 0) if ins.microbatch % self.count else 0
        self.starts[ins.microbatch + 1, ins.step] = start + tokens_in(value)
        return start

    def arriving(
        self, piece: tuple[int, ...], ins: Instruction, live: dict[Value, Any], ends: list[Any], grads: list[Any]
    ) -> None:
        """Add to `ends` where the gradients of carries enter the graph of a piece, and these gradients to `grads`."""
        for layer in self.carries.intersection(piece):
            flow = self.flows[layer, ins.microbatch, ins.step]
            for k, edge in flow.edges:
                ends.append(edge)
                grads.append(live[grad_carry(layer, ins.microbatch, ins.step)][k])

    def hand_back(self, piece: tuple[int, ...], ins: Instruction, live: dict[Value, Any]) -> None:
        """The backward of a piece is done: the gradients of what it was given of the slice before."""
        for layer in self.carries.intersection(piece):
            flow = self.flows.pop((layer, ins.microbatch, ins.step))
            if ins.microbatch % self.count:
                leaves = differentiable(flow.given)
                found = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
                live[grad_carry(layer, ins.microbatch - 1, ins.step)] = found


class Run:
    """A layer on one slice, as a function of its input: takes what the slice before carried on, and carries on."""

    def __init__(
        self, carrying: Carrying, layer: int, module: nn.Module, ins: Instruction, start: int, live: dict[Value, Any]
    ) -> None:
        self.carrying, self.layer, self.module, self.ins, self.start, self.live = (
            carrying, layer, module, ins, start, live
        )  # fmt: skip
        self.given: Any = None
        self.handed_on: Any = None
        if layer in carrying.carries and ins.microbatch % carrying.count:
            before = live[carry(layer, ins.microbatch - 1, ins.step)]
            self.given = detach(before, requires_grad=torch.is_grad_enabled() and layer >= carrying.first)

    def __call__(self, x: Any) -> Any:
        carrying, i, step = self.carrying, self.ins.microbatch, self.ins.step
        result, after = self.module(x, self.start, self.given)
        if self.layer in carrying.carries:
            more = (i + 1) % carrying.count > 0
            ends = differentiable(after) if more else []
            if torch.is_grad_enabled():
                edges = [(k, get_gradient_edge(t)) for k, t in enumerate(ends) if t.requires_grad]
                carrying.flows[self.layer, i, step] = _Flow(self.given, edges)
            if more and self.ins.op is Op.FORWARD:
                self.handed_on = after
                self.live[carry(self.layer, i, step)] = detach(after)
        return result

    @property
    def beside(self) -> Any:
        """What it was given of the slice before, and carries on to the next one."""
        return self.given, self.handed_on

    def sizes(self, known: Any) -> tuple[int, int]:
        """Bytes of the carry and of its gradient; tensors that are `known` are counted elsewhere."""
        return carry_sizes(self.handed_on, known)
