"""Local SGD: every replica trains alone for a few steps, then all replicas average their parameters.

Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020.

    local_steps=3     step 0           step 1           step 2
    replica 0         F B | STEP       F B | STEP       F B | STEP | average    one message of all parameters
    replica 1         F B | STEP       F B | STEP       F B | STEP | average    in three steps, instead of three

A replica's gradient is that of the mean loss over what its own rows count. The average is the plain mean of the
replicas, as in both papers, however much each has counted: how far a step goes is up to its optimizer (with Adam as far
for few rows as for many), so counts are no weights for what it has moved. Where all replicas count alike, local_steps=1
and plain SGD give what summed gradients give. A replica whose targets count nothing in a step has a gradient of zeros:
momentum and decay go on. Only parameters are averaged; each replica keeps its own momentum and other optimizer state.

Gradients of layers that several ranks of a replica hold are summed over these ranks in every step.

Between two averages the replicas' parameters differ. The program's contract, `Local`, says for how many updates.
"""

from __future__ import annotations

from minipar.program import Instruction, Op, Part, param
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import collective


def average(draft: Draft) -> Draft:
    """Replicas train alone, and average their parameters after every `local_steps` updates."""
    if draft.layout.dp == 1:
        return draft
    due = (draft.step + 1) % draft.plan.local_steps == 0 or draft.step == draft.steps - 1
    return draft.each_update(lambda rank, update: [*update, *_averages(draft, rank, draft.step)]) if due else draft


def _averages(draft: Draft, rank: int, step: int) -> list[Instruction]:
    """The collectives that average a rank's parameters, in the order in which the next forward needs them. Each rank
    averages with those that have its place in the other replicas."""
    layout, table = draft.layout, draft.layout.shape.groups
    ranks = layout.mesh.group(layout.rank(0, rank), "dp")
    result = []
    ready = sorted(layout.trainable(rank), key=lambda g: min(table[g].layers))
    for members in split_buckets(ready, table, draft.bucket):
        values = [param(g) for g in members]
        parts = [Part(Op.ALL_REDUCE, -1, sum(sum(table[g].tensors) for g in members))]
        result.append(collective(Op.ALL_REDUCE, members, ranks, step, values, values, parts))
    return result
