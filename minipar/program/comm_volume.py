"""What the messages of a collective carry, and how often they travel. Predictions and traces both use this."""

from __future__ import annotations

from minipar.program import Instruction, Op, Program, Value, grad, piece_of

_CHANGING = "changing_"


def summed(ins: Instruction) -> tuple[Value, ...]:
    """The gradients that an ALL_REDUCE sums. If it averages parameters, the gradients that have the same sizes."""
    read = (value for value in ins.reads if value.kind != "residual")
    return tuple(grad(value.index) if value.kind == "param" else value for value in read)


def changing(ins: Instruction) -> Value:
    """What a collective that gives a value another form works on: those tensors of the value whose form changes, as
    this rank has them before. Nothing reads it; costs and traces know its size."""
    return ins.reads[0]._replace(kind=_CHANGING + ins.reads[0].kind)


def changes(value: Value) -> str:
    """The kind of value of which this is the part that changes its form; "" of any other value."""
    return value.kind.removeprefix(_CHANGING) if value.kind.startswith(_CHANGING) else ""


def whole_of(ins: Instruction, part: float) -> float:
    """Bytes of the tensor that such a collective works on, when a rank has `part` bytes of it before."""
    return part * (len(ins.group) if ins.op is Op.ALL_GATHER else 1)


def carried(ins: Instruction, program: Program) -> float:
    """The fraction of the gradients of its groups that the messages of an ALL_REDUCE carry.

    It is 1, or less if the ALL_REDUCE sums only a piece or compresses. Parts that are gathered instead of summed count
    half, because their bytes travel once and not twice.
    """
    if program.compress == "none" and not piece_of(ins):
        return 1.0
    whole = sum(sum(program.groups[g].tensors) for g in ins.layers)
    sent = sum(part.bytes / (2 if part.op is Op.ALL_GATHER else 1) for part in ins.parts)
    return sent / whole if whole else 1.0


def hops(ins: Instruction) -> int:
    """How often the bytes of a collective travel: twice where every rank gets the whole sum, otherwise once."""
    return 2 if ins.op is Op.ALL_REDUCE or ins.op is Op.NORM else 1
