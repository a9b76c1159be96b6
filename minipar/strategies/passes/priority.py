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
"auto" is the size with which the next forward ends earliest. Gradients of layers on the host come last, one by one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from minipar.program import Instruction, Op, Part, grad, home
from minipar.strategies.buckets import Bucket, MiB
from minipar.strategies.draft import Draft, Seconds
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import all_reduce, insert, keep_gradients, last_writes, of_groups, summed

HALVINGS, SMALLEST = 7, 4096  # bucket=auto tries the largest gradient, half of it, and so on; not below so many bytes


def sum_by_priority(draft: Draft) -> Draft:
    """Gradients are summed in pieces, those that the next forward needs first before the others."""
    layout = draft.layout
    sharing = [summed(draft, rank) for rank in range(layout.pp)]
    draft = draft.each(lambda rank, row: _with_pieces(row, draft, rank, sharing[rank]))
    device = [{g for g in found if not layout.on_host(g)} for found in sharing]
    return keep_gradients(draft, [() if draft.bucket == "none" else found for found in device])


def choose_piece(draft: Draft) -> Draft:
    """bucket=auto is the size of pieces with which the next forward ends earliest; of equal ones the largest."""
    layout = draft.layout
    sharing = [summed(draft, rank) for rank in range(layout.pp)]
    largest = max((sum(layout.shape.groups[g].tensors) for found in sharing for g in found), default=0)
    if draft.bucket != "auto" or not largest:
        return draft if draft.bucket != "auto" else replace(draft, bucket=25.0)

    def end(size: float) -> float:
        tried = replace(draft, bucket=size)
        return max(
            _end_of_next_forward(_with_pieces(row, tried, rank, sharing[rank]), draft.seconds[rank])
            for rank, row in enumerate(draft.ranks)
        )

    ends = {largest / 2**k / MiB: 0.0 for k in range(HALVINGS) if k == 0 or largest / 2**k >= SMALLEST}
    ends = {size: end(size) for size in ends}
    shortest = min(ends.values())
    return replace(draft, bucket=max(size for size, last in ends.items() if last <= shortest * (1 + 1e-12)))


def _end_of_next_forward(row: Sequence[Instruction], seconds: Seconds) -> float:
    """When the forwards of the step after this one end, if all of them follow its last backward, and each layer waits
    for the messages of its gradients."""
    clock = link = 0.0
    summed_at: dict[int, float] = {}
    for ins in row:
        if ins.op is Op.ALL_REDUCE:
            link = max(clock, link) + seconds(ins)
            summed_at.update(dict.fromkeys(ins.layers, link))
        else:
            clock += seconds(ins)
    for ins in row:
        if ins.op is Op.FORWARD:
            needed = (summed_at.get(value.index, 0.0) for value in ins.reads if value.kind == "param")
            clock = max(clock, *needed, 0.0) + seconds(ins)
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

    device = (g for g in sharing if own.issuperset(sharing[g]) and not layout.on_host(g))
    within = sorted(device, key=lambda g: (place[g], -g))
    queue = [ins for g in within for ins in pieces(g, layout, sharing[g], step, draft.bucket)]
    ready = [clock[place[ins.layers[0]] + 1] for ins in queue]
    urgent = [urgency.get(ins.layers[0], end) for ins in queue]
    after: dict[int, list[Instruction]] = {}
    latest = 0
    for k in in_order(ready, [seconds(ins) for ins in queue], urgent):
        latest = max(latest, place[queue[k].layers[0]])
        after.setdefault(latest, []).append(queue[k])
    for g in sorted(sharing.keys() - set(within)):  # tied between stages, which complete them at different times
        bucket = "none" if layout.on_host(g) else draft.bucket
        after.setdefault(end, []).append(all_reduce([g], layout, sharing[g], step, bucket))
    return insert(row, after=after)


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


def pieces(g: int, layout: Layout, ranks: tuple[int, ...], step: int, bucket: Bucket) -> list[Instruction]:
    """The messages that sum one gradient: about equal pieces of at most `bucket` MiB, cut at multiples of 8 bytes."""
    whole = all_reduce([g], layout, ranks, step, bucket)
    size = sum(layout.shape.groups[g].tensors)
    limit = max(8.0, bucket * MiB if isinstance(bucket, (int, float)) else float(size))
    count = int(-(-size // limit))
    if count < 2:
        return [whole]
    cuts = [k * size // count // 8 * 8 for k in range(count)] + [size]
    found = []
    for k in range(count):
        part = Part(Op.ALL_REDUCE, -1, cuts[k + 1] - cuts[k], cuts[k])
        found.append(whole._replace(writes=(grad(g),) if k == count - 1 else (), parts=(part,)))
    return found


def first_uses(instructions: Sequence[Instruction]) -> dict[int, int]:
    """For each parameter group the place of the first forward that needs it."""
    found: dict[int, int] = {}
    for k, ins in enumerate(instructions):
        for value in ins.reads if ins.op is Op.FORWARD else ():
            if home(value).kind == "param":
                found.setdefault(value.index, k)
    return found


def update_late(draft: Draft) -> Draft:
    """Each group's STEP runs in the next step, before the first forward that needs its parameters."""
    draft = draft.each_update(lambda rank, update: _most_urgent_first(update, draft.ranks[rank]))
    last = draft.step == draft.steps - 1

    def rewrite(rank: int, row: Sequence[Instruction]) -> list[Instruction]:
        late = _where_needed(row, draft.late[rank]) if draft.late else list(row)
        return [*late, *draft.update[rank]] if last else late

    return draft.each(rewrite)


def _most_urgent_first(update: Sequence[Instruction], row: Sequence[Instruction]) -> list[Instruction]:
    """The STEP of a rank as one STEP for each group, in the order in which forwards need their parameters."""
    first = first_uses(row)
    return [
        of_groups(ins, (g,)) for ins in update for g in sorted(ins.layers, key=lambda g: (first.get(g, len(first)), g))
    ]


def _where_needed(row: Sequence[Instruction], late: Sequence[Instruction]) -> list[Instruction]:
    """A step's instructions, with each STEP of the step before inserted before the first use of its parameters."""
    first = first_uses(row)
    before: dict[int, list[Instruction]] = {}
    for ins in late:
        before.setdefault(first.get(ins.layers[0], len(row)), []).append(ins)
    return insert(row, before) + before.get(len(row), [])
