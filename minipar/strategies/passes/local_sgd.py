"""Local SGD: every replica trains alone for a few steps, then all replicas average their parameters.

Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020.

    local_steps=3     step 0           step 1           step 2
    replica 0         F B | STEP       F B | STEP       F B | STEP | average    one message of all parameters
    replica 1         F B | STEP       F B | STEP       F B | STEP | average    in three steps, instead of three

A replica's gradient is that of the mean loss over its own rows. In the average a replica has the weight of the rows
that it has used since the last average. So with local_steps=1 and plain SGD the result is the same as with summed
gradients. Only parameters are averaged; every replica keeps its own momentum and other optimizer state.

Between two averages the replicas' parameters differ. The program's contract, `Local`, says for how many updates.
"""

from __future__ import annotations

from minipar.errors import PlanError
from minipar.program import Instruction, Op, Part, param
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import collective


def average(draft: Draft) -> Draft:
    """Replicas train alone, and average their parameters after every `local_steps` steps."""
    layout, every = draft.layout, draft.plan.local_steps
    for rank in range(layout.pp):
        _check_ties(layout, rank, every)
    if layout.dp == 1 or not ((draft.step + 1) % every == 0 or draft.step == draft.steps - 1):
        return draft
    return draft.each_update(lambda rank, update: [*update, *_averages(draft, rank)])


def _averages(draft: Draft, rank: int) -> list[Instruction]:
    """The collectives that average a rank's parameters, in the order in which the next forward needs them."""
    layout, table = draft.layout, draft.layout.shape.groups
    result = []
    for members in split_buckets(
        sorted(layout.trainable(rank), key=lambda g: min(table[g].layers)), table, draft.bucket
    ):
        values = [param(g) for g in members]
        parts = [Part(Op.ALL_REDUCE, -1, sum(sum(table[g].tensors) for g in members))]
        ranks = layout.holders(members[0])
        result.append(collective(Op.ALL_REDUCE, members, ranks, draft.step, values, values, parts))
    return result


def _check_ties(layout: Layout, rank: int, every: int) -> None:
    across = [g for g in layout.trainable(rank) if len(layout.holders(g)) > layout.dp]
    if across:
        layers = ", ".join(map(str, layout.shape.groups[across[0]].layers))
        raise PlanError(
            f"local_steps={every}: layers {layers} are tied across stages, whose gradients must be summed in every "
            "step; possible is a split that has them on one stage"
        )
