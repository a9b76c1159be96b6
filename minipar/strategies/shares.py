"""Which server keeps which part of which tensor: the parameters are concatenated and cut into parts of equal bytes.

    tensors    |----- 0 -----|- 1 -|--------------------- 2 ---------------------|
    servers    |---------- 0 -----------|---------- 1 -----------|------- 2 ------|      tensor 2 is cut

Where ranks have shards of a tensor, all of its shards are cut at the same place. So every server has as much of each,
and ranks that share layers send and receive the same.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from minipar.program import Group, Instruction, Op, Part
from minipar.program.mesh import Mesh
from minipar.program.shape import Shape
from minipar.strategies.passes.compress import pushed_bytes

GRAIN = 16  # bytes: no cut is inside an element, whatever its type


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a tensor. They begin at byte `place` of what their server keeps."""

    tensor: int
    start: int
    stop: int
    place: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut(
    sizes: Sequence[int], servers: int, alignment: Sequence[int] = (), copies: Sequence[int] = ()
) -> list[list[Piece]]:
    """For each server, its pieces of tensors with these sizes in bytes, in order.

    alignment   for each tensor, what its `place` is a multiple of, if tensors of several types are stored together;
                default: 1 for all
    copies      how many tensors of each size there are, one after another, which are cut alike; default: 1 of each
    """
    total, number = sum(sizes), 0
    found: list[list[Piece]] = [[] for _ in range(servers)]
    before = 0
    place = [0] * servers
    for tensor, size in enumerate(sizes):
        ideal = [total * k // servers - before for k in range(1, servers)]
        edges = [0, *(size if at >= size else max(at, 0) // GRAIN * GRAIN for at in ideal), size]
        align, count = alignment[tensor] if alignment else 1, copies[tensor] if copies else 1
        for server, copy in product(range(servers), range(count)):
            start, stop = edges[server], edges[server + 1]
            if stop > start:
                at = -(-place[server] // align) * align
                found[server].append(Piece(number + copy, start, stop, at))
                place[server] = at + stop - start
        before, number = before + size, number + count
    return found


def message(op: Op, groups: Sequence[int], share: dict[int, int], step: int, peer: int) -> Instruction:
    """A PUSH, ACCEPT, REPLY or PULL: it moves the parts of some groups that one server keeps. `share` has their
    bytes."""
    here = tuple(g for g in groups if g in share)
    parts = tuple(Part(op, g, share[g]) for g in here)
    return Instruction(op, here, -1, step, stream=f"{op.value.lower()} {peer}", peer=peer, parts=parts)


Shares = list[dict[int, int]]  # for each server: parameter group -> bytes of it that the server keeps


def shares_of(groups: Sequence[Group], servers: int, sent: Callable[[int], int] = lambda size: size) -> Shares:
    """For each server, how many bytes of which parameter groups it keeps.

    sent   bytes of a piece -> those that are counted, such as what is sent of its gradient
    """
    owner = [(g, size) for g, group in enumerate(groups) for size in group.tensors]
    found: Shares = [{} for _ in range(servers)]
    for server, pieces in enumerate(cut([size for _, size in owner], servers)):
        for piece in pieces:
            g = owner[piece.tensor][0]
            found[server][g] = found[server].get(g, 0) + sent(piece.size)
    return found


def kept_shares(shares: Shares, groups: Sequence[Group], sharing: Mesh) -> Shares:
    """What servers keep, from what each rank has of it: of a group of which the ranks have shards, all shards.
    `sharing`: the axes along which ranks share layers."""
    return [{g: size * groups[g].shards(sharing) for g, size in share.items()} for share in shares]


def pushed_shares(shape: Shape, servers: int, choice: str) -> Shares:
    """For each server, the bytes in which a worker pushes its parts of gradients. `choice` is the plan's `compress`."""
    item = shape.itemsize
    return shares_of(shape.groups, servers, lambda size: pushed_bytes(size // item, item, choice))
