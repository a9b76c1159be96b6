"""Data parallelism by allreduce: every replica computes gradients of its rows; their sum is what one device would get.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.

    bucket=none                 bucket=flat                  bucket=25 (MiB), overlapped with backward
    B 3 | AR 3 (per tensor)     B 3 | B 2 | B 1 | B 0        B 3 | B 2 | AR {3,2}  starts here ...
    B 2 | AR 2                  AR {0,1,2,3} in one buffer   B 1 | B 0 | AR {1,0}  ... while these run
    ...                         STEP                         STEP waits for both

The same pass sums the gradients of a tied set over the stages that hold it, and those of the copies of a stage, as soon
as its last backward is done:

    p=4, both ways   rank 0   ... b2 | B1 | AR of stage 3 with rank 3 starts here | B3 | AR of stage 0 | STEP

No gradient is ever divided: the loss of
each micro-batch was scaled by its share of the rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import groupby

from minipar.program import Group, Instruction, Op, Part, grad
from minipar.strategies.layout import Layout

MiB = 1 << 20
Bucket = float | str | tuple[int, ...]  # size in MiB; "none", "flat", a number such as "4x"; layers


def reduced_groups(layout: Layout, stage: int, sharded: Container[int] = ()) -> dict[int, tuple[int, ...]]:
    """The parameter groups of a stage whose gradients other ranks share whole, with those ranks."""
    holders = {k: layout.holders(k) for k in layout.trainable(stage) if k not in sharded}
    return {k: ranks for k, ranks in holders.items() if len(ranks) > 1}


def kept_gradients(layout: Layout, stage: int, bucket: Bucket, sharded: Container[int] = ()) -> frozenset[int]:
    """Groups whose gradients live in a communication buffer that stays from step to step."""
    return frozenset() if bucket == "none" else frozenset(reduced_groups(layout, stage, sharded))


def all_reduce_gradients(
    instructions: Sequence[Instruction],
    layout: Layout,
    stage: int,
    step: int,
    bucket: Bucket,
    overlap: bool,
    sharded: Container[int] = (),
) -> list[Instruction]:
    """One stage's instructions with the collectives that sum its gradients, each after the last backward it needs.

    bucket    "none": one message per parameter tensor; otherwise buckets as `split_buckets` makes them
    overlap   start a bucket as soon as it is full; otherwise all of them after the last backward
    sharded   groups that another pass takes care of
    """
    sharing = reduced_groups(layout, stage, sharded)
    if not sharing:
        return list(instructions)
    end = len(instructions) - 1
    # (a schedule of the user's own may forget a backward; the verifier says so, not this pass)
    last_use = dict.fromkeys(sharing, end)
    last_use |= {value.index: k for k, ins in enumerate(instructions) for value in ins.writes if value.kind == "grad"}
    ready = sorted(sharing, key=lambda g: (last_use[g], -g))  # in the order in which backward completes them
    own = {layout.rank(r, stage) for r in range(layout.dp)}
    within = [g for g in ready if own.issuperset(sharing[g])]
    # A set tied between stages completes in another order on each of them: one bucket, in one agreed order, at the end.
    copied = [g for g in sharing if overlap and g not in within and layout.copied(g)]
    across = [g for g in sharing if g not in within and g not in copied]

    buckets = split_buckets(within, layout.shape.groups, bucket)
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for g in sorted(across):
        by_ranks.setdefault(sharing[g], []).append(g)
    after: dict[int, list[Instruction]] = {}
    for groups in buckets:
        position = max(last_use[g] for g in groups) if overlap else end
        after.setdefault(position, []).append(reduce_groups(groups, layout, sharing[groups[0]], step, bucket))
    for groups, position in _copies(copied, layout, sharing, last_use, bucket):
        after.setdefault(position, []).append(reduce_groups(groups, layout, sharing[groups[0]], step, bucket))
    for ranks, groups in sorted(by_ranks.items()):
        after.setdefault(end, []).append(reduce_groups(groups, layout, ranks, step, bucket))

    result = []
    for k, ins in enumerate(instructions):
        result.append(ins)
        result += after.get(k, [])
    return result


def _copies(
    groups: Sequence[int],
    layout: Layout,
    sharing: Mapping[int, tuple[int, ...]],
    last_use: Mapping[int, int],
    bucket: Bucket,
) -> Iterator[tuple[list[int], int]]:
    """Buckets of gradients of copied stages, and after which instruction each of them is summed.

    A bucket is of one stage. Late stages come first on all ranks that share them, wherever they complete.
    """

    ready = sorted(groups, key=lambda g: (sharing[g], -min(layout.shape.groups[g].layers), -g))
    for _, stages in groupby(ready, key=sharing.__getitem__):
        position = 0
        for _, stage in groupby(stages, key=layout.stage_of):
            for members in split_buckets(list(stage), layout.shape.groups, bucket):
                position = max(position, *(last_use[g] for g in members))
                yield members, position


def split_buckets(groups: Sequence[int], table: Sequence[Group], bucket: Bucket) -> list[list[int]]:
    """Groups in runs: "none", one each; "flat", all in one; a size; "4x", four of about one size; layers that end one.

    Where a run ends by layers, it ends behind the gradient that is complete after the backward of such a layer.
    """
    sizes = {g: sum(table[g].tensors) for g in groups}
    if isinstance(bucket, tuple):
        nth = {g: sum(min(table[g].layers) < last for last in bucket) for g in groups}
        return [list(run) for _, run in groupby(groups, nth.__getitem__)]
    if isinstance(bucket, str) and bucket.endswith("x"):
        return _so_many(list(groups), sizes, int(bucket[:-1]))
    limit = {"none": 0.0, "flat": float("inf")}[bucket] if isinstance(bucket, str) else bucket * MiB
    buckets: list[list[int]] = []
    size = float("inf")
    for g in groups:
        if size >= limit:
            buckets.append([])
            size = 0.0
        buckets[-1].append(g)
        size += sizes[g]
    return buckets


def _so_many(groups: list[int], sizes: dict[int, int], count: int) -> list[list[int]]:
    """Groups in `count` runs of about equal size, fewer where there are fewer groups."""
    buckets = []
    for left in range(min(count, len(groups)), 0, -1):
        share, size, k = sum(sizes[g] for g in groups) / left, 0, 0
        while k == 0 or (len(groups) - k >= left and size + sizes[groups[k]] / 2 <= share):
            size += sizes[groups[k]]
            k += 1
        buckets.append(groups if left == 1 else groups[:k])
        groups = groups[k:]
    return buckets


def reduce_groups(
    groups: Sequence[int], layout: Layout, ranks: tuple[int, ...], step: int, bucket: Bucket
) -> Instruction:
    tensors = [(g, size) for g in groups for size in layout.shape.groups[g].tensors]
    if bucket == "none":
        parts = tuple(Part(Op.ALL_REDUCE, g, size) for g, size in tensors)
    else:
        parts = (Part(Op.ALL_REDUCE, -1, sum(size for _, size in tensors)),)
    values = tuple(grad(g) for g in groups)
    stream = "group " + ",".join(map(str, ranks))
    return Instruction(Op.ALL_REDUCE, tuple(groups), -1, step, values, values, stream=stream, group=ranks, parts=parts)
