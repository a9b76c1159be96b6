"""Clipping: STEP scales all gradients down so that their common norm is at most a given number.

Source: Pascanu et al., "On the Difficulty of Training Recurrent Neural Networks", ICML 2013.

    rank 0   B 0 | NORM 0 over 0,1 | STEP 0         each rank adds the squares of what it holds (a slice of a gradient,
    rank 1   B 1 | NORM 1 over 0,1 | STEP 1         or its share of one that several ranks hold); the sum is one number

The norm is taken over all ranks of all stages, so no STEP begins before the last gradient is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.program import Instruction, Op, Part, home, norm
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import collective


def clip(draft: Draft) -> Draft:
    """The norm of all gradients is summed before STEP, which scales them down by it."""
    return draft.each_update(lambda rank, update: _with_norm(update, draft.layout))


def _with_norm(update: Sequence[Instruction], layout: Layout) -> list[Instruction]:
    """A rank's update with a NORM before its first STEP. Each STEP reads the norm."""
    trained = [rank for rank in range(layout.pp) if layout.trainable(rank)]
    ranks = tuple(rank for rank in range(layout.mesh.size) if layout.mesh.coordinates(rank)["pp"] in trained)
    steps = [ins for ins in update if ins.op is Op.STEP]
    if not steps:
        return list(update)
    groups = [g for ins in steps for g in ins.layers]
    grads = [v for ins in steps for v in ins.reads if home(v).kind in ("grad", "grad_shard")]
    result = [collective(Op.NORM, groups, ranks, steps[0].step, grads, [norm()], [Part(Op.NORM, -1, 8)])]
    for ins in update:
        if ins.op is Op.STEP:
            frees = (*ins.frees, norm()) if ins is steps[-1] else ins.frees
            ins = ins._replace(reads=(*ins.reads, norm()), frees=frees)
        result.append(ins)
    return result
