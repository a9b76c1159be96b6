"""ZeRO: the replicas share out the optimizer state (zero=1), then also the gradients (2), then also the parameters (3).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

    one group's parameters, concatenated   [ weight . . . . . . . | bias . 0 ]     N = 2 ranks: a half each
                                             slice of rank 0        slice of rank 1

            held between steps             one step                                        sent, times P (N-1)/N
    zero=0  param, optimizer_state         F0 F1 B1 B0 | all-reduce | STEP                 2
    zero=1  param, optimizer_shard         F0 F1 B1 RS1 B0 RS0 | STEP1 AG1 STEP0 AG0       2
    zero=2  param, optimizer_shard         F0 F1 B1 RS1 B0 RS0 | STEP1 AG1 STEP0 AG0       2
    zero=3  param_shard, optimizer_shard   AG0 F0 AG1 F1 B1 RS1 AG0 B0 RS0 | STEP 0,1      3, less the AG1 not needed

RS (REDUCE_SCATTER) sums gradients and leaves each rank its slice. AG (ALL_GATHER) makes whole parameters from slices.
STEP works on the slices. The peak memory of gradients: in zero=1 all whole gradients; in zero=2 and 3 the buckets that
are under way, and the slices.

    B3 B2 B1 B0       STEP3 STEP2 STEP1 STEP0          sums run beside the backward, as those of zero=0 do.
      [RS3][RS2 ][RS1][RS0]  [AG3][AG2 ][AG1][AG0]     zero=1 and 2 update bucket by bucket: a bucket's parameters are
                                                       gathered while the next bucket is updated

overlap=none sums all buckets after the backward, and gathers all after one STEP. So does the gather where the optimizer
works on the host, since parameters come from there before they are gathered.

With A micro-batches, `reduce="microbatch"` sums gradients after each of them. Then zero=2 sends (A + 1) P and zero=3
sends 3 A P, and no rank holds all whole gradients. `reduce="step"` first adds up gradients on each rank. Then zero=2
sends 2 P and zero=3 sends (2 A + 1) P, but each rank needs the memory of whole gradients. zero=1 always needs this
memory, and always sums with the last micro-batch.

In zero=3 the parameters of a layer are gathered before each of its forwards, backwards and recomputations, `prefetch`
layers ahead, and freed after it. They are not freed if no more than `prefetch` other layers work before their next use,
for example where the backward follows the forward. So `prefetch` + 1 layers are whole at a time, and where forward ends
and backward begins, as many gathers are saved.

A group that is tied between stages stays whole and is summed by an all-reduce, because its slices would belong to ranks
with different work. Frozen parameters stay whole, too. Where a stage has copies, all
ranks that hold it share out its optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from minipar.program import Instruction, Op, Part, Value, buffer, grad, grad_shard, param, param_shard
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import also_free, collective, insert, of_groups, renamed, stays, uses

# Buckets of gradients under way at the same time, each with its buffer; the next bucket waits. In zero=1 nothing waits:
# a buffer is as large as the whole gradients that it replaces, for which there is room.
IN_FLIGHT = 1


def shard(draft: Draft) -> Draft:
    """Replicas share out optimizer states; with zero=2 and 3 gradients, too, and with 3 parameters."""
    layout, plan, level = draft.layout, draft.plan, draft.plan.zero
    sharded = [sharded_groups(layout, rank) for rank in range(layout.pp)]
    buckets = [_buckets(row, draft, rank, sharded[rank]) for rank, row in enumerate(draft.ranks)]

    def rewrite(rank: int, row: Sequence[Instruction]) -> Sequence[Instruction]:
        row = _gather_parameters(row, draft, sharded[rank]) if level == 3 else row
        return _scatter_gradients(row, draft, rank, buckets[rank]) if buckets[rank] else row

    def update(rank: int, row: Sequence[Instruction]) -> list[Instruction]:
        """STEP on slices; in zero=1 and 2 their parameters are gathered after it."""
        return [each for ins in row for each in (step(rank, ins) if ins.op is Op.STEP else (ins,))]

    def step(rank: int, ins: Instruction) -> list[Instruction]:
        ins = renamed(ins, lambda v: _sliced(v, sharded[rank], level))
        if level == 3:
            return [ins]
        if plan.overlap == "none" or "optimizer" in plan.offload:
            found = split_buckets(sorted(sharded[rank]), layout.shape.groups, draft.bucket)
            return [ins, *_gathers(found, ins, draft)]
        return _by_bucket(ins, buckets[rank], draft)

    draft = draft.each(rewrite).each_update(update)
    return draft.each_state(lambda rank, held: [_sliced(value, sharded[rank], level) for value in held])


def _gathers(buckets: Sequence[Sequence[int]], step: Instruction, draft: Draft) -> list[Instruction]:
    """The ALL_GATHERs of parameters of which each rank has updated its part in a STEP."""
    return [_all_gather(groups, draft.layout, step.step, param) for groups in buckets]


def _by_bucket(step: Instruction, buckets: Sequence[Sequence[int]], draft: Draft) -> list[Instruction]:
    """A STEP as one for each bucket, with the gather of the bucket's parameters, and one for what is not sliced."""
    result: list[Instruction] = []
    for bucket in buckets:
        groups = tuple(sorted(bucket))
        result += [of_groups(step, groups), *_gathers([groups], step, draft)]
    rest = tuple(g for g in step.layers if not any(g in bucket for bucket in buckets))
    return [*result, of_groups(step, rest)] if rest else result


def sharded_groups(layout: Layout, rank: int) -> frozenset[int]:
    """The groups of a rank whose optimizer state is sharded: other ranks of the same replica hold them as copies, or
    not at all."""
    return frozenset(g for g in layout.trainable(rank) if len(layout.holders(g)) == layout.dp or layout.copied(g))


def _sliced(value: Value, sharded: frozenset[int], level: int) -> Value:
    """The slice that a STEP uses instead of a whole value."""
    sliced = ("grad", "optimizer_state", "param") if level == 3 else ("grad", "optimizer_state")
    if value.index not in sharded or value.kind not in sliced:
        return value
    return value._replace(kind={"optimizer_state": "optimizer_shard"}.get(value.kind, f"{value.kind}_shard"))


def _gather_parameters(row: Sequence[Instruction], draft: Draft, sharded: frozenset[int]) -> list[Instruction]:
    """A rank's instructions with parameters gathered ahead of their use, and freed after it."""
    prefetch = draft.plan.prefetch
    whole = {v for ins in row for v in ins.reads if v.kind == "param" and v.index in sharded}
    gathered: dict[tuple[int, int], list[int]] = {}  # place of a gather, place of the first use -> what is gathered
    last: list[tuple[int, Value]] = []
    for value, places in sorted(uses(row, whole).items()):
        for first, end in stays(row, places, prefetch):
            gathered.setdefault((max(0, first - prefetch), first), []).append(value.index)
            last.append((end, value))
    gathers = [
        (k, _all_gather(groups, draft.layout, row[first].step, param_shard))
        for (k, first), groups in sorted(gathered.items())
    ]
    return insert(also_free(row, last), before=gathers)


def _all_gather(groups: Sequence[int], layout: Layout, step: int, given: Callable[[int], Value]) -> Instruction:
    """The ALL_GATHER of whole parameters. `given` names what it reads: slices that are values of their own, or the
    whole parameters, of which each rank has updated its part."""
    parts = [Part(Op.ALL_GATHER, g, sum(layout.shape.groups[g].tensors)) for g in groups]
    ranks = layout.holders(groups[0])
    return collective(Op.ALL_GATHER, groups, ranks, step, map(given, groups), map(param, groups), parts)


def _rounds(row: Sequence[Instruction], draft: Draft, sharded: frozenset[int]) -> dict[int, dict[int, int]]:
    """For each sum of gradients, by micro-batch (-1: of all), the last instruction that adds to each group's
    gradient."""
    each = draft.plan.zero > 1 and draft.plan.reduce == "microbatch"
    rounds: dict[int, dict[int, int]] = {}
    for k, ins in enumerate(row):
        for value in ins.writes:
            if value.kind == "grad" and value.index in sharded:
                rounds.setdefault(ins.microbatch if each else -1, {})[value.index] = k
    return rounds


def _ends(done: Mapping[int, int], stage_of: Mapping[int, int]) -> dict[int, int]:
    """For each stage, the last instruction that completes one of its gradients.

    (The user's own schedule may forget a backward; the verifier reports that, not this pass.)
    """
    end = max(done.values())
    return {s: max([k for g, k in done.items() if stage_of[g] == s], default=end) for s in stage_of.values()}


def _buckets(row: Sequence[Instruction], draft: Draft, rank: int, sharded: frozenset[int]) -> list[list[int]]:
    """A rank's sharded groups in buckets, in the order in which backward completes their gradients.

    A bucket has groups of one stage only, because between two stages of a micro-batch the rank works on other
    micro-batches. The copies of a stage are on ranks that complete gradients in different orders. These ranks take late
    stages and layers first.
    """
    layout, table = draft.layout, draft.layout.shape.groups
    stage_of = {g: layout.stage_of(g) for g in sharded}
    done = next(iter(_rounds(row, draft, sharded).values()), {})
    if not done:
        return []
    ends = _ends(done, stage_of)

    def order(g: int) -> tuple[int, int, int]:
        return -stage_of[g], -min(table[g].layers) if layout.copied(g) else done.get(g, ends[stage_of[g]]), -g

    found: list[list[int]] = []
    for _, mine in groupby(sorted(sharded, key=order), key=stage_of.__getitem__):
        found += split_buckets(list(mine), table, draft.bucket)
    return found


def _scatter_gradients(
    row: Sequence[Instruction], draft: Draft, rank: int, buckets: Sequence[Sequence[int]]
) -> list[Instruction]:
    """A rank's instructions with REDUCE_SCATTERs, bucket by bucket; the rank keeps its slices of the summed
    gradients."""
    plan = draft.plan
    sharded = frozenset(g for bucket in buckets for g in bucket)
    stage_of = {g: draft.layout.stage_of(g) for g in sharded}
    messages: list[tuple[int, int, Sequence[int]]] = []  # place, micro-batch, groups
    for i, done in _rounds(row, draft, sharded).items():
        ends, before = _ends(done, stage_of), 0
        for groups in buckets:
            place = ends[stage_of[groups[0]]] if i >= 0 else max(done.values())
            if plan.overlap != "none":
                place = max(done.get(g, ends[stage_of[g]]) for g in groups)
            if draft.layout.copied(groups[0]):  # (in the order of buckets, which is the same on all ranks)
                place = before = max(place, before)
            while place + 1 < len(row) and row[place + 1].op is Op.ALL_GATHER:
                place += 1  # parameters are needed earlier than gradients
            messages.append((place, i, groups))

    started: list[tuple[Value, ...]] = []
    scatters: list[tuple[int, Instruction]] = []
    for place, i, groups in sorted(messages, key=itemgetter(0)):
        part = tuple(map(grad_shard, groups))
        waits = started[-IN_FLIGHT] if len(started) >= IN_FLIGHT and plan.zero > 1 else ()
        waits = (part if part in started else ()) + waits
        scatters.append((place, _reduce_scatter(groups, draft.layout, draft.step, i, waits)))
        started.append(part)
    return insert(row, after=scatters)


def _reduce_scatter(
    groups: Sequence[int], layout: Layout, step: int, microbatch: int, waits: tuple[Value, ...]
) -> Instruction:
    """The REDUCE_SCATTER of some gradients. It waits for the values in `waits`, and adds to those that are its own
    slices.
    """
    whole, part, room = tuple(map(grad, groups)), tuple(map(grad_shard, groups)), tuple(map(buffer, groups))
    parts = [Part(Op.REDUCE_SCATTER, -1, sum(sum(layout.shape.groups[g].tensors) for g in groups))]
    reads = dict.fromkeys(whole + waits)
    ranks = layout.holders(groups[0])
    return collective(Op.REDUCE_SCATTER, groups, ranks, step, reads, part + room, parts, whole + room, microbatch)
