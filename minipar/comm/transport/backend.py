"""The backend's own collectives (gloo or NCCL), with the arguments of those in shared memory (shared.py).

gloo's reduce-scatter is an all-reduce of which a slice is kept: that sends twice the bytes. Here an all-to-all gives
every rank the parts for it, which it adds up. gloo's all-gather copies the whole tensor, and needs equal parts. Here
every rank broadcasts its part: the same bytes, in less than half the time.

Neither knows all dtypes: int16 is summed as int32, whose low bits are the same; what is only moved goes as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm.transport.shared import add_up
from minipar.comm.values import as_bytes

_OPERATIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_WIDER = {torch.int16: torch.int32}


def allreduce(group: Any, index: int, x: Tensor, op: str = "sum") -> Any:
    """Reduce a contiguous tensor in place."""
    wide = x.to(_WIDER.get(x.dtype, x.dtype))
    return _narrowed(group.allreduce([wide], _OPERATIONS.get(op, dist.ReduceOp.SUM)), wide, x)


def _narrowed(work: Any, wide: Tensor, x: Tensor) -> Any:
    """A work on `wide`, which is a copy of `x` in a wider dtype, or `x` itself; the result gets into `x`."""
    return work if wide is x else _Works([work], lambda: x.copy_(wide))


def broadcast(group: Any, index: int, x: Tensor, root: int) -> Any:
    """Give a contiguous tensor of member `root` to all."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([as_bytes(x)], options)


def all_gather(group: Any, index: int, into: Tensor, sizes: Sequence[int]) -> Any:
    """Collect the members' parts, of these sizes, end to end; this one's is at its place already."""
    if into.is_cuda and len(set(sizes)) == 1:
        return group._allgather_base(as_bytes(into), as_bytes(into.split(sizes[0])[index]))
    parts = into.view(-1).split(list(sizes))
    return _Works([broadcast(group, index, part, k) for k, part in enumerate(parts) if part.numel()])


def reduce_scatter(
    group: Any, index: int, x: Tensor, into: Tensor, sizes: Sequence[int], op: str = "sum", add: bool = False
) -> Any:
    """Reduce a contiguous tensor, each member keeping its part (of these sizes) in `into`; added to it if `add`."""
    mine, whole = sizes[index], x.view(-1)
    if x.is_cuda and len(set(sizes)) == 1:
        parts = torch.empty(mine, dtype=x.dtype, device=x.device)
        work = group._reduce_scatter_base(parts, whole)
        count = 1
    else:
        count = len(sizes)
        parts = torch.empty(mine * count, dtype=x.dtype, device=x.device)
        work = _exchange(group, parts, whole, [mine] * count, sizes)
    return _Works([work], lambda: add_up(list(parts.view(count, mine)), op, into.view(-1), add))


def all_to_all(group: Any, index: int, x: Tensor, into: Tensor, sizes: Sequence[Sequence[int]]) -> Any:
    """Member k's part for member j has sizes[k][j] elements; in `into`, the parts for this member are end to end."""
    return _exchange(group, into, x, [row[index] for row in sizes], sizes[index])


def _exchange(group: Any, into: Tensor, x: Tensor, got: Sequence[int], sent: Sequence[int]) -> Any:
    """Send so many elements to each member, and get so many of each."""
    size = x.element_size()
    return group.alltoall_base(as_bytes(into), as_bytes(x), [n * size for n in got], [n * size for n in sent])


class _Works:
    """Some works as one, and a function that `wait` calls after them."""

    def __init__(self, works: list[Any], rest: Callable[[], object] = lambda: None) -> None:
        self.works = works
        self.rest: Callable[[], object] | None = rest

    def wait(self, *limit: timedelta) -> None:
        for work in self.works:
            work.wait(*limit)
        rest, self.rest = self.rest, None
        if rest is not None:
            rest()

    def synchronize(self) -> None:
        for work in self.works:
            work.synchronize()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self.works])
