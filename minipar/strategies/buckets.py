"""Buckets: which parameter groups share a message, and how large a message is.

    bucket=none      [3][2][1][0]       one message per group          bucket=2x      [3 2][1 0]     two of equal size
    bucket=flat      [3 2 1 0]          one message for all            bucket=2,0     [3 2][1 0]     2 and 0 end one
    bucket=25        [3 2 1][0]         a bucket is full at 25 MiB

Sums of gradients, ZeRO, averages of parameters and parameter servers send their messages in buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from minipar.program import Group
from minipar.strategies.layout import Layout

MiB = 1 << 20
MOST = 64  # sizes that bucket=auto tries
Bucket = float | str | tuple[int, ...]  # size in MiB; "none", "flat", a number such as "4x"; layers


def split_buckets(groups: Sequence[int], table: Sequence[Group], bucket: Bucket) -> list[list[int]]:
    """The groups in runs, each of which is one message, as `bucket` says.

    If `bucket` names layers, a run ends with the gradient that the backward of such a layer completes.
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
    """The groups in `count` runs of about equal size, or in fewer runs if there are fewer groups."""
    buckets = []
    for left in range(min(count, len(groups)), 0, -1):
        share, size, k = sum(sizes[g] for g in groups) / left, 0, 0
        while k == 0 or (len(groups) - k >= left and size + sizes[groups[k]] / 2 <= share):
            size += sizes[groups[k]]
            k += 1
        buckets.append(groups if left == 1 else groups[:k])
        groups = groups[k:]
    return buckets


def shared(layout: Layout, groups: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """The groups that several ranks of the program hold, each with these ranks."""
    return {g: ranks for g in groups if len(ranks := layout.holders(g)) > 1}


def sizes(layout: Layout) -> list[float]:
    """Bucket sizes in MiB to try: the total size of the last group of a rank, of its last two groups, and so on."""
    found: set[int] = set()
    for rank in range(layout.pp):
        groups = sorted(shared(layout, layout.trainable(rank)), reverse=True)
        found.update(accumulate(sum(layout.shape.groups[g].tensors) for g in groups))
    tried = sorted(found - {0})
    if len(tried) > MOST:
        tried = sorted({tried[round(k * (len(tried) - 1) / (MOST - 1))] for k in range(MOST)})
    return [size / MiB for size in tried]
