"""What a program sends: the bytes of each instruction, by rank, by link and by kind of value.

Predictions and traces read the same numbers here. `size(rank, value)` gives the bytes of a value: of a profile, or of
a trace.
"""

from __future__ import annotations

from collections.abc import Callable

from minipar.program import (
    COLLECTIVES,
    SERVICE,
    Instruction,
    Op,
    Program,
    Value,
    grad,
    home,
    piece_of,
    repartitions,
)  # fmt: skip

Size = Callable[[int, Value], float]
Receiver = int | tuple[int, ...]  # a rank, or the group that a collective of the backend's own is among
NAMES = {
    Op.ALL_REDUCE: "allreduce",
    Op.REDUCE_SCATTER: "reduce_scatter",
    Op.ALL_GATHER: "all_gather",
    Op.ALL_TO_ALL: "all_to_all",
    Op.NORM: "allreduce",
}

_CHANGING = "changing_"


def summed(ins: Instruction) -> tuple[Value, ...]:
    """The gradients that an ALL_REDUCE sums. If it averages parameters, the gradients that have the same sizes."""
    read = (value for value in ins.reads if value.kind != "residual")
    return tuple(grad(value.index) if value.kind == "param" else value for value in read)


def changing(ins: Instruction) -> Value:
    """The tensors of a value to which a collective gives another form, as this rank has them before. No instruction
    reads this value; costs and traces know its size."""
    return ins.reads[0]._replace(kind=_CHANGING + ins.reads[0].kind)


def changes(value: Value) -> str:
    """The kind of value whose changing tensors this value stands for; "" for any other value."""
    return value.kind.removeprefix(_CHANGING) if value.kind.startswith(_CHANGING) else ""


def carried(ins: Instruction, program: Program) -> float:
    """The fraction of the gradients of its groups that the messages of an ALL_REDUCE carry.

    It is 1, or less if the ALL_REDUCE sums only a piece or compresses.
    """
    if program.compress == "none" and not piece_of(ins):
        return 1.0
    whole = sum(sum(program.groups[g].tensors) for g in ins.layers)
    return _sent_once(ins) / whole if whole else 1.0


def _sent_once(ins: Instruction) -> float:
    """Bytes of the parts of a collective. A part that travels in another way than the collective says counts as many
    bytes as would travel as often."""
    return sum(part.bytes * _travels(part.op) for part in ins.parts) / hops(ins)


def by_algorithm(program: Program, ins: Instruction) -> bool:
    """Whether the program's own algorithm moves the bytes of a collective: it sums gradients."""
    return bool(program.algorithm) and ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "grad"


def hops(ins: Instruction) -> int:
    """How often the bytes of a collective travel: twice where every rank gets the whole sum, otherwise once."""
    return _travels(ins.op)


def _travels(op: Op) -> int:
    return 2 if op is Op.ALL_REDUCE or op is Op.NORM else 1


def of_collective(program: Program, size: Size, rank: int, ins: Instruction) -> float:
    """Bytes of the tensor that a collective works on."""
    if repartitions(ins):
        return size(rank, changing(ins)) * (len(ins.group) if ins.op is Op.ALL_GATHER else 1)
    if ins.op is Op.ALL_REDUCE:
        return sum(size(rank, value) for value in summed(ins)) * carried(ins, program)
    return _sent_once(ins)


def of_message(size: Size, rank: int, ins: Instruction) -> float:
    """Bytes of a message from one rank to another, or between a worker and a parameter server."""
    return sum(part.bytes for part in ins.parts) if ins.op in SERVICE else sum(size(rank, value) for value in ins.reads)


def sent(program: Program, size: Size, rank: int, ins: Instruction) -> int:
    """Bytes that a rank puts on the wire for one instruction: of a collective `hops` (n-1)/n of its size."""
    if ins.op is Op.SEND or ins.op is Op.PUSH or ins.op is Op.REPLY:
        return round(of_message(size, rank, ins))
    if ins.op in COLLECTIVES:
        n = len(ins.group)
        return round(round(of_collective(program, size, rank, ins)) * hops(ins) * (n - 1) / n)
    return 0


def by_link(program: Program, size: Size) -> dict[tuple[int, Receiver], int]:
    """Bytes sent for each (source, target). Of collectives the target is the group."""
    links: dict[tuple[int, Receiver], int] = {}
    for rank, row in enumerate(program.ranks):
        for ins in row:
            target: Receiver = ins.peer if ins.op is Op.SEND else ins.group
            if (ins.op is Op.SEND or ins.op in COLLECTIVES) and (count := sent(program, size, rank, ins)):
                links[rank, target] = links.get((rank, target), 0) + count
    return links


def by_kind(program: Program, size: Size) -> dict[str, int]:
    """Bytes sent by all ranks together, for each kind of value, such as "grad" and "output"."""
    kinds: dict[str, int] = {}
    for rank, row in enumerate(program.ranks):
        for ins in row:
            if count := sent(program, size, rank, ins):
                kind = home(ins.writes[0] if ins.op is Op.NORM else ins.reads[0]).kind
                kinds[kind] = kinds.get(kind, 0) + count
    return kinds


def in_words(links: dict[tuple[int, Receiver], int]) -> dict[str, int]:
    """The same by text: `0 -> 1`, or `0 -> 0,1,2,3` for what rank 0 sends within that group."""

    def text(target: Receiver) -> str:
        return str(target) if isinstance(target, int) else ",".join(map(str, target))

    return {f"{source} -> {text(target)}": size for (source, target), size in links.items()}
