"""Chimera: two pipelines over the same ranks, one down and one up; while one fills, the other works.

Source: Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines",
SC 2021.

    p=4, m=4; rank d has stages d and p-1-d; lower case goes up the ranks; backward twice as long
    rank 0  F0 F1    f2 b2 b2 f3 b3 b3    B0 B0       B1 B1
    rank 1     F0 f2 F1 f3    b2 b2 B0 B0 b3 b3 B1 B1
    rank 2     f2 F0 f3 F1    B0 B0 b2 b2 B1 B1 b3 b3
    rank 3  f2 f3    F0 B0 B0 F1 B1 B1    b2 b2       b3 b3

Time is divided into slots: a slot has room for one forward or one backward. The k-th action of a pipeline is in slot
2k+s on the pipeline's s-th stage if it is a forward, and in slot 2k+p-1-s if it is a backward. Because p is even, one
pipeline uses the even slots of a rank and the other the odd ones. The actions of a pipeline are p/2 forwards, then
their p/2 backwards, and this repeats for every p micro-batches.

The time is m(tF+tB) + (p-2)(tB + (m/p-1)(tB-tF)) where tB >= tF. Every rank holds two stages, so it holds parameters
twice, and it keeps p/2+1+min(d, p-1-d) micro-batches. The two copies of a stage sum their gradients as soon as the last
backward of the stage is done.

    doubling=true, p=2, m=4: a slot has two forwards, which are as long as one backward where tB = 2tF
    rank 0  F0 F2 f1 f3 b1 b1 B0 B0 b3 b3 B2 B2
    rank 1  f1 f3 F0 F2 B0 B0 b1 b1 B2 B2 b3 b3

Without doubling, slots of unequal length leave gaps; doubling closes them. The time is m(tF+tB) + (p-2)(tF+tB)/2 where
tF <= tB <= 2tF and 4 divides m. A rank keeps 3p/2+1+min(d, p-1-d) micro-batches where m = 2p, and up to 2p where m is
larger. (The paper has (p-2) 2tF at tB = 2tF, because it runs the two forwards as one. Here the first output is sent
while the second is computed.) m is at least 2p.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minipar.errors import PlanError
from minipar.program import Action, Backward, Forward
from minipar.strategies.layout import both_ways
from minipar.strategies.schedules.registry import schedule


@schedule(
    "chimera",
    paper="Li & Hoefler 2021 (Chimera)",
    time="m(tF+tB)+(p-2)(tB+(m/p-1)(tB-tF)) where tB >= tF; "
    "doubling: m(tF+tB)+(p-2)(tF+tB)/2 where tF <= tB <= 2tF and 4 divides m",
    peak="p/2+1+min(d, p-1-d); doubling: 3p/2+1+min(d, p-1-d) where m = 2p, else up to 2p",
    needs="p even, m a multiple of p; doubling: m >= 2p",
    placement=both_ways,
    chunks=2,
)
def chimera(rank: int, ranks: int, microbatches: int, doubling: bool) -> Iterator[Action]:
    """Two pipelines in opposite directions over the same ranks: each fills the gaps of the other."""
    _check(ranks, microbatches, doubling)
    half = ranks // 2
    slots: dict[int, list[Action]] = {}
    for chunk, stage in enumerate((rank, ranks - 1 - rank)):
        mine = [i for i in range(microbatches) if i % ranks // half == chunk]
        turns = _doubled(mine, half) if doubling else _in_units(mine, half)
        for k, (kind, joined) in enumerate(turns):
            way = stage if kind is Forward else ranks - 1 - stage
            slots[2 * k + way] = [kind(i, chunk) for i in joined]
    for slot in sorted(slots):
        yield from slots[slot]


Turns = Iterator[tuple[type[Action], Sequence[int]]]


def _in_units(mine: Sequence[int], half: int) -> Turns:
    """The actions of one pipeline: p/2 forwards and their backwards, repeated."""
    for start in range(0, len(mine), half):
        for kind in (Forward, Backward):
            for i in mine[start : start + half]:
                yield kind, [i]


def _doubled(mine: Sequence[int], half: int) -> Turns:
    """The actions of one pipeline with doubling: two forwards at a time, and one backward at a time."""
    pairs = [mine[k : k + 2] for k in range(0, len(mine), 2)]
    for pair in pairs[:half]:
        yield Forward, pair
    for k, pair in enumerate(pairs):
        for i in pair:
            yield Backward, [i]
        if half + k < len(pairs):
            yield Forward, pairs[half + k]


def _check(ranks: int, microbatches: int, doubling: bool) -> None:
    if ranks % 2:
        possible = f"{ranks - 1}, {ranks + 1}" if ranks > 1 else "2"
        raise PlanError(f"schedule=chimera: pp={ranks} is odd, and two ways need it even; possible are pp={possible}")
    if microbatches % ranks:
        below = microbatches // ranks * ranks
        possible = f"{below}, {below + ranks}" if below else f"{ranks}"
        raise PlanError(
            f"schedule=chimera: microbatches={microbatches} is no multiple of pp={ranks}; possible are {possible}"
        )
    if doubling and microbatches < 2 * ranks:
        raise PlanError(
            f"doubling=true: microbatches={microbatches} are less than two for each of pp={ranks}; "
            f"possible are microbatches={2 * ranks} or more, or doubling=false"
        )
