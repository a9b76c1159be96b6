"""Which server keeps which part of which tensor: the parameters are concatenated and cut into parts of equal bytes.

    tensors    |----- 0 -----|- 1 -|--------------------- 2 ---------------------|
    servers    |---------- 0 -----------|---------- 1 -----------|------- 2 ------|      tensor 2 is cut

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from minipar.errors import PlanError
from minipar.program import Group, Value, residual
from minipar.program.shape import Shape
from minipar.strategies.passes.compress import keeps_residual, pushed_bytes

GRAIN = 16  # bytes: no cut is inside an element, whatever its type


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a tensor. They begin at byte `place` of the line of all tensors."""

    tensor: int
    start: int
    stop: int
    place: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut(sizes: Sequence[int], servers: int, alignment: Sequence[int] = ()) -> list[list[Piece]]:
    """For each server, its pieces of tensors with these sizes in bytes, in order.

    alignment   for each tensor, what its place in the line is a multiple of, if tensors of several types are stored
                together; default: 1 for all
    """
    total = sum(sizes)
    found: list[list[Piece]] = [[] for _ in range(servers)]
    before = place = 0
    for tensor, size in enumerate(sizes):
        ideal = [total * k // servers - before for k in range(1, servers)]
        edges = [0, *(size if at >= size else max(at, 0) // GRAIN * GRAIN for at in ideal), size]
        align = alignment[tensor] if alignment else 1
        place = -(-place // align) * align
        for server in range(servers):
            start, stop = edges[server], edges[server + 1]
            if stop > start:
                found[server].append(Piece(tensor, start, stop, place + start))
        before += size
        place += size
    return found


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


def checked_shares(groups: Sequence[Group], servers: int) -> Shares:
    """Which server has which part of the parameters. Errors: PlanError if a server would have none."""
    nothing = [group.layers[0] for group in groups if group.trainable and not sum(group.tensors)]
    if nothing:
        raise PlanError(
            f"sync=ps: all parameters of layer {nothing[0]} are empty, and no server can hold them; possible is "
            "requires_grad=False"
        )
    shares = shares_of(groups, servers)
    if not all(shares):
        size = sum(size for group in groups for size in group.tensors)
        raise PlanError(f"servers={servers}: too many for parameters of {size} bytes")
    return shares


def pushed_shares(shape: Shape, servers: int, choice: str) -> Shares:
    """For each server, the bytes in which a worker pushes its parts of gradients. `choice` is the plan's `compress`."""
    item = shape.itemsize
    return shares_of(shape.groups, servers, lambda size: pushed_bytes(size // item, item, choice))


def left_out(groups: Iterable[int], choice: str) -> tuple[Value, ...]:
    """What stays with a worker of gradients that it pushes."""
    return tuple(map(residual, groups)) if keeps_residual(choice) else ()
