"""Two micro-batches side by side: while a collective of the one is under way, the rank computes the other one.

    F 0 mb0 | ALL_REDUCE mb0 | F 1 mb0 | ALL_REDUCE mb0 | F 0 mb1 | ALL_REDUCE mb1 | F 1 mb1 | ALL_REDUCE mb1

    becomes, with batch_copies=2

    F 0 mb0 | ALL_REDUCE mb0 | F 0 mb1 | ALL_REDUCE mb1 | F 1 mb0 | ALL_REDUCE mb0 | F 1 mb1 | ALL_REDUCE mb1
              |--------- is under way while F 0 mb1 ---|

Source: MindSpore's MicroBatchInterleaved ("multi-copy parallelism"). Micro-batches that do the same one after the
other on a rank go in step, piece by piece; a piece ends with a collective, or before what another rank must give. (That
rank may wait for the same piece of the other micro-batch first.) What they do is a forward or a backward
(gpipe), or without a pipeline both in turn (1F1B):

    F mb0 | B mb0 | F mb1 | B mb1        becomes        F mb0 | F mb1 | B mb0 | B mb1, piece by piece

The sum of a gradient stays behind the backward that completes it. The activations of all copies are in memory together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from minipar.program import BACKWARDS, MOVED, Instruction, Op, Value, repartitions
from minipar.strategies.draft import Draft


class Line(NamedTuple):
    """An instruction of a micro-batch, and the sums of gradients that come right after it.

    waits   whether it reads what another rank gives
    """

    instructions: list[Instruction]
    waits: bool


Run = list[Line]  # the lines of one micro-batch through neighbouring layers, one way
LONGEST = 3  # runs of a micro-batch that are taken in step with others: a forward, and the two halves of a backward


def side_by_side(draft: Draft) -> Draft:
    """Micro-batches that follow each other go in step, so that one's collectives overlap the other's compute."""
    # In a pipeline a forward that is in step with one before a backward may wait for what this backward sends.
    longest = LONGEST if draft.plan.pp == 1 else 1
    return draft.each(lambda rank, row: interleave(row, draft.plan.batch_copies, longest))


def interleave(row: Sequence[Instruction], copies: int, longest: int = LONGEST) -> list[Instruction]:
    """One rank's instructions, in which up to `copies` micro-batches that do the same one after the other go in
    step. `longest`: of how many runs of each that may consist."""
    runs = [list(run) for _, run in groupby(_lines(row), key=_run_of)]
    result: list[Instruction] = []
    start = 0
    while start < len(runs):
        joined = _in_step(runs[start:], copies, longest)
        for pieces in zip(*map(_pieces, joined), strict=True):
            result += [ins for piece in pieces for line in piece for ins in line.instructions]
        start += sum(map(len, joined))
    return result


def _lines(row: Sequence[Instruction]) -> list[Line]:
    found: list[Line] = []
    built = {value for ins in row for value in ins.writes}
    for ins in row:
        if found and ins.op is Op.ALL_REDUCE and not repartitions(ins):
            found[-1].instructions.append(ins)
        else:
            found.append(Line([ins], any(value.kind in MOVED and value not in built for value in ins.reads)))
    return found


def _run_of(line: Line) -> tuple[int, int, bool]:
    """What the lines of a run have in common: the micro-batch, the step, and the direction."""
    ins = line.instructions[0]
    value = ins.reads[0].kind if repartitions(ins) else ""
    return ins.microbatch, ins.step, ins.op in BACKWARDS or value == "grad_output"


def _in_step(runs: list[Run], copies: int, longest: int) -> list[list[Run]]:
    """What goes in step from the first run on: of each micro-batch as many runs as repeat in those that follow."""
    for length in range(1, longest + 1):
        found, seen = [runs[:length]], _microbatches(runs[:length])
        for start in range(length, copies * length, length):
            block = runs[start : start + length]
            if not _alike(found[0], block) or seen & _microbatches(block):  # (its forward may be among the others)
                break
            if any(_in_the_way(_pieces(before), _pieces(block)) for before in found):
                break
            found.append(block)
            seen |= _microbatches(block)
        if len(found) > 1:
            return found
    return [runs[:1]]


def _microbatches(block: list[Run]) -> set[tuple[int, int]]:
    first = (run[0].instructions[0] for run in block)
    return {(ins.microbatch, ins.step) for ins in first}


def _alike(one: list[Run], other: list[Run]) -> bool:
    """Whether two micro-batches do the same, all of it on layers, and wait for other ranks at the same places."""
    a, b = ([line.instructions[0] for line in chain(*block)] for block in (one, other))
    if len(a) != len(b) or a[0].microbatch < 0:
        return False
    if [line.waits for line in chain(*one)] != [line.waits for line in chain(*other)]:
        return False
    return all(
        x.op is y.op and x.layers == y.layers and x.group == y.group and (bool(x.layers) or repartitions(x))
        for x, y in zip(a, b, strict=True)
    ) and not any(ins.op is Op.STEP for ins in a)


def _in_the_way(one: list[Run], other: list[Run]) -> bool:
    """Whether pieces of the other micro-batch cannot come before later pieces of the one, because both use a value that
    one of them changes: such as a gradient of which each micro-batch is summed by itself (ZeRO)."""
    moved: dict[Value, set[str]] = {}
    for mine, yours in zip(one, other, strict=True):
        for value, use in _uses(mine):
            if value in moved and (len(moved[value] | {use}) > 1 or use == "changes"):
                return True
        for value, use in _uses(yours):
            moved.setdefault(value, set()).add(use)
    return False


def _uses(piece: Run) -> Iterator[tuple[Value, str]]:
    """The values that belong to no micro-batch, each with what an instruction does to it: it reads it, changes it, or
    adds to it, which is possible in any order."""
    for ins in chain.from_iterable(line.instructions for line in piece):
        for values, use in ((ins.reads, "reads"), (ins.writes, "changes"), (ins.frees, "changes")):
            for value in values:
                if value.microbatch < 0:
                    yield value, "adds" if value.kind == "grad" and ins.op in BACKWARDS else use


def _pieces(block: list[Run]) -> list[Run]:
    """The pieces of some runs: each ends with a collective, with its run, or before a line that waits."""
    found: list[Run] = []
    for run in block:
        found.append([])
        for line in run:
            if line.waits and found[-1]:
                found.append([])
            found[-1].append(line)
            if repartitions(line.instructions[0]):
                found.append([])
    return found
