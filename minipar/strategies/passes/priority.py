"""Priority: the gradients that the next forward needs first are sent first, and can overtake large ones.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys 2019; Peng et
al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), SOSP 2019.

    overlap=backward     B2 B1 B0                      STEP F0 F1 F2         messages in the order of backward
                           [ 2      ][ 1     ][ 0     ]

    overlap=priority     B2 B1 B0         STEP0 F0     STEP1 F1   STEP2 F2   pieces in the order of the next forward;
                           [2][1 ][ 0     ][ 1    ][ 2      ]                a layer starts as soon as it is updated

Messages of a group of ranks run one after another, in the same order on all of these ranks. This pass decides the
order: whenever the link is free, the most urgent of the ready messages is next. In a rank's list a message comes as
soon as its gradient is complete and all messages before it have come. The last piece of a gradient represents all
pieces: it writes what STEP reads.

`bucket` is the size of a piece; gradients are never joined. "none" sends them whole, with a message for each tensor.
"auto" is the size with which the next forward ends earliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minipar.program import Instruction, Op, Part, Value
from minipar.strategies.buckets import Bucket, MiB, best_piece
from minipar.strategies.draft import Draft, Seconds
from minipar.strategies.rewriting import all_reduce, insert, keep_gradients, last_writes, of_groups, summed
from minipar.strategies.urgency import first_uses, in_order


def sum_by_priority(draft: Draft) -> Draft:
    """Gradients are summed in pieces, those that the next forward needs first before the others."""
    layout = draft.layout
    sharing = [summed(draft, rank) for rank in range(layout.pp)]
    draft = draft.each(lambda rank, row: _with_pieces(row, draft, rank, sharing[rank]))
    return keep_gradients(draft, [() if draft.bucket == "none" else found for found in sharing])


def choose_piece(draft: Draft) -> Draft:
    """bucket=auto is the size of pieces with which the next forward ends earliest; of equal ones the largest."""
    if draft.bucket != "auto":
        return draft  # (the first step has found it)
    layout = draft.layout
    sharing = [summed(draft, rank) for rank in range(layout.pp)]
    sums = {g for found in sharing for g in found}
    largest = max((sum(layout.shape.groups[g].tensors) for g in sums), default=0)
    if not largest:
        return replace(draft, bucket=25.0)

    def end(size: float) -> float:
        more = replace(draft, bucket=size, steps=draft.step + 2)  # (the last step would end with its own updates)
        tried = update_late(more.each(lambda rank, row: _with_pieces(row, more, rank, sharing[rank])))
        following = update_late(replace(more, late=tried.update))
        return max(map(_end_of_next_forward, tried.ranks, following.ranks, draft.seconds))

    return replace(draft, bucket=best_piece(largest, end))


def _end_of_next_forward(row: Sequence[Instruction], following: Sequence[Instruction], seconds: Seconds) -> float:
    """When the last forward of the `following` step ends on a rank that waits for no other stage."""
    clock = link = 0.0
    ready: dict[Value, float] = {}
    last = max((k for k, ins in enumerate(following) if ins.op is Op.FORWARD), default=-1)
    for ins in [*row, *following[: last + 1]]:
        clock = max(clock, *(ready.get(value, 0.0) for value in ins.reads), 0.0)
        if ins.group:
            link = max(clock, link) + seconds(ins)
            ready.update(dict.fromkeys(ins.writes, link))
        else:
            clock += seconds(ins)
            ready.update(dict.fromkeys(ins.writes, clock))
    return clock


def _with_pieces(
    row: Sequence[Instruction], draft: Draft, rank: int, sharing: dict[int, tuple[int, ...]]
) -> list[Instruction]:
    """One rank's instructions with the collectives that sum its gradients, in the order of their urgency."""
    layout, step, seconds = draft.layout, draft.step, draft.seconds[rank]
    own = {layout.rank(r, rank) for r in range(layout.dp)}
    end, clock = len(row) - 1, [0.0]
    for ins in row:
        clock.append(clock[-1] + seconds(ins))
    place = dict.fromkeys(sharing, end) | last_writes(row, "grad")
    urgency = first_uses(row)

    within = sorted((g for g in sharing if own.issuperset(sharing[g])), key=lambda g: (place[g], -g))
    queue = [
        ins
        for g in within
        for ins in pieces(
            all_reduce([g], layout, sharing[g], step, draft.bucket),
            sum(layout.shape.groups[g].tensors),
            draft.bucket,
        )
    ]
    ready = [clock[place[ins.layers[0]] + 1] for ins in queue]
    urgent = [urgency.get(ins.layers[0], end) for ins in queue]
    after: dict[int, list[Instruction]] = {}
    latest = 0
    for k in in_order(ready, [seconds(ins) for ins in queue], urgent):
        latest = max(latest, place[queue[k].layers[0]])
        after.setdefault(latest, []).append(queue[k])
    for g in sorted(sharing.keys() - set(within)):  # tied between stages, which complete them at different times
        after.setdefault(end, []).append(all_reduce([g], layout, sharing[g], step, draft.bucket))
    return insert(row, after=after)


def pieces(whole: Instruction, size: int, bucket: Bucket) -> list[Instruction]:
    """The messages that sum one gradient of so many bytes: about equal pieces of at most `bucket` MiB, cut at multiples
    of 8 bytes. The last one writes what the `whole` sum does."""
    limit = max(8.0, bucket * MiB if isinstance(bucket, (int, float)) else float(size))
    count = int(-(-size // limit))
    if count < 2:
        return [whole]
    cuts = [k * size // count // 8 * 8 for k in range(count)] + [size]
    found = []
    for k in range(count):
        part = Part(whole.op, -1, cuts[k + 1] - cuts[k], cuts[k], cuts[k + 1])
        found.append(whole._replace(writes=(), parts=(part,)))
    return [*found[:-1], found[-1]._replace(writes=whole.writes)]


def update_late(draft: Draft) -> Draft:
    """Each group's STEP runs in the next step, before the first forward that needs its parameters."""
    rows, updates = [], []
    for rank, row in enumerate(draft.ranks):
        updates.append(tuple(_most_urgent_first(draft.update[rank], row)))
        rows.append(_where_needed(row, draft.late[rank]) if draft.late else row)
    if draft.step == draft.steps - 1:
        rows = [[*row, *update] for row, update in zip(rows, updates, strict=True)]
    return replace(draft, ranks=tuple(map(tuple, rows)), update=tuple(updates))


def _most_urgent_first(update: Sequence[Instruction], row: Sequence[Instruction]) -> list[Instruction]:
    """The update of a rank, group by group, in the order in which forwards need their parameters."""
    first = first_uses(row)
    of_each: dict[int, list[Instruction]] = {}
    for ins in update:
        for g in ins.layers:
            of_each.setdefault(g, []).append(of_groups(ins, (g,)) if len(ins.layers) > 1 else ins)
    order = sorted(of_each, key=lambda g: (first.get(g, len(row)), g))
    return [ins for g in order for ins in of_each[g]]


def _where_needed(row: Sequence[Instruction], late: Sequence[Instruction]) -> list[Instruction]:
    """A step's instructions, with the update of the step before: of each group before the first use of its
    parameters."""
    first = first_uses(row)
    before: dict[int, list[Instruction]] = {}
    for ins in late:
        before.setdefault(first.get(ins.layers[0], len(row)), []).append(ins)
    return insert(row, before) + before.get(len(row), [])
