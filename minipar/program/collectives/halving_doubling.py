"""Recursive halving and doubling: as few rounds as a tree, as few bytes as a ring.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004. Numbers of ranks that are no power
of two are folded, as in Thakur, Rabenseifner and Gropp, 2005.

    reduce-scatter (halving), 4 ranks             all-gather (doubling): the same pairs in reverse order
    round 0    0 <-> 2   1 <-> 3   half each      round 0    0 <-> 1   2 <-> 3   a quarter each
    round 1    0 <-> 1   2 <-> 3   a quarter      round 1    0 <-> 2   1 <-> 3   half each

    folding, 6 ranks:   1 -> 0, 3 -> 2            each of the first pairs works as one rank;
    then                0  2  4  5  as above      at the end 0 -> 1, 2 -> 3

With p ranks, q the largest power of two in p, d = log2 q, n bytes:

    collective        rounds    bytes that a rank sends    time
    reduce_scatter    d         (1 - 1/p) n                d alpha + (1 - 1/p) n (beta + gamma)
    all_gather        d         (1 - 1/p) n                d alpha + (1 - 1/p) n beta
    allreduce         2 d       2 (1 - 1/q) n              the sum of both, with q for p
The times are exact for p = q. Folding adds alpha + n beta + n gamma before an allreduce, and alpha + n beta after it
(exact). In a reduce-scatter and an all-gather the pairs have two chunks, so the two halves differ in size. The rounds
take at most d alpha + min(d, 2 (1 - 1/q) q/p) n beta. The folding adds as much as in an allreduce, and
alpha + n/p beta for the pair's other chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minipar.program.collectives.moves import Algorithm, Copy, Move, Rates, Reduce, Send, Setting


def _power(ranks: int) -> int:
    """The largest power of two that is not larger than `ranks`."""
    return 1 << ranks.bit_length() - 1


def _member(place: int, setting: Setting) -> int:
    """The rank that has a place among the ranks that remain after folding."""
    excess = setting.ranks - _power(setting.ranks)
    return 2 * place if place < excess else place + excess


def _rounds(setting: Setting, rank: int, slots: bool) -> list[tuple[int, range, range]]:
    """A rank's rounds of halving: (partner, chunks that it keeps, chunks that the partner keeps).

    slots: True: there is a chunk for each rank; False: one for each rank that remains after folding.
    """
    q = _power(setting.ranks)
    excess = setting.ranks - q
    place = rank // 2 if rank < 2 * excess else rank - excess
    low, high, found = 0, q, []

    def chunks(a: int, b: int) -> range:
        first, last = (_member(a, setting), _member(b, setting)) if slots else (a, b)
        return range(first, last)

    while high - low > 1:
        middle, half = (low + high) // 2, (high - low) // 2
        lower, upper = chunks(low, middle), chunks(middle, high)
        if place < middle:
            found.append((_member(place + half, setting), lower, upper))
            high = middle
        else:
            found.append((_member(place - half, setting), upper, lower))
            low = middle
    return found


def _folded(setting: Setting, rank: int) -> tuple[bool, int]:
    """Whether a rank gives its work to its left neighbour; and its partner in folding, -1 if it has none."""
    paired = rank < 2 * (setting.ranks - _power(setting.ranks))
    return paired and rank % 2 == 1, (rank ^ 1) if paired else -1


def _scatter(setting: Setting, rank: int, slots: bool) -> Iterator[Move]:
    everything = range(setting.ranks if slots else _power(setting.ranks))
    leaves, partner = _folded(setting, rank)
    if leaves:
        yield Send(everything, partner)
        return
    if partner >= 0:
        yield Reduce(everything, partner)
    for other, mine, theirs in _rounds(setting, rank, slots):
        yield Send(theirs, other)
        yield Reduce(mine, other)


def _gather(setting: Setting, rank: int, slots: bool, missing: Sequence[int]) -> Iterator[Move]:
    """`missing`: the chunks that the rank that gave its work away still needs at the end."""
    leaves, partner = _folded(setting, rank)
    if leaves:
        yield Copy(missing, partner)
        return
    for other, mine, theirs in reversed(_rounds(setting, rank, slots)):
        yield Send(mine, other)
        yield Copy(theirs, other)
    if partner >= 0:
        yield Send(missing, partner)


def allreduce(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves: halving, then doubling."""
    yield from _scatter(setting, rank, slots=False)
    yield from _gather(setting, rank, False, range(_power(setting.ranks)))


def reduce_scatter(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r ends on rank r."""
    yield from _scatter(setting, rank, slots=True)
    leaves, partner = _folded(setting, rank)
    if leaves:
        yield Copy([rank], partner)
    elif partner >= 0:
        yield Send([partner], partner)


def all_gather(setting: Setting, rank: int) -> Iterator[Move]:
    """A rank's moves; chunk r begins on rank r."""
    leaves, partner = _folded(setting, rank)
    folded = rank if leaves else partner
    if leaves:
        yield Send([rank], partner)
    elif partner >= 0:
        yield Copy([partner], partner)
    yield from _gather(setting, rank, True, [c for c in range(setting.ranks) if c != folded])


_MOVES = {"allreduce": allreduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}


def chunks(collective: str, setting: Setting) -> int:
    """How many chunks the tensor is cut into."""
    return _power(setting.ranks) if collective == "allreduce" else setting.ranks


def cost(collective: str, setting: Setting, size: float, rates: Rates) -> float:
    """Seconds, by the table above."""
    p, q = setting.ranks, _power(setting.ranks)
    rounds = q.bit_length() - 1
    moved = size * (1 - 1 / q)
    if p > q and collective != "allreduce":
        moved = size * min(rounds, 2 * (1 - 1 / q) * q / p)
    gather = rounds * rates.hop(0) + moved * rates.beta
    scatter = gather + moved * rates.gamma
    if p > q:
        scatter += rates.hop(size) + size * rates.gamma
        gather += rates.hop(size)
    if collective == "allreduce":
        return scatter + gather
    if p > q:  # the pair's other chunk, after a reduce-scatter or before an all-gather
        scatter, gather = scatter + rates.hop(size / p), gather + rates.hop(size / p)
    return scatter if collective == "reduce_scatter" else gather


ALGORITHM = Algorithm(_MOVES, cost, chunks)
