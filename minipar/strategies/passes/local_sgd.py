"""Local SGD: every replica trains by itself for a few steps, then all replicas average their parameters.

Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020.

    local_steps=3     step 0           step 1           step 2
    replica 0         F B | STEP       F B | STEP       F B | STEP | average    one message of all parameters
    replica 1         F B | STEP       F B | STEP       F B | STEP | average    in three steps, instead of three

A replica's gradient is that of the mean loss over its own rows. In the average a replica weighs as much as the rows
that it trained on since the last one, so that with local_steps=1 and plain SGD everything is as with summed gradients.
Only parameters are averaged: momentum and other optimizer states stay each replica's own.

Between two averages the replicas' parameters differ. The program's contract, `Local`, promises how long.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.errors import PlanError
from minipar.program import Instruction, Op, Part, param
from minipar.strategies.passes.data_parallel import Bucket, split_buckets
from minipar.strategies.passes.layers import Layout


def average(
    update: Sequence[Instruction], layout: Layout, stage: int, step: int, last: bool, every: int, bucket: Bucket
) -> list[Instruction]:
    """A stage's STEP, and after every `every`-th step, and the last one, the average over the replicas.

    What the next forward needs first is averaged first.
    """
    groups = layout.trainable(stage)
    across = [g for g in groups if len(layout.holders(g)) > layout.dp]
    if across:
        layers = ", ".join(map(str, layout.shape.groups[across[0]].layers))
        raise PlanError(
            f"local_steps={every}: layers {layers} are tied across stages, whose gradients must be summed in every "
            "step; possible is a split that has them on one stage"
        )
    if layout.dp == 1 or not ((step + 1) % every == 0 or last):
        return list(update)
    result = list(update)
    for members in split_buckets(
        sorted(groups, key=lambda g: min(layout.shape.groups[g].layers)), layout.shape.groups, bucket
    ):
        values, ranks = tuple(map(param, members)), layout.holders(members[0])
        parts = (Part(Op.ALL_REDUCE, -1, sum(sum(layout.shape.groups[g].tensors) for g in members)),)
        stream = "group " + ",".join(map(str, ranks))
        result.append(
            Instruction(Op.ALL_REDUCE, tuple(members), -1, step, values, values, (), stream, -1, ranks, parts)
        )
    return result
