"""ZeRO: the replicas hold one optimizer state together, instead of one each; then one gradient; then one model.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.

    one group's parameters, end to end     [ weight . . . . . . . | bias . 0 ]     N = 2 ranks: a half each
                                             slice of rank 0        slice of rank 1

            held between steps             one step                                        sent, times P (N-1)/N
    zero=0  param, optimizer_state         F0 F1 B1 B0 | all-reduce | STEP                 2
    zero=1  param, optimizer_shard         F0 F1 B1 B0 | RS1 RS0 | STEP a slice | AG0 AG1  2
    zero=2  param, optimizer_shard         F0 F1 B1 RS1 B0 RS0   | STEP a slice | AG0 AG1  2
    zero=3  param_shard, optimizer_shard   AG0 F0 AG1 F1 B1 RS1 AG0 B0 RS0 | STEP a slice  3, less the AG1 not needed

RS (REDUCE_SCATTER) sums gradients and leaves each rank its slice; AG (ALL_GATHER) puts the slices together. Peak of the
gradients: whole in zero=1; in zero=2 and 3 those of the buckets on their way, and the slice.

With A micro-batches `reduce="microbatch"` sums after each of them: (A + 1) P is sent in zero=2, 3 A P in zero=3, and
whole gradients never add up. `reduce="step"` adds them up on each rank first: 2 P and (2 A + 1) P, for the memory of
whole gradients. zero=1 has these anyway, and always waits for the last micro-batch.

In zero=3 a layer's groups are gathered before each of its forwards, backwards and recomputations, `prefetch` layers
ahead, and freed after it; not where no more than `prefetch` other layers work before the next use, as at the turn from
forward to backward: so `prefetch` + 1 layers are whole at a time, and at each turn as many gathers are spared.

A group that is tied between stages stays whole, with an all-reduce (its slices would belong to ranks with different
work); frozen parameters stay whole, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from minipar.program import (
    Instruction,
    Op,
    Part,
    Value,
    buffer,
    grad,
    grad_shard,
    optimizer_shard,
    param,
    param_shard,
)
from minipar.strategies.layout import Layout
from minipar.strategies.passes.data_parallel import Bucket, split_buckets

IN_FLIGHT = 1  # buckets of gradients that are on their way at once, each with its buffer; the next one waits for it


@dataclass(frozen=True)
class Zero:
    """What is sharded, and when it moves; see `Plan`. `overlap`: sum a bucket as soon as its gradients are there."""

    level: int = 0
    reduce: str = "microbatch"
    prefetch: int = 1
    bucket: Bucket = 25
    overlap: bool = True


def sharded_groups(layout: Layout, stage: int, zero: Zero) -> frozenset[int]:
    """The groups of a stage whose optimizer state is sharded: those that each replica holds on one rank, this one."""
    if zero.level == 0 or layout.dp == 1:
        return frozenset()
    return frozenset(g for g in layout.trainable(stage) if len(layout.holders(g)) == layout.dp)


def state_of(state: Iterable[Value], sharded: frozenset[int], zero: Zero) -> frozenset[Value]:
    """What a rank holds between steps, given what it would hold without ZeRO."""
    return frozenset(_sliced(value, sharded, zero) for value in state)


def _sliced(value: Value, sharded: frozenset[int], zero: Zero) -> Value:
    """The slice that a STEP uses instead of a whole value."""
    if value.index not in sharded:
        return value
    slices = {"grad": grad_shard, "optimizer_state": optimizer_shard}
    if zero.level == 3:
        slices["param"] = param_shard
    return slices[value.kind](value.index) if value.kind in slices else value


def shard(instructions: Sequence[Instruction], layout: Layout, stage: int, step: int, zero: Zero) -> list[Instruction]:
    """One stage's instructions, a layer each, with the collectives of ZeRO up to the last backward."""
    sharded = sharded_groups(layout, stage, zero)
    if not sharded:
        return list(instructions)
    if zero.level == 3:
        instructions = _gather_parameters(instructions, layout, sharded, step, zero.prefetch)
    return _scatter_gradients(instructions, layout, stage, sharded, step, zero)


def finish(instructions: Sequence[Instruction], layout: Layout, stage: int, zero: Zero) -> list[Instruction]:
    """STEP on slices; in zero=1 and 2 the parameters are gathered after it, those that forward needs first first."""
    sharded = sharded_groups(layout, stage, zero)
    result: list[Instruction] = []
    for ins in instructions:
        reads, writes, frees = (
            tuple(_sliced(value, sharded, zero) for value in values) for values in (ins.reads, ins.writes, ins.frees)
        )
        result.append(ins._replace(reads=reads, writes=writes, frees=frees))
        if zero.level < 3:
            for groups in split_buckets(sorted(sharded), layout.shape.groups, zero.bucket):
                result.append(_all_gather(groups, layout, ins.step, zero))
    return result


def _gather_parameters(
    instructions: Sequence[Instruction], layout: Layout, sharded: frozenset[int], step: int, prefetch: int
) -> list[Instruction]:
    uses: dict[int, list[int]] = {}  # group -> the instructions that need it
    for k, ins in enumerate(instructions):
        for value in ins.reads:
            if value.kind == "param" and value.index in sharded:
                uses.setdefault(value.index, []).append(k)
    before: dict[int, dict[int, list[int]]] = {}  # where a gather begins -> the first use of what it gathers -> groups
    after: dict[int, list[Value]] = {}
    for g, places in sorted(uses.items()):
        first = places[0]
        for k, then in pairwise([*places, len(instructions)]):
            if then == len(instructions) or not _soon(instructions, k, then, prefetch):
                before.setdefault(max(0, first - prefetch), {}).setdefault(first, []).append(g)
                after.setdefault(k, []).append(param(g))
                first = then
    result = []
    for k, ins in enumerate(instructions):
        for _, groups in sorted(before.get(k, {}).items()):
            result.append(_all_gather(groups, layout, step, Zero(3)))
        result.append(ins._replace(frees=(*ins.frees, *after[k])) if k in after else ins)
    return result


def _soon(instructions: Sequence[Instruction], k: int, then: int, prefetch: int) -> bool:
    """Whether no more than `prefetch` layers work between two instructions."""
    others: set[tuple[int, ...]] = set()
    for between in range(k + 1, then):
        others.add(instructions[between].layers)
        if len(others) > prefetch:
            return False
    return True


def _all_gather(groups: Sequence[int], layout: Layout, step: int, zero: Zero) -> Instruction:
    slices = tuple((param_shard if zero.level == 3 else param)(g) for g in groups)
    parts = tuple(Part(Op.ALL_GATHER, g, sum(layout.shape.groups[g].tensors)) for g in groups)
    wholes = tuple(param(g) for g in groups)
    return _collective(Op.ALL_GATHER, groups, layout, -1, step)._replace(reads=slices, writes=wholes, parts=parts)


def _collective(op: Op, groups: Sequence[int], layout: Layout, microbatch: int, step: int) -> Instruction:
    ranks = layout.holders(groups[0])
    return Instruction(op, tuple(groups), microbatch, step, stream="group " + ",".join(map(str, ranks)), group=ranks)


def _scatter_gradients(
    instructions: Sequence[Instruction], layout: Layout, stage: int, sharded: frozenset[int], step: int, zero: Zero
) -> list[Instruction]:
    each = zero.level > 1 and zero.reduce == "microbatch"
    rounds: dict[int, dict[int, int]] = {}  # micro-batch -> group -> the last instruction that adds to its gradient
    for k, ins in enumerate(instructions):
        for value in ins.writes:
            if value.kind == "grad" and value.index in sharded:
                rounds.setdefault(ins.microbatch if each else -1, {})[value.index] = k
    after: dict[int, list[tuple[int, list[int]]]] = {}
    chunk_of = {g: layout.chunk_of(g, stage) for g in sharded}
    buckets: list[list[int]] = []
    for i, done in rounds.items():
        # (a schedule of the user's own may forget a backward; the verifier says so, not this pass)
        end = max(done.values())
        ends = {c: max([k for g, k in done.items() if chunk_of[g] == c], default=end) for c in chunk_of.values()}
        done |= {g: ends[chunk_of[g]] for g in sharded if g not in done}
        if not buckets:
            # In the order in which backward completes them, and each bucket of one chunk: between two chunks of a
            # micro-batch come those of others.
            ready = sorted(sharded, key=lambda g: (-chunk_of[g], done[g], -g))
            for _, mine in groupby(ready, key=chunk_of.__getitem__):
                buckets += split_buckets(list(mine), layout.shape.groups, zero.bucket)
        for groups in buckets:
            place = ends[chunk_of[groups[0]]] if each else end
            if zero.overlap and zero.level > 1:
                place = max(done[g] for g in groups)
            while place + 1 < len(instructions) and instructions[place + 1].op is Op.ALL_GATHER:
                place += 1  # parameters are needed sooner than gradients
            after.setdefault(place, []).append((i, groups))

    result: list[Instruction] = []
    started: list[tuple[Value, ...]] = []
    for k, ins in enumerate(instructions):
        result.append(ins)
        for i, groups in after.get(k, ()):
            whole, part = tuple(map(grad, groups)), tuple(map(grad_shard, groups))
            room = tuple(map(buffer, groups))
            waits = started[-IN_FLIGHT] if len(started) >= IN_FLIGHT else ()
            reads = dict.fromkeys(whole + (part if part in started else ()) + waits)
            size = sum(sum(layout.shape.groups[g].tensors) for g in groups)
            found = _collective(Op.REDUCE_SCATTER, groups, layout, i, step)
            found = found._replace(reads=tuple(reads), writes=part + room, frees=whole + room)
            result.append(found._replace(parts=(Part(Op.REDUCE_SCATTER, -1, size),)))
            started.append(part)
    return result
