"""Local SGD: every replica trains alone for a few steps, then all replicas average their parameters.

Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD", ICLR 2020.

    local_steps=3     step 0           step 1           step 2
    replica 0         F B | STEP       F B | STEP       F B | STEP | average    one message of all parameters
    replica 1         F B | STEP       F B | STEP       F B | STEP | average    in three steps, instead of three

A replica's gradient is that of the mean loss over its own rows. In the average a replica has the weight of the rows
that it has used since the last average. So with local_steps=1 and plain SGD the result is the same as with summed
gradients. Only parameters are averaged; every replica keeps its own momentum and other optimizer state.

Gradients of layers that several ranks of a replica hold are summed over these ranks in every step.

Without flushes each replica is a pipeline that trains alone. Every stage counts its own updates, and its parameters are
averaged after so many of them. Who uses the new version first waits for the average:

    local_steps=2     stage 0   ... B mb1 v0 | STEP v2 | average v2 | F mb3 v2 | B mb2 v1 | STEP v3 ...
                      stage 1   ... B mb1 v1 | STEP v2 | average v2 | F mb2 v2 | B mb2 v2 | STEP v3 ...

If each micro-batch is a mini-batch of its own, an update is a step of each replica, whatever its rows: all replicas
have the same weight.

Between two averages the replicas' parameters differ. The program's contract, `Local` or `Staleness(local=...)`, says
for how many updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.program import Instruction, Op, Part, param
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import collective


def average(draft: Draft) -> Draft:
    """Replicas train alone, and average their parameters after every `local_steps` updates."""
    if draft.layout.dp == 1:
        return draft
    if draft.plan.asynchronous:
        return draft.each(lambda rank, row: _after_updates(draft, rank, row))
    due = (draft.step + 1) % draft.plan.local_steps == 0 or draft.step == draft.steps - 1
    return draft.each_update(lambda rank, update: [*update, *_averages(draft, rank, draft.step)]) if due else draft


def _after_updates(draft: Draft, rank: int, row: Sequence[Instruction]) -> list[Instruction]:
    """A row without flushes, with the averages after those of its updates that are due, and after the last one."""
    last = max((ins.step for ins in row if ins.op is Op.STEP), default=-1)
    result: list[Instruction] = []
    for ins in row:
        result.append(ins)
        if ins.op is Op.STEP and ((ins.step + 1) % draft.plan.local_steps == 0 or ins.step == last):
            result += _averages(draft, rank, ins.step, ins.step + 1)
    return result


def _averages(draft: Draft, rank: int, step: int, version: int = -1) -> list[Instruction]:
    """The collectives that average a rank's parameters, in the order in which the next forward needs them. Each rank
    averages with those that have its place in the other replicas. What is not on the device is averaged one by one.

    version   of the parameters, without flushes
    """
    layout, table = draft.layout, draft.layout.shape.groups
    ranks = layout.mesh.group(layout.rank(0, rank), "dp")
    result = []
    ready = sorted(layout.trainable(rank), key=lambda g: min(table[g].layers))
    away = ready if set(draft.plan.offload) - {"activations"} else [g for g in ready if layout.on_host(g)]
    together = split_buckets([g for g in ready if g not in away], table, draft.bucket)
    for members in (*together, *([g] for g in away)):
        values = [param(g, version) for g in members]
        parts = [Part(Op.ALL_REDUCE, -1, sum(sum(table[g].tensors) for g in members))]
        result.append(collective(Op.ALL_REDUCE, members, ranks, step, values, values, parts))
    return result
