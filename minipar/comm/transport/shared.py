"""Collectives in shared memory, without messages. Each function gives the steps of one rank (arena.py).

    allreduce      copy in | all add up everything                       small, or two ranks
                   copy in | each adds up its part | copy in | copy out  = reduce_scatter and all_gather

Sums add in the order of ranks, each element on one rank or on all in the same way: so all ranks have the same bits.
Tensors are cut into pieces that fit a slot; between writing a piece and reading it, the next is written. With four
buffers "in 4" waits only until all have done "out 0", so that ranks need not run in step:

    in 0 | in 1 | out 0 | in 2 | out 1 | in 3 | out 2 | in 4 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from minipar.comm.transport.arena import Arena, Posts
from minipar.comm.transport.calls import Steps

_AT_ONCE = 64 << 10  # bytes up to which every rank adds up everything: it waits once less, but reads more
PAIRWISE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_T = TypeVar("_T")


def combine(parts: Sequence[Tensor], op: str, out: Tensor) -> None:
    """Reduce two tensors or more, in order, into `out`, which may be one of the first two."""
    pairwise = PAIRWISE[op]
    pairwise(parts[0], parts[1], out=out)
    for part in parts[2:]:
        pairwise(out, part, out=out)


def _overlapped(
    arena: Arena,
    pieces: Iterable[_T],
    write: Callable[[int, _T], object],
    read: Callable[[int, _T], object],
) -> Steps:
    """Write each piece to the next buffer, write the piece after it, and then read the first one, once the others have
    written theirs. With its first piece a collective is announced."""
    before: tuple[int, int, _T] | None = None
    for piece in pieces:
        buffer, need = arena.take()
        yield need
        write(buffer, piece)
        number = arena.post()
        yield from arena.compare()
        if before is not None:
            yield from _read(arena, before, read)
        before = buffer, number, piece
    if before is not None:
        yield from _read(arena, before, read)
    else:  # no pieces at all
        arena.post()
        yield from arena.compare()


def _read(arena: Arena, written: tuple[int, int, _T], read: Callable[[int, _T], object]) -> Steps:
    buffer, number, piece = written
    yield Posts(arena, arena.others, number)
    read(buffer, piece)
    arena.free(buffer)


def _views(arena: Arena, piece: Tensor) -> list[list[Tensor]]:
    return arena.slots(piece.numel(), piece.dtype)


def allreduce(arena: Arena, x: Tensor, op: str = "sum") -> Steps:
    """Reduce a contiguous tensor in place."""
    pieces = x.detach().view(-1).split(arena.fits(x.dtype)) if x.numel() else ()
    if arena.count > 2 and x.numel() * x.element_size() > _AT_ONCE:
        return _in_two(arena, x.detach().view(-1), op)
    me = arena.index

    def write(buffer: int, piece: Tensor) -> None:
        _views(arena, piece)[buffer][me].copy_(piece)

    def read(buffer: int, piece: Tensor) -> None:
        parts = _views(arena, piece)[buffer]
        combine([piece, parts[1 - me]] if len(parts) == 2 else parts, op, piece)  # a + b = b + a, to the bit

    return _overlapped(arena, pieces, write, read)


def _in_two(arena: Arena, x: Tensor, op: str) -> Steps:
    sizes = share(x.numel(), arena.count)
    mine = x.split(sizes)[arena.index]
    yield from reduce_scatter(arena, x, mine, sizes, op)
    yield from all_gather(arena, x, sizes)


def broadcast(arena: Arena, x: Tensor, root: int) -> Steps:
    """Give a contiguous tensor of member `root` to all."""
    return all_gather(arena, x, [x.numel() if k == root else 0 for k in arena.everyone])


def all_gather(arena: Arena, into: Tensor, sizes: Sequence[int]) -> Steps:
    """Collect the members' parts, of these numbers of elements, end to end; this one's is at its place already."""
    whole, starts = into.detach().view(-1), _starts(sizes)
    most = arena.fits(into.dtype)
    me = arena.index

    def part(k: int, first: int) -> Tensor:
        return whole[starts[k] + min(first, sizes[k]) : starts[k] + min(first + most, sizes[k])]

    def write(buffer: int, first: int) -> None:
        mine = part(me, first)
        _views(arena, mine)[buffer][me].copy_(mine)

    def read(buffer: int, first: int) -> None:
        for k in arena.others:
            target = part(k, first)
            target.copy_(_views(arena, target)[buffer][k])

    return _overlapped(arena, range(0, max(sizes), most), write, read)


def reduce_scatter(
    arena: Arena, x: Tensor, into: Tensor, sizes: Sequence[int], op: str = "sum", add: bool = False
) -> Steps:
    """Reduce a contiguous tensor, each member keeping its part (of these sizes) in `into`; added to it if `add`.
    `into` may be that part of the tensor."""
    whole, starts, out = x.detach().view(-1), _starts(sizes), into.detach().view(-1)
    in_place = out.data_ptr() == whole[starts[arena.index] :].data_ptr()
    through = arena.everyone if in_place else arena.others  # (in place, own elements are overwritten too early)
    most = arena.fits(x.dtype, arena.count)
    me = arena.index

    def length(k: int, first: int) -> int:
        return max(0, min(most, sizes[k] - first))

    def write(buffer: int, first: int) -> None:
        room = arena.slots(most * arena.count, x.dtype)[buffer][me]
        for k in through:
            size, start = length(k, first), starts[k] + first
            if size:
                room[k * most : k * most + size].copy_(whole[start : start + size])

    def read(buffer: int, first: int) -> None:
        size = length(me, first)
        if not size:
            return
        rooms = arena.slots(most * arena.count, x.dtype)[buffer]
        parts = [room[me * most : me * most + size] for room in rooms]
        if not in_place:
            parts[me] = whole[starts[me] + first :][:size]
        add_up(parts, op, out[first : first + size], add)

    return _overlapped(arena, range(0, max(sizes), most), write, read)


def add_up(parts: Sequence[Tensor], op: str, out: Tensor, add: bool = False) -> None:
    """Reduce parts in their order into `out`, in its precision; if `add`, together with what `out` has."""
    if not add and len(parts) > 1 and parts[0].dtype == out.dtype and parts[0].device == out.device:
        combine(parts, op, out)
        return
    if not add:
        out.copy_(parts[0])
    for part in parts if add else parts[1:]:
        PAIRWISE[op](out, part.to(out.device), out=out)


def all_to_all(arena: Arena, x: Tensor, into: Tensor, sizes: Sequence[Sequence[int]]) -> Steps:
    """Member k's part for member j has sizes[k][j] elements; in `into`, the parts for this member are end to end."""
    me, count = arena.index, arena.count
    most = arena.fits(x.dtype, count)
    sent, got = _starts(sizes[me]), _starts([row[me] for row in sizes])

    def length(k: int, j: int, first: int) -> int:
        return max(0, min(most, sizes[k][j] - first))

    def write(buffer: int, first: int) -> None:
        room = arena.slots(most * count, x.dtype)[buffer][me]
        for k in range(count):
            size = length(me, k, first)
            if size:
                room[k * most : k * most + size].copy_(x[sent[k] + first :][:size])

    def read(buffer: int, first: int) -> None:
        rooms = arena.slots(most * count, x.dtype)[buffer]
        for k in range(count):
            size = length(k, me, first)
            if size:
                into[got[k] + first :][:size].copy_(rooms[k][me * most : me * most + size])

    return _overlapped(arena, range(0, max(map(max, sizes)), most), write, read)


def rows(arena: Arena, mine: Sequence[int]) -> Steps:
    """The numbers that each member brings, of all of them; each brings as many."""
    count = len(mine)
    whole = torch.zeros(arena.count, count, dtype=torch.int64)
    whole[arena.index] = torch.tensor(mine, dtype=torch.int64)
    yield from all_gather(arena, whole, [count] * arena.count)
    return whole.tolist()


def share(count: int, ranks: int) -> list[int]:
    """How many of `count` elements or rows each rank has: as evenly as possible, the first ranks may have one more."""
    return [count // ranks + (k < count % ranks) for k in range(ranks)]


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]
