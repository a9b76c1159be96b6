"""Ring: every rank sends to its right neighbour and receives from its left one, all at the same time.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

    reduce-scatter, 4 ranks: at each of p - 1 steps one more rank adds its part to a chunk; rank r ends with chunk r

    step 0    0 --3--> 1 --0--> 2 --1--> 3 --2--> 0        all-gather: the same direction, complete chunks
    step 1    0 --2--> 1 --3--> 2 --0--> 3 --1--> 0        step 0    0 --0--> 1 --1--> 2 --2--> 3 --3--> 0
    step 2    0 --1--> 1 --2--> 2 --3--> 3 --0--> 0        step 1    0 --3--> 1 --0--> 2 --1--> 3 --2--> 0 ...

    broadcast, reduce: a chain from the root, or to it, in pieces, so that all links work at the same time

With p ranks, n bytes, k pieces of m = n / k bytes; every message goes to the right neighbour:

    collective        steps        bytes that a rank sends    time
    reduce_scatter    p - 1        (p - 1)/p n                (p - 1) (alpha + n/p beta + n/p gamma)
    all_gather        p - 1        (p - 1)/p n                (p - 1) (alpha + n/p beta)
    allreduce         2 (p - 1)    2 (p - 1)/p n              the sum of both
    broadcast         p + k - 2    n                          (p - 1) (alpha + m beta) + (k - 1) m beta
    reduce            p + k - 2    n                          (p - 1) (alpha + m beta + m gamma)
                                                              + (k - 1) m max(beta, gamma)
The times are exact where p and k divide n.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program.collectives.moves import Algorithm, Copy, Move, Rates, Reduce, Send, Setting, in_turn


def reduce_scatter(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r ends on rank r."""
    p = setting.ranks
    for step in range(p - 1):
        yield Send([(rank - 1 - step) % p], (rank + 1) % p)
        yield Reduce([(rank - 2 - step) % p], (rank - 1) % p)


def all_gather(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r begins on rank r."""
    p = setting.ranks
    for step in range(p - 1):
        yield Send([(rank - step) % p], (rank + 1) % p)
        yield Copy([(rank - 1 - step) % p], (rank - 1) % p)


def broadcast(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves: it sends each piece to its right neighbour as soon as the piece has arrived."""
    p = setting.ranks
    place = (rank - setting.root) % p
    for piece in range(setting.pieces):
        if place:
            yield Copy([piece], (rank - 1) % p)
        if place < p - 1:
            yield Send([piece], (rank + 1) % p)


def reduce(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves: the chain ends at the root."""
    p = setting.ranks
    place = (rank - setting.root) % p  # the chain begins at the root's right neighbour
    for piece in range(setting.pieces):
        if place != 1 and p > 1:
            yield Reduce([piece], (rank - 1) % p)
        if place:
            yield Send([piece], (rank + 1) % p)


allreduce = in_turn(reduce_scatter, all_gather)
_MOVES = {
    "allreduce": allreduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "reduce": reduce,
}
_PIPELINED = ("broadcast", "reduce")


def cost(collective: str, setting: Setting, size: float, rates: Rates) -> float:
    """Seconds, by the table above."""
    p, k = setting.ranks, setting.pieces
    if p == 1:
        return 0.0
    gather = (p - 1) * rates.hop(size / p)
    scatter = gather + (p - 1) * size / p * rates.gamma
    piece = size / k
    port, add = rates.port(piece), piece * rates.gamma
    return {
        "allreduce": scatter + gather,
        "reduce_scatter": scatter,
        "all_gather": gather,
        "broadcast": (p - 1) * rates.hop(piece) + (k - 1) * port,
        "reduce": (p - 1) * (rates.hop(piece) + add) + (k - 1) * max(port, add),
    }[collective]


def chunks(collective: str, setting: Setting) -> int:
    """How many chunks the tensor is cut into."""
    return setting.pieces if collective in _PIPELINED else setting.ranks


ALGORITHM = Algorithm(_MOVES, cost, chunks, _PIPELINED)
