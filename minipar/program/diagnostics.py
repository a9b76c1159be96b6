"""The text of a refusal: it names the instruction in one line, and shows its neighbours as details."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipar.errors import ProgramError
from minipar.program.instructions import Instruction, repartitions

if TYPE_CHECKING:
    from minipar.program import Program


def at(program: Program, rank: int, index: int) -> str:
    """An instruction as messages name it: rank, position, text; with tensor parallelism also its nodes."""
    ins = program.ranks[rank][index]
    nodes = _nodes(program, ins) if program.forms and program.names else ""
    return f"rank {rank} instruction {index} `{ins}`{nodes}"


def _nodes(program: Program, ins: Instruction) -> str:
    """The names of the nodes that an instruction computes, or whose value a collective changes."""
    if repartitions(ins):
        found = [program.source(ins.reads[0])]
    else:
        found = list(ins.layers) if ins.microbatch >= 0 else []  # (others name parameter groups)
    names = [program.names[node] for node in dict.fromkeys(found[:1] + found[-1:]) if 0 <= node < len(program.names)]
    return f" ({' to '.join(names)})" if names else ""


def refuse(program: Program, rank: int, index: int, reason: str) -> ProgramError:
    """The error to raise: the reason, and the lines around the instruction."""
    instructions = program.ranks[rank]
    low, high = max(0, index - 3), min(len(instructions), index + 3)
    lines = [f"  {'->' if k == index else '  '} {k:4d}  {instructions[k]}" for k in range(low, high)]
    error = ProgramError(reason, f"rank {rank}:\n" + "\n".join(lines))
    error.places = ((rank, index),)
    return error


def wrong(program: Program, rank: int, index: int, what: str) -> ProgramError:
    """The error to raise for an instruction that is wrong in itself: `what` follows its name."""
    return refuse(program, rank, index, at(program, rank, index) + what)
