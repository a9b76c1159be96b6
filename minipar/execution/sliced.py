"""Slices of sequences on a rank: how they are cut, how a layer runs on one (see `models/sliced.py`), and what flows
between them, carries forward and their gradients back.

F mb1   carry(l, 0) --as a leaf of the graph--> layer l --> carry(l, 1)     kept: the leaf, and the graph's edges
B mb1   grad_carry(l, 1) --into these edges, with the output's gradient--> the leaf's gradient is grad_carry(l, 0)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minipar.costs.slicing import token_ranges
from minipar.errors import PlanError
from minipar.execution.layer_calls import Call, LayerCall, Result, Sizes
from minipar.models.nodes import SlicedNode
from minipar.models.tensors import count_bytes, detach, differentiable, storages, take_tokens, tensors
from minipar.program import Instruction, Op, Program, Value, carry, grad_carry
from minipar.strategies.keys import check_causal

if TYPE_CHECKING:
    from minipar.program.shape import Shape
    from minipar.strategies.plan import Plan


def count_tokens(values: Iterable[Any]) -> int:
    """How many tokens a row has: the size of dimension 1, which is the same in all tensors inside these values."""
    shapes = [tuple(t.shape) for value in values for t in tensors(value)]
    counts = {shape[1] for shape in shapes if len(shape) > 1}
    if len(counts) != 1 or any(len(shape) < 2 for shape in shapes):
        words = ", ".join(map(str, shapes))
        raise PlanError(
            f"tensors of shapes {words} cannot be cut into slices of tokens; possible are inputs and targets of "
            "(rows, tokens, ...) with the same number of tokens, or a schedule such as 1f1b, which cuts rows only"
        )
    return counts.pop()


def ranges_of(plan: Plan, shape: Shape, values: Iterable[Any]) -> list[range]:
    """The tokens of a plan's slices in these inputs and targets. Errors: PlanError if it cannot cut them."""
    check_causal(plan, shape)
    return token_ranges(plan.cut, count_tokens(values))


class Alone:
    """A layer as a function of its input, to be measured by itself: on whole sequences, or (`start`) on a slice of
    them, with what the slice before has carried on. `handed_on`: what it carries on itself, if there is `more`."""

    def __init__(self, layer: nn.Module, start: int | None, before: Any, more: bool, trains: bool) -> None:
        self.layer, self.start, self.before, self.more, self.trains = layer, start, before, more, trains
        self.given: Any = None
        self.handed_on: Any = None

    def __call__(self, x: Any) -> Any:
        if self.start is None:
            return self.layer(x)
        self.given = detach(self.before, self.trains)
        output, after = self.layer(x, self.start, self.given)
        self.handed_on = after if self.more else None
        return output


def carry_sizes(handed_on: Any, known: Any) -> tuple[int, int]:
    """Bytes of the tensors that a layer gives to the next slice, by storage, without `known`; and of the gradients."""
    before = storages(tensors(known)).keys()
    size = sum(n for key, n in storages(tensors(handed_on)).items() if key not in before)
    return size, count_bytes(differentiable(handed_on))


# while a program runs -------------------------------------------------------------------------------------------------


class _Flow(NamedTuple):
    """For one layer and slice: the carry that it was given, and the edges at which its own carry's gradient enters."""

    given: Any
    edges: list[tuple[int, Any]]


class SequenceState:
    """The slices of sequences on a rank, `count` of each, and what its layers carry from each one to the next."""

    def __init__(self, program: Program) -> None:
        self.slices, self.count, self.carries = program.slices, program.slice_count, frozenset(program.carries)
        self.first = program.first_trainable
        self.starts: dict[tuple[int, int], int] = {}  # the first token of a slice
        self.flows: dict[tuple[int, int, int], _Flow] = {}

    def cut(self, value: Any, ins: Instruction) -> Any:
        """The tokens that an instruction works on, of inputs or targets of a micro-batch: of every tensor (rows,
        tokens, ...). PlanError if it has none."""
        return take_tokens(value, self._tokens(value, ins)[0])

    def share(self, y: Any, ins: Instruction) -> float:
        """The part of a row's tokens that an instruction works on."""
        mine, count = self._tokens(y, ins)
        return len(mine) / count

    def _tokens(self, value: Any, ins: Instruction) -> tuple[range, int]:
        """The tokens of an instruction's slice, and how many a row has."""
        count = count_tokens([value])
        return token_ranges(self.slices, count)[ins.microbatch % self.count], count

    def start(self, ins: Instruction, value: Any, layer: nn.Module) -> int:
        """The first token of a slice whose input is `value`; the next slice begins where it ends. A layer that ranks
        share knows where: of the values between its nodes not all have tokens in dimension 1."""
        if isinstance(layer, SlicedNode):
            return layer.starts[ins.microbatch % self.count]
        start = self.starts.get((ins.microbatch, ins.step), 0) if ins.microbatch % self.count else 0
        self.starts[ins.microbatch + 1, ins.step] = start + tensors(value)[0].shape[1]
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

    def run(x: Any, call: Call) -> Result:
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
            size, gradient = carry_sizes(handed_on, known)
            sizes["carry", layer, call.rows], sizes["grad_carry", layer, call.rows] = size, gradient
        return output, None

    return run


def carried(layer: int, call: Call) -> list[Any]:
    """What a layer was given of the slice before, and what it carried on to the next one."""
    i, step = call.ins.microbatch, call.ins.step
    return [call.live.get(carry(layer, k, step)) for k in (i - 1, i)]
