"""What flows between the slices of a sequence on one rank: carries forward, their gradients back.

F mb1   carry(l, 0) --as a leaf of the graph--> layer l --> carry(l, 1)     kept: the leaf, and the graph's edges
B mb1   grad_carry(l, 1) --into these edges, with the output's gradient--> the leaf's gradient is grad_carry(l, 0)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minipar.execution import sliced
from minipar.execution.layer_calls import Call, LayerCall, Made, Sizes
from minipar.models.nodes import SlicedNode
from minipar.models.tensors import detach, differentiable, tensors
from minipar.program import Instruction, Op, Program, Value, carry, grad_carry


class _Flow(NamedTuple):
    """For one layer and slice: the carry that it was given, and the edges at which its own carry's gradient enters."""

    given: Any
    edges: list[tuple[int, Any]]


class SequenceState:
    """The slices of sequences on a rank, and what its layers carry from each one to the next.

    count   slices of a sequence; of a program that cuts none it is 1, and a micro-batch is its own only slice
    """

    def __init__(self, program: Program) -> None:
        self.slices, self.count, self.carries = program.slices, program.slice_count, frozenset(program.carries)
        self.first = program.first_trainable
        self.starts: dict[tuple[int, int], int] = {}  # the first token of a slice
        self.flows: dict[tuple[int, int, int], _Flow] = {}

    def cut(self, value: Any, ins: Instruction) -> Any:
        """The tokens that an instruction works on, of inputs or targets of a micro-batch."""
        return value if self.count == 1 else sliced.cut(value, self.slices, ins.microbatch % self.count)

    def share(self, y: Any, ins: Instruction) -> float:
        """The part of a row's tokens that an instruction works on."""
        return 1.0 if self.count == 1 else sliced.share(y, self.slices, ins.microbatch % self.count)

    def start(self, ins: Instruction, value: Any, layer: nn.Module) -> int:
        """The first token of a slice whose input is `value`; the next slice begins where it ends. A layer that ranks
        share knows where: of the values between its nodes not all have tokens in dimension 1."""
        if self.count == 1:
            return 0
        if isinstance(layer, SlicedNode):
            return layer.starts[ins.microbatch % self.count]
        start = self.starts.get((ins.microbatch, ins.step), 0) if ins.microbatch % self.count else 0
        self.starts[ins.microbatch + 1, ins.step] = start + sliced.tokens_in(value)
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
        """After the backward of a piece: write the gradients of the carries that it was given."""
        for layer in self.carries.intersection(piece):
            flow = self.flows.pop((layer, ins.microbatch, ins.step))
            if ins.microbatch % self.count:
                leaves = differentiable(flow.given)
                found = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
                live[grad_carry(layer, ins.microbatch - 1, ins.step)] = found


def on_slices(state: SequenceState, layer: int, module: nn.Module, sizes: Sizes) -> LayerCall:
    """The call of a layer on a slice: it takes what the slice before carried on, and carries on to the next one."""
    carries = layer in state.carries

    def run(x: Any, call: Call) -> Made:
        ins, live = call.ins, call.live
        i, step, given = ins.microbatch, ins.step, None
        if carries and i % state.count:
            before = live[carry(layer, i - 1, step)]
            given = detach(before, requires_grad=torch.is_grad_enabled() and layer >= state.first)
        output, after = module(x, call.start, given)
        more = carries and (i + 1) % state.count > 0
        if carries and torch.is_grad_enabled():
            ends = differentiable(after) if more else []
            edges = [(k, get_gradient_edge(t)) for k, t in enumerate(ends) if t.requires_grad]
            state.flows[layer, i, step] = _Flow(given, edges)
        handed_on = after if more and ins.op is Op.FORWARD else None
        if more and ins.op is Op.FORWARD:
            live[carry(layer, i, step)] = detach(handed_on)
        if ("carry", layer, call.rows) not in sizes:
            known = [*tensors(x), *module.parameters(), *module.buffers()]
            size, gradient = sliced.carry_sizes(handed_on, known)
            sizes["carry", layer, call.rows], sizes["grad_carry", layer, call.rows] = size, gradient
        return output, None

    return run


def carried(layer: int, call: Call) -> list[Any]:
    """What a layer was given of the slice before, and what it carried on to the next one."""
    i, step = call.ins.microbatch, call.ins.step
    return [call.live.get(carry(layer, k, step)) for k in (i - 1, i)]
