"""Priority: the gradients that the next forward needs first are sent first, and can overtake large ones.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys 2019; Peng et
al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), SOSP 2019.

    overlap=backward     B2 B1 B0                      STEP F0 F1 F2         messages in the order of backward
                           [ 2      ][ 1     ][ 0     ]

    overlap=priority     B2 B1 B0         STEP0 F0     STEP1 F1   STEP2 F2   pieces in the order of the next forward;
                           [2][1 ][ 0     ][ 1    ][ 2      ]                a layer starts as soon as it is updated

Messages of a group of ranks run one after another, in the same order on all of these ranks. This pass decides the
order: whenever the link is free, the most urgent of the ready messages is next.

    ready      B2 B1 B0                  gradients as the backward completes them
    urgent     2, 1, 0                   the next forward needs layer 0 first
    order         2    0    1            the link is free after 2: by then 1 and 0 are ready, and 0 is more urgent

In a rank's list a message comes as soon as its gradient is complete and all messages before it have come. The last
piece of a gradient represents all pieces: it writes what STEP reads.

`bucket` is the size of a piece; gradients are never joined. "none" sends them whole, with a message for each tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from minipar.errors import PlanError
from minipar.program import Instruction, Op, Part, home
from minipar.program.shape import Shape
from minipar.strategies.buckets import Bucket, MiB
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import all_reduce, insert, keep_gradients, last_writes, of_groups, summed

MOST = 4000  # messages of a step, which take seconds to compile and to predict


def sum_by_priority(draft: Draft) -> Draft:
    """Gradients are summed in pieces, those that the next forward needs first before the others."""
    layout = draft.layout
    count, bucket = messages(layout.shape, draft.bucket), draft.bucket
    if count > MOST and isinstance(bucket, (int, float)):
        raise PlanError(
            f"bucket={bucket:g}: cuts the gradients of a step into {count:,} messages, of which a program has at most "
            f"{MOST:,}; possible is bucket={1.1 * bucket * count / MOST:.2g}"
        )
    sharing = [summed(draft, rank) for rank in range(layout.pp)]
    draft = draft.each(lambda rank, row: _with_pieces(row, draft, rank, sharing[rank]))
    return keep_gradients(draft, [() if draft.bucket == "none" else found for found in sharing])


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
    sums: list[tuple[int, Instruction]] = []
    latest = 0
    for k in in_order(ready, [seconds(ins) for ins in queue], urgent):
        latest = max(latest, place[queue[k].layers[0]])
        sums.append((latest, queue[k]))
    for g in sorted(sharing.keys() - set(within)):  # tied between stages, which complete them at different times
        sums.append((end, all_reduce([g], layout, sharing[g], step, draft.bucket)))
    return insert(row, after=sums)


def messages(shape: Shape, bucket: Bucket) -> int:
    """About how many messages gradients are cut into."""
    size = sum(sum(group.tensors) for group in shape.groups)
    return int(size / max(8.0, bucket * MiB)) if isinstance(bucket, (int, float)) else 0


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


def update_before_use(draft: Draft) -> Draft:
    """Each group's STEP runs in the next step, before the first forward that needs its parameters."""
    rows, updates = [], []
    for rank, row in enumerate(draft.ranks):
        updates.append(tuple(_most_urgent_first(draft.update[rank], row)))
        rows.append(_where_needed(row, draft.previous_update[rank]) if draft.previous_update else row)
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


def _where_needed(row: Sequence[Instruction], update: Sequence[Instruction]) -> list[Instruction]:
    """A step's instructions, with the update of the step before: of each group before the first use of its
    parameters."""
    first = first_uses(row)
    return insert(row, before=[(first.get(ins.layers[0], len(row)), ins) for ins in update])


def in_order(ready: Sequence[float], seconds: Sequence[float], urgent: Sequence[float]) -> list[int]:
    """The order of messages on one link: whenever it is free, the most urgent message that is ready comes next.

    ready     for each message, the time when it is ready
    seconds   for each message, how long it occupies the link
    urgent    for each message, its urgency: the smallest number comes first; equally urgent ones keep their order
    """
    coming = sorted(range(len(ready)), key=lambda k: (ready[k], k), reverse=True)
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[-1]])
        while coming and ready[coming[-1]] <= now:
            k = coming.pop()
            heapq.heappush(waiting, (urgent[k], k))
        _, k = heapq.heappop(waiting)
        now += seconds[k]
        order.append(k)
    return order


def first_uses(instructions: Sequence[Instruction]) -> dict[int, int]:
    """For each parameter group the place of the first forward that needs it, or of the fetch for this forward."""
    found: dict[int, int] = {}
    for k, ins in enumerate(instructions):
        for value in ins.reads if ins.op in (Op.FORWARD, Op.FETCH) else ():
            if home(value).kind == "param":
                found.setdefault(value.index, k)
    return found
