"""Hierarchical: rings inside the nodes, and rings between the ranks that have the same place in their nodes.

Source: Jia et al., "Highly scalable deep learning training system with mixed-precision", 2018.

    2 nodes of 3                     inside         between        inside
                     node 0          0 -> 1 -> 2    0   1   2      0 -> 1 -> 2      a rank sends only 1/g of the
    allreduce                        reduce-        |   |   |      all-gather       tensor out of its node (g ranks
                     node 1          3 -> 4 -> 5    3   4   5      3 -> 4 -> 5      in it), where links are slower
                                     scatter        allreduce

With p ranks on N nodes, g = p / N, n bytes:

    collective        steps              bytes inside, between             time
    reduce_scatter    (g - 1) + (N - 1)  (g - 1)/g n, (N - 1)/p n          (g - 1) (alpha + n/g beta + n/g gamma)
                                                                           + (N - 1) (alpha + n/p beta + n/p gamma)
    all_gather        the same           the same                          the same without gamma
    allreduce         twice that         twice that                        the sum of both
The times are exact where p divides n. (If alpha and beta are the same everywhere, this is faster than the ring because
it takes fewer steps.)
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program.collectives import ring
from minipar.program.collectives.moves import Algorithm, Move, Rates, Send, Setting, in_turn, usual


def _rings(setting: Setting, rank: int) -> tuple[Setting, int, Setting, int]:
    """The two rings that a rank is in, and its place in each: inside its node, and between the nodes."""
    inside = setting.ranks // setting.nodes
    node, place = divmod(rank, inside)
    return Setting(inside), place, Setting(setting.nodes), node


def _inside(setting: Setting, node: int, moves: Iterator[Move]) -> Iterator[Move]:
    """The moves of a ring inside a node. The ring's chunk c stands for chunk c of every node."""
    size = setting.ranks // setting.nodes
    for move in moves:
        chunks = range(move.chunks[0], setting.ranks, size)
        yield _moved(move, chunks, node * size)


def _between(setting: Setting, place: int, moves: Iterator[Move]) -> Iterator[Move]:
    """The moves of a ring between nodes. The ring's chunk c is the chunk of the rank that has this place in node c."""
    size = setting.ranks // setting.nodes
    for move in moves:
        chunks = range(move.chunks[0] * size + place, move.chunks[0] * size + place + 1)
        yield _moved(move, chunks, place, size)


def _moved(move: Move, chunks: range, first: int, stride: int = 1) -> Move:
    if isinstance(move, Send):
        return Send(chunks, first + move.to * stride)
    return type(move)(chunks, first + move.source * stride)


def reduce_scatter(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r ends on rank r."""
    inner, place, outer, node = _rings(setting, rank)
    yield from _inside(setting, node, ring.reduce_scatter(inner, place))
    yield from _between(setting, place, ring.reduce_scatter(outer, node))


def all_gather(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r begins on rank r."""
    inner, place, outer, node = _rings(setting, rank)
    yield from _between(setting, place, ring.all_gather(outer, node))
    yield from _inside(setting, node, ring.all_gather(inner, place))


allreduce = in_turn(reduce_scatter, all_gather)
_MOVES = {"allreduce": allreduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}


def cost(collective: str, setting: Setting, size: float, rates: Rates) -> float:
    """Seconds, by the table above."""
    inner, _, outer, _ = _rings(setting, 0)
    inside = ring.cost(collective, inner, size, rates)
    return inside + ring.cost(collective, outer, size / inner.ranks, rates)


ALGORITHM = Algorithm(_MOVES, cost, usual)
