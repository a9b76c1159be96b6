"""How stale gradients are, how many versions of the weights are alive: read off a rank's instructions, without times.

F mb0 v0 | F mb1 v0 | B mb0 | STEP v1 | B mb1 | STEP v2      mb1 used v0, and went into the update of v1: 1 update old
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from minipar.program import COMPUTE, Instruction, Op, Program, Staleness, version_of

Versions = tuple[int | None, int | None]


def versions_of(row: Iterable[Instruction]) -> Iterator[Versions]:
    """For each instruction of a rank the version of the parameters that it used, and the one that it made."""
    updates = 0
    for ins in row:
        named = max(map(version_of, ins.reads), default=-1)
        used = None if ins.op not in COMPUTE else named if named >= 0 else updates
        updates += ins.op is Op.STEP
        yield used, updates if ins.op is Op.STEP else None


def stalest(row: Sequence[Instruction]) -> int:
    """The most updates between the version that a forward used and the one that its gradient went into."""
    used: dict[tuple[int, int], int] = {}
    waiting: list[tuple[int, int]] = []
    most = 0
    for ins, (version, _) in zip(row, versions_of(row), strict=True):
        if ins.op is Op.FORWARD:
            used.setdefault((ins.step, ins.microbatch), version or 0)
        elif ins.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            waiting.append((ins.step, ins.microbatch))
        elif ins.op is Op.STEP:
            most = max([most, *((version or 0) - used[key] for key in waiting if key in used)])
            waiting = []
    return most


def alive(row: Sequence[Instruction]) -> int:
    """How many versions of its parameters a rank holds at most. One, in a synchronous program."""
    count: dict[int, int] = {}
    most = 1
    for ins in row:
        for value in ins.writes:
            if version_of(value) >= 0:
                count[value.index] = count.get(value.index, 1) + 1
        for value in ins.frees:
            if version_of(value) >= 0:
                count[value.index] -= 1
        if ins.op is Op.STEP and count:
            most = max(most, *count.values())
    return most


def delay(program: Program, rank: int) -> int:
    """How stale a rank's gradients are, as far as is known before it runs: what the program promises, if it decides."""
    if not isinstance(program.contract, Staleness):
        return 0
    return stalest(program.ranks[rank]) if program.contract.stashed else program.contract.bound or 0
