"""Direct: every rank sends to every other rank. This takes the fewest steps and the most messages.

    reduce-scatter, 4 ranks, one step             all-gather: everyone sends its own chunk to all
    rank 0 sends 1 -> 1, 2 -> 2, 3 -> 3           all_to_all: rank r has a chunk for every rank j; it ends as
    rank 1 sends 2 -> 2, 3 -> 3, 0 -> 0           chunk r of rank j
    rank 2 sends 3 -> 3, 0 -> 0, 1 -> 1           at no moment do two ranks send to the same rank

With p ranks, n bytes (n/p to each other rank):

    collective        steps    bytes that a rank sends         time
    reduce_scatter    1        (p - 1)/p n                     alpha + n/p (beta + gamma)
                                                               + (p - 2) n/p max(beta, gamma)
    all_gather        1        (p - 1)/p n                     alpha + (p - 1) n/p beta
    allreduce         2        2 (p - 1)/p n                   the sum of both
    all_to_all        1        (p - 1)/p n                     alpha + (p - 1) n/p beta
    broadcast         1        the root (p - 1) n              alpha + (p - 1) n beta
    reduce            1        all but the root n              alpha + n beta + (p - 1) n gamma
The times are exact where p divides n. In this model messages that arrive at the same time from several ranks do not
slow each other down. So the model is too optimistic about `reduce`.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program.collectives.moves import Algorithm, Copy, Move, Rates, Reduce, Send, Setting, in_turn, usual


def reduce_scatter(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r ends on rank r."""
    p = setting.ranks
    for step in range(1, p):
        yield Send([(rank + step) % p], (rank + step) % p)
    for step in range(1, p):
        yield Reduce([rank], (rank - step) % p)


def all_gather(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r begins on rank r."""
    p = setting.ranks
    for step in range(1, p):
        yield Send([rank], (rank + step) % p)
        yield Copy([(rank - step) % p], (rank - step) % p)


def broadcast(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves: the root sends to every other rank."""
    p, root = setting.ranks, setting.root
    if rank != root:
        yield Copy([0], root)
        return
    for step in range(1, p):
        yield Send([0], (root + step) % p)


def reduce(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves: every other rank sends to the root."""
    p, root = setting.ranks, setting.root
    if rank != root:
        yield Send([0], root)
        return
    for step in range(1, p):
        yield Reduce([0], (root + step) % p)


def all_to_all(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r p + j goes from rank r to rank j."""
    p = setting.ranks
    for step in range(1, p):
        to, source = (rank + step) % p, (rank - step) % p
        yield Send([rank * p + to], to)
        yield Copy([source * p + rank], source)


allreduce = in_turn(reduce_scatter, all_gather)
_MOVES = {
    "allreduce": allreduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_to_all": all_to_all,
}


def cost(collective: str, setting: Setting, size: float, rates: Rates) -> float:
    """Seconds, by the table above."""
    p = setting.ranks
    if p == 1:
        return 0.0
    part = size / p
    port, add = rates.port(part), part * rates.gamma
    gather = rates.alpha + (p - 1) * port
    scatter = rates.alpha + port + (p - 2) * max(port, add) + add
    return {
        "allreduce": scatter + gather,
        "reduce_scatter": scatter,
        "all_gather": gather,
        "all_to_all": gather,
        "broadcast": rates.alpha + (p - 1) * rates.port(size),
        "reduce": rates.hop(size) + (p - 1) * size * rates.gamma,
    }[collective]


ALGORITHM = Algorithm(_MOVES, cost, usual)
