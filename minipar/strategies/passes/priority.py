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

    with zero=1, 2   B2 B1 B0       STEP0 STEP1 F0 STEP2 F1 F2             R: REDUCE_SCATTER, A: ALL_GATHER of a layer
                       [R2][R0][R1]    [A0][R..][A1]  [A2]

With ZeRO a piece has as much of each slice. What is not sent when the backward ends goes one layer ahead of the STEPs,
and a STEP one layer ahead of the forward, so that the link has the gather of a layer to do while the layer before it
works. A gather is one message: nothing more urgent could overtake it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
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
    device = [{g for g in found if not layout.on_host(g)} for found in sharing]
    return keep_gradients(draft, [() if draft.bucket == "none" else found for found in device])


def choose_piece(draft: Draft) -> Draft:
    """bucket=auto is the size of pieces with which the next forward ends earliest; of equal ones the largest."""
    if draft.bucket != "auto":
        return draft  # (the first step has found it)
    layout = draft.layout
    sharing = [summed(draft, rank) for rank in range(layout.pp)]
    sums = {g for found in sharing for g in found}
    sums |= {g for row in draft.ranks for ins in row if ins.op is Op.REDUCE_SCATTER for g in ins.layers}
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
    row, slices = _without_last_scatters(row, own)
    end, clock = len(row) - 1, [0.0]
    for ins in row:
        clock.append(clock[-1] + seconds(ins))
    place = dict.fromkeys([*sharing, *slices], end) | last_writes(row, "grad")
    urgency = first_uses(row)

    device = (g for g in sharing if own.issuperset(sharing[g]) and not layout.on_host(g))
    within = sorted([*device, *slices], key=lambda g: (place[g], -g))
    queue = [
        ins
        for g in within
        for ins in pieces(
            slices[g] if g in slices else all_reduce([g], layout, sharing[g], step, draft.bucket),
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
        bucket = "none" if layout.on_host(g) else draft.bucket
        after.setdefault(end, []).append(all_reduce([g], layout, sharing[g], step, bucket))
    return insert(row, after=after)


def _without_last_scatters(
    row: Sequence[Instruction], own: set[int]
) -> tuple[list[Instruction], dict[int, Instruction]]:
    """The row without the last REDUCE_SCATTER of each gradient over these ranks; and these, by their group. (Those of
    other ranks, which hold copies of a stage, keep an order that is the same on all of them.)"""
    last = {ins.layers[0]: k for k, ins in enumerate(row) if ins.op is Op.REDUCE_SCATTER and own.issuperset(ins.group)}
    kept = [ins for k, ins in enumerate(row) if last.get(ins.layers[0] if ins.layers else -1) != k]
    return kept, {g: row[k] for g, k in last.items()}


def pieces(whole: Instruction, size: int, bucket: Bucket) -> list[Instruction]:
    """The messages that sum one gradient of so many bytes: about equal pieces of at most `bucket` MiB, cut at multiples
    of 8 bytes. The last one writes, and frees, what the `whole` sum does."""
    limit = max(8.0, bucket * MiB if isinstance(bucket, (int, float)) else float(size))
    count = int(-(-size // limit))
    if count < 2:
        return [whole]
    cuts = [k * size // count // 8 * 8 for k in range(count)] + [size]
    found = []
    for k in range(count):
        part = Part(whole.op, -1, cuts[k + 1] - cuts[k], cuts[k], cuts[k + 1])
        found.append(whole._replace(writes=(), frees=(), parts=(part,)))
    return [*found[:-1], found[-1]._replace(writes=whole.writes, frees=whole.frees)]


def update_late(draft: Draft) -> Draft:
    """Each group's STEP runs in the next step, before the first forward that needs its parameters."""
    copied = frozenset(g for g in range(len(draft.layout.shape.groups)) if draft.layout.copied(g))
    rows, updates = [], []
    for rank, row in enumerate(draft.ranks):
        sent, unsent = _tail(row, copied)
        updates.append(tuple(_most_urgent_first(draft.update[rank], row, unsent, copied)))
        rows.append(_where_needed(sent, draft.late[rank], copied) if draft.late else sent)
    if draft.step == draft.steps - 1:
        rows = [[*row, *update] for row, update in zip(rows, updates, strict=True)]
    return replace(draft, ranks=tuple(map(tuple, rows)), update=tuple(updates))


Unsent = dict[int, list[Instruction]]


def _tail(row: Sequence[Instruction], copied: Container[int]) -> tuple[list[Instruction], Unsent]:
    """The row without the REDUCE_SCATTERs at its end, after which come only other sums; and these, by their group."""
    end = max((k + 1 for k, ins in enumerate(row) if ins.op not in (Op.REDUCE_SCATTER, Op.ALL_REDUCE)), default=0)
    sent, unsent = list(row[:end]), Unsent()
    for ins in row[end:]:
        if ins.op is Op.REDUCE_SCATTER and ins.layers[0] not in copied:
            unsent.setdefault(ins.layers[0], []).append(ins)
        else:
            sent.append(ins)
    return sent, unsent


def _most_urgent_first(
    update: Sequence[Instruction], row: Sequence[Instruction], unsent: Unsent, copied: Container[int]
) -> list[Instruction]:
    """The update of a rank, group by group, in the order in which forwards need their parameters; gradients that are
    not sent yet are sent one group ahead. Copies of a stage come first, in the same order on all ranks."""
    first = first_uses(row)
    of_each: dict[int, list[Instruction]] = {}
    for ins in update:
        for g in ins.layers:
            of_each.setdefault(g, []).append(of_groups(ins, (g,)) if len(ins.layers) > 1 else ins)
    order = sorted(of_each, key=lambda g: (-1 if g in copied else first.get(g, len(row)), g))
    result: list[Instruction] = []
    for k, g in enumerate(order):
        result += [ins for due in order[: k + 2] for ins in unsent.pop(due, ())]
        result += of_each[g]
    return result


def _where_needed(row: Sequence[Instruction], late: Sequence[Instruction], copied: Container[int]) -> list[Instruction]:
    """A step's instructions, with the update of the step before: of each group before the first use of its parameters,
    or where they are gathered then, before the first use of those of the group before it."""
    first = first_uses(row)
    gathered = {ins.layers[0] for ins in late if ins.op is Op.ALL_GATHER}
    places: dict[int, int] = {}
    earlier = 0
    for g in dict.fromkeys(ins.layers[0] for ins in late if ins.op is not Op.REDUCE_SCATTER):
        use = first.get(g, len(row))
        places[g] = 0 if g in copied else min(earlier, use) if g in gathered else use
        earlier = use
    before: dict[int, list[Instruction]] = {}
    place = len(row)
    for ins in reversed(late):  # (a REDUCE_SCATTER stands where the instruction after it does)
        place = place if ins.op is Op.REDUCE_SCATTER else places[ins.layers[0]]
        before.setdefault(place, []).insert(0, ins)
    return insert(row, before) + before.get(len(row), [])
