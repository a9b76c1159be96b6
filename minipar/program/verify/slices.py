"""How verify checks slices of a sequence: each slice reads the carries of the one before it, and writes its own."""

from __future__ import annotations

from collections.abc import Collection

from minipar.program import BACKWARDS, Instruction, Op, Program, Value, carry, grad_carry, home, host
from minipar.program.diagnostics import wrong

KINDS = ("carry", "grad_carry")
_FORWARDS = (Op.FORWARD, Op.RECOMPUTE)


def check_carries(program: Program, ranks: Collection[int]) -> None:
    """Every forward reads and writes the carries of its layers, and every backward their gradients. All of them belong
    to the same sequence. `ranks` are those to look at. Errors: ProgramError."""
    count, carrying = program.slice_count, frozenset(program.carries)
    for rank in ranks:
        begun: dict[tuple[int, int], int] = {}  # for each sequence, the last slice that has begun its forward
        for index, ins in enumerate(program.ranks[rank]):
            if ins.op not in _FORWARDS and ins.op not in BACKWARDS:
                continue
            i, place = ins.microbatch % count, (ins.microbatch // count, ins.step)
            if i > begun.get(place, -1) + 1:  # (layers count tokens to know where a slice begins)
                before = ins.microbatch - 1
                raise wrong(program, rank, index, f" comes before the slice before it, micro-batch {before}")
            begun[place] = max(i, begun.get(place, -1))
            reads, writes = _expected(ins, count, carrying)
            if ins.stream == "host":
                reads, writes = set(map(host, reads)), set(map(host, writes))
            named = tuple({v for v in values if home(v).kind in KINDS} for values in (ins.reads, ins.writes))
            for does, wanted, found in (("read", reads, named[0]), ("write", writes, named[1])):
                if found != wanted:
                    value = min(found ^ wanted)
                    says = f"needs to {does} {value}" if value in wanted else f"cannot {does} {value}"
                    raise wrong(program, rank, index, f" {says}")


def _expected(ins: Instruction, count: int, carrying: frozenset[int]) -> tuple[set[Value], set[Value]]:
    """The carries, and gradients of carries, that an instruction must read and write."""
    i, step = ins.microbatch, ins.step
    layers = carrying.intersection(ins.layers)
    before = {carry(layer, i - 1, step) for layer in layers} if i % count else set()
    after = {carry(layer, i, step) for layer in layers} if (i + 1) % count else set()
    if ins.op is Op.FORWARD:
        return before, after
    if ins.op is not Op.BACKWARD:
        return before, set()
    arriving = {grad_carry(value.index, i, step) for value in after}
    return before | after | arriving, {grad_carry(value.index, i - 1, step) for value in before}
