"""ZeRO: the replicas share out the optimizer state (zero=1), then also the gradients (2), then also the parameters (3).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

    one group's parameters, concatenated   [ weight . . . . . . . | bias . 0 ]     N = 2 ranks: a half each
                                             slice of rank 0        slice of rank 1

            held between steps             one step                                        sent, times P (N-1)/N
    zero=0  param, optimizer_state         F0 F1 B1 B0 | all-reduce | STEP                 2
    zero=1  param, optimizer_shard         F0 F1 B1 B0 | RS1 RS0 | STEP a slice | AG0 AG1  2
    zero=2  param, optimizer_shard         F0 F1 B1 RS1 B0 RS0   | STEP a slice | AG0 AG1  2
    zero=3  param_shard, optimizer_shard   AG0 F0 AG1 F1 B1 RS1 AG0 B0 RS0 | STEP a slice  3, less the AG1 not needed

RS (REDUCE_SCATTER) sums gradients and leaves each rank its slice. AG (ALL_GATHER) makes whole parameters from slices.
The peak memory of gradients: in zero=1 all whole gradients; in zero=2 and 3 the buckets that are under way, and the
slices.

With A micro-batches, `reduce="microbatch"` sums gradients after each of them. Then zero=2 sends (A + 1) P and zero=3
sends 3 A P, and no rank holds all whole gradients. `reduce="step"` first adds up gradients on each rank. Then zero=2
sends 2 P and zero=3 sends (2 A + 1) P, but each rank needs the memory of whole gradients. zero=1 always needs this
memory, and always sums after the last micro-batch.

In zero=3 the parameters of a layer are gathered before each of its forwards, backwards and recomputations, `prefetch`
layers ahead, and freed after it. They are not freed if no more than `prefetch` other layers work before their next use,
for example where the backward follows the forward. So `prefetch` + 1 layers are whole at a time, and where forward ends
and backward begins, as many gathers are saved.

A group that is tied between stages stays whole and is summed by an all-reduce, because its slices would belong to ranks
with different work. Frozen parameters stay whole, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise

from minipar.program import Instruction, Op, Part, Value, buffer, grad, grad_shard, optimizer_shard, param, param_shard
from minipar.strategies.buckets import split_buckets
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import also_free, collective, insert, renamed, uses

IN_FLIGHT = 1  # buckets of gradients under way at the same time, each with its buffer; the next bucket waits


def shard(draft: Draft) -> Draft:
    """Replicas share out optimizer states; with zero=2 and 3 gradients, too, and with 3 parameters."""
    layout, level = draft.layout, draft.plan.zero
    sharded = [sharded_groups(layout, rank) for rank in range(layout.pp)]

    def rewrite(rank: int, row: Sequence[Instruction]) -> Sequence[Instruction]:
        if level == 3:
            row = _gather_parameters(row, draft, sharded[rank])
        return _scatter_gradients(row, draft, rank, sharded[rank]) if sharded[rank] else row

    def update(rank: int, row: Sequence[Instruction]) -> list[Instruction]:
        """STEP on slices. In zero=1 and 2 parameters are gathered after it, in the order in which forward needs
        them."""
        after: list[Instruction] = []
        if level < 3:
            buckets = split_buckets(sorted(sharded[rank]), layout.shape.groups, draft.bucket)
            after = [_all_gather(groups, layout, draft.step, param) for groups in buckets]
        return [each for ins in row for each in (renamed(ins, lambda v: _sliced(v, sharded[rank], level)), *after)]

    draft = draft.each(rewrite).each_update(update)
    return draft.each_state(lambda rank, held: [_sliced(value, sharded[rank], level) for value in held])


def sharded_groups(layout: Layout, rank: int) -> frozenset[int]:
    """The groups of a rank whose optimizer state is sharded: no other rank of the same replica holds them."""
    return frozenset(g for g in layout.trainable(rank) if len(layout.holders(g)) == layout.dp)


def _sliced(value: Value, sharded: frozenset[int], level: int) -> Value:
    """The slice that a STEP uses instead of a whole value."""
    if value.index not in sharded:
        return value
    slices = {"grad": grad_shard, "optimizer_state": optimizer_shard}
    if level == 3:
        slices["param"] = param_shard
    return slices[value.kind](value.index) if value.kind in slices else value


def _gather_parameters(row: Sequence[Instruction], draft: Draft, sharded: frozenset[int]) -> list[Instruction]:
    """A rank's instructions with parameters gathered ahead of their use, and freed after it."""
    prefetch = draft.plan.prefetch
    before: dict[int, dict[int, list[int]]] = {}  # place of a gather -> place of the first use -> groups
    after: dict[int, list[Value]] = {}
    for value, places in sorted(uses(row, set(map(param, sharded))).items()):
        first = places[0]
        for k, then in pairwise([*places, len(row)]):
            if then == len(row) or not _soon(row, k, then, prefetch):
                before.setdefault(max(0, first - prefetch), {}).setdefault(first, []).append(value.index)
                after.setdefault(k, []).append(value)
                first = then
    gathers = {
        k: [_all_gather(groups, draft.layout, draft.step, param_shard) for _, groups in sorted(found.items())]
        for k, found in before.items()
    }
    return insert(also_free(row, after), gathers)


def _soon(row: Sequence[Instruction], k: int, then: int, prefetch: int) -> bool:
    """Whether no more than `prefetch` layers work between two instructions."""
    others: set[tuple[int, ...]] = set()
    for between in range(k + 1, then):
        others.add(row[between].layers)
        if len(others) > prefetch:
            return False
    return True


def _all_gather(groups: Sequence[int], layout: Layout, step: int, given: Callable[[int], Value]) -> Instruction:
    """The ALL_GATHER of whole parameters. `given` names what it reads: slices that are values of their own, or the
    whole parameters, of which each rank has updated its part."""
    parts = [Part(Op.ALL_GATHER, g, sum(layout.shape.groups[g].tensors)) for g in groups]
    ranks = layout.holders(groups[0])
    return collective(Op.ALL_GATHER, groups, ranks, step, map(given, groups), map(param, groups), parts)


def _scatter_gradients(
    row: Sequence[Instruction], draft: Draft, rank: int, sharded: frozenset[int]
) -> list[Instruction]:
    """A rank's instructions with REDUCE_SCATTERs, bucket by bucket; the rank keeps its slices of the summed
    gradients."""
    layout, plan = draft.layout, draft.plan
    each = plan.zero > 1 and plan.reduce == "microbatch"
    rounds: dict[int, dict[int, int]] = {}  # micro-batch -> group -> the last instruction that adds to its gradient
    for k, ins in enumerate(row):
        for value in ins.writes:
            if value.kind == "grad" and value.index in sharded:
                rounds.setdefault(ins.microbatch if each else -1, {})[value.index] = k
    after: dict[int, list[tuple[int, list[int]]]] = {}
    chunk_of = {g: layout.chunk_of(g, rank) for g in sharded}
    buckets: list[list[int]] = []
    for i, done in rounds.items():
        # (the user's own schedule may forget a backward; the verifier reports that, not this pass)
        end = max(done.values())
        ends = {c: max([k for g, k in done.items() if chunk_of[g] == c], default=end) for c in chunk_of.values()}
        done |= {g: ends[chunk_of[g]] for g in sharded if g not in done}
        if not buckets:
            # Buckets are in the order in which backward completes the gradients. A bucket has groups of one chunk only,
            # because between two chunks of a micro-batch the rank works on other micro-batches.
            ready = sorted(sharded, key=lambda g: (-chunk_of[g], done[g], -g))
            for _, mine in groupby(ready, key=chunk_of.__getitem__):
                buckets += split_buckets(list(mine), layout.shape.groups, draft.bucket)
        for groups in buckets:
            place = ends[chunk_of[groups[0]]] if each else end
            if plan.overlap == "backward" and plan.zero > 1:
                place = max(done[g] for g in groups)
            while place + 1 < len(row) and row[place + 1].op is Op.ALL_GATHER:
                place += 1  # parameters are needed earlier than gradients
            after.setdefault(place, []).append((i, groups))

    started: list[tuple[Value, ...]] = []
    scatters: dict[int, list[Instruction]] = {}
    for k, messages in sorted(after.items()):
        for i, groups in messages:
            part = tuple(map(grad_shard, groups))
            waits = started[-IN_FLIGHT] if len(started) >= IN_FLIGHT else ()
            scatters.setdefault(k, []).append(
                _reduce_scatter(groups, layout, draft.step, i, (part if part in started else ()) + waits)
            )
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
