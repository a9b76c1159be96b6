"""Binomial tree: every round doubles the number of ranks that have the tensor.

It takes few rounds, but each message carries the whole tensor.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.

    broadcast from 0, 8 ranks                     reduce: the same arrows, backwards, the last round first

    round 0    0 ------------> 4
    round 1    0 -----> 2      4 -----> 6
    round 2    0 -> 1   2 -> 3 4 -> 5   6 -> 7

With p ranks, d = ceil(log2 p), n bytes; for another root the ranks are renumbered:

    collective    rounds    bytes to each child (broadcast), to the parent (reduce)    time
    broadcast     d         n                                                          d (alpha + n beta)
    reduce        d         n                                                          d (alpha + n beta + n gamma)
    allreduce     2 d       both, through rank 0                                       the sum of both
The times are exact where p is a power of two; otherwise they are upper bounds (some branches of the tree are short).
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program.collectives.moves import Algorithm, Copy, Move, Rates, Reduce, Send, Setting, in_turn


def _children(place: int, ranks: int) -> list[int]:
    """The places of a rank's children; the child with the smallest branch comes first."""
    lowest = place & -place if place else 1 << ranks.bit_length()
    return [place + (1 << k) for k in range(lowest.bit_length() - 1) if place + (1 << k) < ranks]


def reduce(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves: it adds the sums of its children, then sends the result to its parent."""
    p, root = setting.ranks, setting.root
    place = (rank - root) % p
    for child in _children(place, p):
        yield Reduce([0], (child + root) % p)
    if place:
        yield Send([0], ((place & place - 1) + root) % p)


def broadcast(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves: it sends first to the child with the largest branch."""
    p, root = setting.ranks, setting.root
    place = (rank - root) % p
    if place:
        yield Copy([0], ((place & place - 1) + root) % p)
    for child in reversed(_children(place, p)):
        yield Send([0], (child + root) % p)


allreduce = in_turn(reduce, broadcast)
_MOVES = {"allreduce": allreduce, "broadcast": broadcast, "reduce": reduce}


def cost(collective: str, setting: Setting, size: float, rates: Rates) -> float:
    """Seconds, by the table above."""
    rounds = (setting.ranks - 1).bit_length()
    down = rounds * rates.hop(size)
    up = down + rounds * size * rates.gamma
    return {"allreduce": up + down, "broadcast": down, "reduce": up}[collective]


def chunks(collective: str, setting: Setting) -> int:
    """How many chunks the tensor is cut into: one."""
    return 1


ALGORITHM = Algorithm(_MOVES, cost, chunks)
