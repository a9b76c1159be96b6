"""Clipping: before STEP, gradients are scaled down so that all of them together are no longer than a given norm.

Source: Pascanu et al., "On the Difficulty of Training Recurrent Neural Networks", ICML 2013.

    rank 0   B 0 | NORM 0 over 0,1 | STEP 0         each rank adds the squares of what it holds (a slice of a gradient,
    rank 1   B 1 | NORM 1 over 0,1 | STEP 1         or its share of one that several ranks hold); the sum is one number

The norm is over all ranks, also of other stages, so that no STEP begins before the last gradient is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.program import Instruction, Op, Part, home, norm
from minipar.strategies.layout import Layout


def clip(update: Sequence[Instruction], layout: Layout) -> list[Instruction]:
    """A stage's STEP, and what follows it, with the norm before it."""
    stages = [stage for stage in range(layout.pp) if layout.trainable(stage)]
    ranks = tuple(layout.rank(replica, stage) for replica in range(layout.dp) for stage in stages)
    steps = [ins for ins in update if ins.op is Op.STEP]
    if not steps:
        return list(update)
    groups = tuple(g for ins in steps for g in ins.layers)
    grads = tuple(v for ins in steps for v in ins.reads if home(v).kind in ("grad", "grad_shard"))
    stream = "group " + ",".join(map(str, ranks))
    parts = (Part(Op.NORM, -1, 8),)
    result = [Instruction(Op.NORM, groups, -1, steps[0].step, grads, (norm(),), (), stream, -1, ranks, parts)]
    for ins in update:
        if ins.op is Op.STEP:
            frees = (*ins.frees, norm()) if ins is steps[-1] else ins.frees
            ins = ins._replace(reads=(*ins.reads, norm()), frees=frees)
        result.append(ins)
    return result
