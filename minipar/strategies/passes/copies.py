"""Two micro-batches side by side: while a collective of the one is under way, the rank computes the other one.

    F 0 mb0 | ALL_REDUCE mb0 | F 1 mb0 | ALL_REDUCE mb0 | F 0 mb1 | ALL_REDUCE mb1 | F 1 mb1 | ALL_REDUCE mb1

    becomes, with batch_copies=2

    F 0 mb0 | ALL_REDUCE mb0 | F 0 mb1 | ALL_REDUCE mb1 | F 1 mb0 | ALL_REDUCE mb0 | F 1 mb1 | ALL_REDUCE mb1
              |--------- is under way while F 0 mb1 ---|

Source: MindSpore's MicroBatchInterleaved ("multi-copy parallelism"). Micro-batches that do the same one after the
other on a rank go in step, piece by piece; a piece ends with a collective. What they do is a forward or a backward
(gpipe), or both in turn (1F1B):

    F mb0 | B mb0 | F mb1 | B mb1        becomes        F mb0 | F mb1 | B mb0 | B mb1, piece by piece

The sum of a gradient stays behind the backward that completes it. The activations of all copies are in memory together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby

from minipar.program import BACKWARDS, Instruction, Op, repartitions
from minipar.strategies.draft import Draft

Line = list[Instruction]  # an instruction of a micro-batch, and the sums of gradients that come right after it
Run = list[Line]  # the lines of one micro-batch through neighbouring layers, one way
LONGEST = 3  # runs of a micro-batch that are taken in step with others: a forward, and the two halves of a backward


def side_by_side(draft: Draft) -> Draft:
    """Micro-batches that follow each other go in step, so that one's collectives overlap the other's compute."""
    return draft.each(lambda rank, row: interleave(row, draft.plan.batch_copies))


def interleave(row: Sequence[Instruction], copies: int) -> list[Instruction]:
    """One rank's instructions, in which up to `copies` micro-batches that do the same one after the other go in
    step."""
    runs = [list(run) for _, run in groupby(_lines(row), key=_run_of)]
    result: list[Instruction] = []
    start = 0
    while start < len(runs):
        blocks = _in_step(runs[start:], copies)
        for pieces in zip(*map(_pieces, blocks), strict=True):
            result += [ins for piece in pieces for line in piece for ins in line]
        start += sum(map(len, blocks))
    return result


def _lines(row: Sequence[Instruction]) -> list[Line]:
    found: list[Line] = []
    for ins in row:
        if found and ins.op is Op.ALL_REDUCE and not repartitions(ins):
            found[-1].append(ins)
        else:
            found.append([ins])
    return found


def _run_of(line: Line) -> tuple[int, int, bool]:
    """What the lines of a run have in common: the micro-batch, the step, and the direction."""
    ins = line[0]
    value = ins.reads[0].kind if repartitions(ins) else ""
    return ins.microbatch, ins.step, ins.op in BACKWARDS or value == "grad_output"


def _in_step(runs: list[Run], copies: int) -> list[list[Run]]:
    """What goes in step from the first run on: of each micro-batch as many runs as repeat in those that follow."""
    for length in range(1, LONGEST + 1):
        found, seen = [runs[:length]], _microbatches(runs[:length])
        for start in range(length, copies * length, length):
            block = runs[start : start + length]
            if not _alike(found[0], block) or seen & _microbatches(block):  # (its forward may be among the others)
                break
            found.append(block)
            seen |= _microbatches(block)
        if len(found) > 1:
            return found
    return [runs[:1]]


def _microbatches(block: list[Run]) -> set[tuple[int, int]]:
    first = (run[0][0] for run in block)
    return {(ins.microbatch, ins.step) for ins in first}


def _alike(one: list[Run], other: list[Run]) -> bool:
    """Whether two micro-batches do the same, all of it on layers."""
    a, b = ([line[0] for line in chain(*block)] for block in (one, other))
    if len(a) != len(b) or a[0].microbatch < 0:
        return False
    return all(
        x.op is y.op and x.layers == y.layers and x.group == y.group and (bool(x.layers) or repartitions(x))
        for x, y in zip(a, b, strict=True)
    )


def _pieces(block: list[Run]) -> list[Run]:
    """The pieces of some runs: each ends with a collective, or with its run."""
    found: list[Run] = []
    for run in block:
        found.append([])
        for line in run:
            found[-1].append(line)
            if repartitions(line[0]):
                found.append([])
    return found
