"""Chains, schedules of them, and costs by layer, for the tests of recomputation."""

from __future__ import annotations

from hypothesis import strategies as st

from minipar import Forward, Program
from minipar.costs.recomputation import Chain, Move
from minipar.program import Backward, Instruction, Op, Value
from minipar.strategies.layout import Layout
from minipar.strategies.passes.checkpoint import recompute
from minipar.strategies.passes.layers import expand, state_of, step_of
from tests.interpreters import shape


class ByLayer:
    """Costs of a program from tables by layer (a Chain or LayerCosts): messages and state are free."""

    def __init__(self, tables) -> None:
        self.tables = tables
        self.sizes = {"output": tables.output, "saved": tables.saved, "grad_output": tables.gradient}

    def compute(self, rank: int, ins: Instruction) -> float:
        if ins.op is Op.STEP:
            return 0.0
        times = self.tables.backward if ins.op is Op.BACKWARD else self.tables.forward
        return sum(times[layer] for layer in ins.layers)

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        return 0.0, 0.0

    def collective(self, ins: Instruction) -> float:
        return 0.0

    def size(self, rank: int, value: Value) -> float:
        return self.sizes[value.kind][value.index] if value.kind in self.sizes else 0


def single_device(layers: int, schedule: tuple[Move, ...], microbatches: int = 1) -> Program:
    """One device that runs its micro-batches by a schedule, one instruction a layer."""
    model = shape(layers)
    layout = Layout(model, 1, 1, (layers,), microbatches)
    actions = [action for i in range(microbatches) for action in (Forward(i), Backward(i))]
    (row,) = expand([actions], layout)
    row = recompute(row, [(layout.trained(0), schedule)]) + step_of(layout, 0, 0)
    return Program((tuple(row),), layers, microbatches, model.groups, state=(state_of(layout, 0),), name="by hand")


def words(schedule: tuple[Move, ...]) -> str:
    """`F0 F1* B1 ...`, a star where a move saves."""
    return " ".join(f"{m.op.value}{m.layer}{'*' * m.saves}" for m in schedule)


@st.composite
def chains(draw: st.DrawFn, layers: int, ends: bool | None = None, given: int | None = None) -> Chain:
    """Chains with small whole costs."""
    times, sizes = st.integers(1, 5), st.integers(0, 4)
    tables = [tuple(draw(st.lists(x, min_size=layers, max_size=layers))) for x in (times, times, sizes, sizes, sizes)]
    handed_on = draw(sizes) if given is None else given
    return Chain(*tables, handed_on, draw(st.booleans()) if ends is None else ends)


@st.composite
def drafts(draw: st.DrawFn, layers: int) -> list[tuple[Op, int, bool]]:
    """Any order that is right: every backward has what it needs, a layer that is saved does not run again before."""
    flags = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    draft = [(Op.FORWARD, layer, saves) for layer, saves in enumerate(flags)]
    there = {layer for layer, saves in enumerate(flags) if saves}
    for layer in reversed(range(layers)):
        if layer not in there:
            lowest = max(there, default=-1) + 1
            start = draw(st.integers(min(lowest, layer), layer))
            for inner in range(start, layer + 1):
                saves = inner == layer or draw(st.booleans())
                draft.append((Op.RECOMPUTE, inner, saves))
                there |= {inner} if saves else set()
        draft.append((Op.BACKWARD, layer, False))
        there.discard(layer)
    return draft
