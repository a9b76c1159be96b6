"""Which server keeps which part of which tensor: the parameters laid end to end, cut into ranges of equal bytes.

    tensors    |----- 0 -----|- 1 -|--------------------- 2 ---------------------|
    servers    |---------- 0 -----------|---------- 1 -----------|------- 2 ------|      a large one is cut

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GRAIN = 16  # bytes: a cut is never inside an element, of whatever type


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a tensor, which stand at byte `place` of what their server keeps."""

    tensor: int
    start: int
    stop: int
    place: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut(sizes: Sequence[int], servers: int, alignment: Sequence[int] = ()) -> list[list[Piece]]:
    """For each server its pieces, in order, of tensors of so many bytes.

    alignment   of each tensor's place, where tensors of several types stand together; default: none is needed
    """
    total = sum(sizes)
    found: list[list[Piece]] = [[] for _ in range(servers)]
    before = 0
    place = [0] * servers
    for tensor, size in enumerate(sizes):
        edges = [min(max((total * k // servers - before) // GRAIN * GRAIN, 0), size) for k in range(1, servers)]
        edges = [0, *edges, size]
        align = alignment[tensor] if alignment else 1
        for server in range(servers):
            start, stop = edges[server], edges[server + 1]
            if stop > start:
                at = -(-place[server] // align) * align
                found[server].append(Piece(tensor, start, stop, at))
                place[server] = at + stop - start
        before += size
    return found
