"""The text of a refusal: it names the instruction in one line, and shows its neighbours as details."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipar.errors import ProgramError

if TYPE_CHECKING:
    from minipar.program import Program


def at(program: Program, rank: int, index: int) -> str:
    """An instruction as messages name it: rank, position, text."""
    return f"rank {rank} instruction {index} `{program.ranks[rank][index]}`"


def refuse(program: Program, rank: int, index: int, reason: str) -> ProgramError:
    """The error to raise: the reason, and the lines around the instruction."""
    instructions = program.ranks[rank]
    low, high = max(0, index - 3), min(len(instructions), index + 3)
    lines = [f"  {'->' if k == index else '  '} {k:4d}  {instructions[k]}" for k in range(low, high)]
    error = ProgramError(reason, f"rank {rank}:\n" + "\n".join(lines))
    error.places = ((rank, index),)
    return error
