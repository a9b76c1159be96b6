"""TeraPipe: micro-batches are slices of the tokens of a sequence, which a causal model can take one after another.

Source: Li et al., "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models", 2021.

    p=3, slices=4, backward twice as long as forward                      a token sees itself and those before it:
    rank 0  F0 F1 F2 F3                   B3 B3 B2 B2 B1 B1 B0 B0                 keys of slice  0 1 2 3
    rank 1     F0 F1 F2 F3          B3 B3 B2 B2 B1 B1 B0 B0                       slice 0        x
    rank 2        F0 F1 F2 F3 B3 B3 B2 B2 B1 B1 B0 B0                             slice 1        x x
                                                                                  slice 2        x x x
    carry(l, 0) -> F1 -> carry(l, 1) -> F2 -> carry(l, 2) -> F3                   slice 3        x x x x
    grad_carry(l, 0) <- B1 <- grad_carry(l, 1) <- B2 <- grad_carry(l, 2) <- B3

`carry(l, i)` is what layer l keeps for the slices after i (of an attention the keys and values up to there), and
`grad_carry(l, i)` its gradient, to which all later slices have added: so backwards go in reverse order. Slice j of
sequences b is micro-batch b * slices + j; the slices of the next micro-batch of rows follow without a gap.

Time (sum t_j + (p-1) max t_j)(1 + tB/tF) with t_j the forward of slice j; every rank keeps all slices' activations.
`minipar.costs.slicing` finds the lengths for which this is shortest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minipar.errors import PlanError
from minipar.program import Action, Backward, Forward, Instruction, Op, Value, carry, grad_carry
from minipar.program.shape import Shape
from minipar.strategies.schedules.registry import schedule


@schedule(
    "terapipe",
    paper="Li et al. 2021",
    time="(sum t_j + (p-1) max t_j)(1 + tB/tF)",
    peak="slices",
    needs="a causal model",
)
def terapipe(rank: int, stages: int, microbatches: int, slices: int) -> Iterator[Action]:
    """Slices of a sequence as micro-batches: forwards in order, backwards in reverse order."""
    for i in range(microbatches * slices):
        yield Forward(i)
    for i in reversed(range(microbatches * slices)):
        yield Backward(i)


def add_carries(instructions: Sequence[Instruction], shape: Shape, slices: int) -> list[Instruction]:
    """A pass: one rank's instructions, layer by layer, with what flows between the slices of a sequence.

    FORWARD     reads carry(l, i-1), writes carry(l, i)      (the first slice reads none, the last one writes none)
    RECOMPUTE   reads carry(l, i-1)
    BACKWARD    reads both, and grad_carry(l, i); frees carry(l, i) and grad_carry(l, i); writes grad_carry(l, i-1)

    Of a layer without backward, the next FORWARD frees the carry.
    """
    if slices == 1:
        return list(instructions)
    first = min((min(group.layers) for group in shape.groups if group.trainable), default=shape.layers)
    carrying = frozenset(shape.carries)
    return [
        _carried(ins, slices, ins.layers[0] >= first) if carrying.intersection(ins.layers) and ins.op in _OPS else ins
        for ins in instructions
    ]


_OPS = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


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
    made: tuple[Value, ...] = (grad_carry(layer, i - 1, step),) if before else ()
    return ins._replace(reads=ins.reads + before + mine, writes=ins.writes + made, frees=ins.frees + mine)
