"""What a collective's program computes: for every chunk on every rank, the ranks whose values are summed in it.

At the beginning a chunk contains its own rank's value once. SEND sends a copy of it, REDUCE adds a received chunk, and
RECV into a chunk replaces it. A program is right if, at the end, every chunk contains the value of each rank that had
the chunk at the beginning, exactly once. In an allreduce these are all ranks, in an all-gather only the chunk's owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from minipar.errors import ProgramError
from minipar.program import Op, Program, Turn, Value, order
from minipar.program.diagnostics import at, refuse
from minipar.program.rule import Place

Sums = dict[int, Counter[int]]  # for one rank: chunk -> how often it contains each rank's value


def result(program: Program, turns: Iterable[Turn] | None = None) -> list[Sums]:
    """For each rank and each chunk that it holds at the end, how often the chunk contains each rank's value.

    turns   `order(program)`, if the caller has made it already
    """
    held: list[Sums] = [{v.index: Counter((rank,)) for v in state} for rank, state in enumerate(program.state)]
    sent: dict[Place, Sums] = {}
    came: list[dict[Value, Counter[int]]] = [{} for _ in program.ranks]  # received chunks that wait to be added
    for rank, index, ins, waited, _ in order(program) if turns is None else turns:
        for value, _, source in waited:
            if value.kind == "incoming":
                came[rank][value] = sent[source][value.index]
            else:
                held[rank][value.index] = sent[source][value.index]
        if ins is None:
            continue
        if ins.op is Op.SEND:
            sent[rank, index] = {v.index: held[rank][v.index] for v in ins.reads}
        for value in ins.reads:
            if value.kind == "incoming":
                held[rank][value.index] = held[rank][value.index] + came[rank].pop(value)
        for value in ins.frees:
            if value.kind == "chunk":
                del held[rank][value.index]
    return held


def check_contributions(program: Program, found_of: list[Sums]) -> None:
    """ProgramError if a chunk at the end does not contain each rank's value at the beginning exactly once."""
    wanted: dict[int, Counter[int]] = {}
    for rank, state in enumerate(program.state):
        for value in state:
            wanted.setdefault(value.index, Counter())[rank] = 1
    for rank, sums in enumerate(found_of):
        for index, found in sorted(sums.items()):
            if found == wanted[index]:
                continue
            wrong = [f"lacks rank {r}'s" for r in sorted(wanted[index] - found)]
            wrong += [f"counts rank {r}'s {found[r]} times" for r in sorted(found - wanted[index])]
            raise ProgramError(f"rank {rank} ends with a chunk({index}) that {wrong[0]}")


def check_moves(program: Program) -> None:
    """ProgramError if an instruction cannot be part of a collective, or names other values than those that it moves."""
    for rank, row in enumerate(program.ranks):
        for index, ins in enumerate(row):
            where = at(program, rank, index)
            if ins.op not in (Op.SEND, Op.RECV, Op.REDUCE):
                raise refuse(program, rank, index, f"{where}: a collective is made of SEND, RECV and REDUCE")
            if not ins.layers or not 0 <= min(ins.layers) <= max(ins.layers) < len(program.chunks):
                raise refuse(program, rank, index, f"{where} works on a chunk that is not there")
            chunks = [Value("chunk", c) for c in ins.layers]
            kinds = {value.kind for value in ins.writes}
            if ins.op is Op.SEND:
                right = list(ins.reads) == chunks and not ins.writes
            elif ins.op is Op.RECV:
                sources = {value.microbatch for value in ins.writes if value.kind == "incoming"}
                named = [value.index for value in ins.writes] == list(ins.layers)
                right = named and not ins.reads and kinds in ({"chunk"}, {"incoming"}) and sources <= {ins.peer}
            else:
                added = [value for value in ins.reads if value.kind == "incoming"]
                own = [value for value in ins.reads if value.kind == "chunk"]
                right = [value.index for value in added] == list(ins.layers) and own == chunks == list(ins.writes)
            if not right:
                raise refuse(program, rank, index, f"{where} does not name the chunks that it works on")
