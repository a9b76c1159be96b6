"""Two micro-batches side by side: while a collective of the one is under way, the rank computes the other one.

    F 0 mb0 | ALL_REDUCE mb0 | F 1 mb0 | ALL_REDUCE mb0 | F 0 mb1 | ALL_REDUCE mb1 | F 1 mb1 | ALL_REDUCE mb1

    becomes, with batch_copies=2

    F 0 mb0 | ALL_REDUCE mb0 | F 0 mb1 | ALL_REDUCE mb1 | F 1 mb0 | ALL_REDUCE mb0 | F 1 mb1 | ALL_REDUCE mb1
              |--------- is under way while F 0 mb1 ---|

Source: MindSpore's MicroBatchInterleaved ("multi-copy parallelism"). Micro-batches whose forwards (or backwards) follow
each other on a rank go in step, piece by piece; a piece ends with a collective. So it needs a schedule in which they
do, such as gpipe. The activations of all copies are in memory together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from minipar.program import BACKWARDS, Instruction, Op, repartitions
from minipar.strategies.draft import Draft

Run = list[Instruction]  # the instructions of one micro-batch through neighbouring layers, one way


def side_by_side(draft: Draft) -> Draft:
    """Micro-batches that follow each other go in step, so that one's collectives overlap the other's compute."""
    return draft.each(lambda rank, row: interleave(row, draft.plan.batch_copies))


def interleave(row: Sequence[Instruction], copies: int) -> list[Instruction]:
    """One rank's instructions, in which up to `copies` runs that follow each other go in step."""
    runs = [list(run) for _, run in groupby(row, key=_run_of)]
    result: list[Instruction] = []
    while runs:
        together = [runs.pop(0)]
        while len(together) < copies and runs and _alike(together[0], runs[0]):
            together.append(runs.pop(0))
        for pieces in zip(*map(_pieces, together), strict=True):
            result += [ins for piece in pieces for ins in piece]
    return result


def _run_of(ins: Instruction) -> tuple[int, int, bool]:
    """What the instructions of a run have in common: the micro-batch, the step, and the direction."""
    value = ins.reads[0].kind if repartitions(ins) else ""
    return ins.microbatch, ins.step, ins.op in BACKWARDS or value == "grad_output"


def _alike(one: Run, other: Run) -> bool:
    """Whether two runs do the same with two micro-batches, all of it on layers."""
    if one[0].microbatch < 0 or len(one) != len(other):
        return False
    return all(
        a.op is b.op and a.layers == b.layers and a.group == b.group and (bool(a.layers) or repartitions(a))
        for a, b in zip(one, other, strict=True)
    ) and not any(ins.op is Op.STEP for ins in one)


def _pieces(run: Run) -> list[Run]:
    """The pieces of a run: each ends with a collective, or with the run."""
    found: list[Run] = [[]]
    for ins in run:
        found[-1].append(ins)
        if repartitions(ins):
            found.append([])
    return found
