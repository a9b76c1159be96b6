"""Slices: the values that go from slice to slice of a sequence. TeraPipe takes slices as micro-batches
(`schedules/terapipe.py`).

    carry(l, 0) -> F1 -> carry(l, 1) -> F2 ...      grad_carry(l, 0) <- B1 <- grad_carry(l, 1) <- B2 ...

    FORWARD     reads carry(l, i-1), writes carry(l, i)      (the first slice reads none, the last one writes none)
    RECOMPUTE   reads carry(l, i-1)
    BACKWARD    reads both, and grad_carry(l, i); frees carry(l, i) and grad_carry(l, i); writes grad_carry(l, i-1)

If a layer has no backward, the next FORWARD frees its carry.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.errors import PlanError
from minipar.program import Instruction, Op, Value, carry, grad_carry
from minipar.strategies.draft import Draft

_OPS = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


def add_carries(draft: Draft) -> Draft:
    """What a layer keeps of a sequence goes from slice to slice, and its gradient goes back."""
    layout, slices = draft.layout, draft.plan.slice_count
    carrying, first = frozenset(layout.shape.carries), layout.first_trainable

    def rewrite(rank: int, row: Sequence[Instruction]) -> list[Instruction]:
        return [
            _carried(ins, slices, ins.layers[0] >= first)
            if ins.op in _OPS and carrying.intersection(ins.layers)
            else ins
            for ins in row
        ]

    return draft.each(rewrite)


def _carried(ins: Instruction, slices: int, trains: bool) -> Instruction:
    (layer,), i, step = ins.layers, ins.microbatch, ins.step
    before: tuple[Value, ...] = (carry(layer, i - 1, step),) if i % slices else ()
    after: tuple[Value, ...] = (carry(layer, i, step),) if (i + 1) % slices else ()
    if ins.op is Op.FORWARD:
        frees = () if trains else before
        return ins._replace(reads=ins.reads + before, writes=ins.writes + after, frees=ins.frees + frees)
    if ins.op is Op.RECOMPUTE:
        return ins._replace(reads=ins.reads + before)
    if ins.op is not Op.BACKWARD:
        raise PlanError("slices: a backward of a slice is not split; possible is Backward(i)")
    mine = (*after, grad_carry(layer, i, step)) if after else ()
    built: tuple[Value, ...] = (grad_carry(layer, i - 1, step),) if before else ()
    return ins._replace(reads=ins.reads + before + mine, writes=ins.writes + built, frees=ins.frees + mine)
