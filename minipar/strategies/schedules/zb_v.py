"""ZB-V: two chunks a rank in a V, and the backward in halves: no bubble in the window, with the memory of 1F1B.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024. The order below is that of
torch.distributed.pipelining (ScheduleZBVZeroBubble). At equal times it is the paper's order.

    p=2, m=4: rank 0 has stages 0 and 3, rank 1 has 1 and 2; lower case is the second chunk, all halves as long
    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
    rank 1     F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

The first and the last stage are both on rank 0, so a micro-batch's backward begins on the rank where its forward began.
The last stage's input half can start as soon as its forward is done. The time is m(tF+tB) + (p-1) tF/2 at tF = tI = tW
and m >= 2p-1. Then no rank waits between its first and its last instruction. At other times there are gaps (7.0 for
p=8, m=16 at 1, 1.5, 0.5, as in ZB-H1). A rank keeps the activations of p micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action, BackwardInput, BackwardWeight, Forward
from minipar.strategies.layout import wave
from minipar.strategies.schedules.registry import schedule

DOWN, UP = 0, 1  # the chunks of a rank: the first one on the way down the ranks, the second on the way up


@schedule(
    "zb-v", paper="Qi et al. 2024 (Zero Bubble)", time="m(tF+tB)+(p-1)tF/2 at tF=tI=tW", peak="min(p, m)",
    needs="time: m >= 2p-1", placement=wave, chunks=2,
)  # fmt: skip
def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Down the ranks and up again, with the backward in halves: no gap at equal times, with 1F1B's memory."""
    for action in _full(rank, ranks, max(microbatches, 2 * ranks - 1)):
        if action.microbatch < microbatches:
            yield action


def _full(rank: int, ranks: int, count: int) -> Iterator[Action]:
    """The order of a rank for `count` micro-batches, at least 2p-1."""
    forwards, inputs, weights = ([iter(range(count)), iter(range(count))] for _ in range(3))
    begun = [0, 0]

    def forward(chunk: int) -> Action:
        begun[chunk] += 1
        return Forward(next(forwards[chunk]), chunk)

    def halves(chunk: int) -> Iterator[Action]:
        yield BackwardInput(next(inputs[chunk]), chunk)
        yield BackwardWeight(next(weights[chunk]), chunk)

    below = ranks - rank
    for _ in range(2 * below - 1):
        yield forward(DOWN)
    for _ in range(rank):
        yield forward(UP)
        yield forward(DOWN)
    for _ in range(below):
        yield forward(UP)
        yield from halves(UP)
    while begun[UP] < begun[DOWN] or begun[DOWN] < count:
        if begun[DOWN] < count:
            yield forward(DOWN)
        yield from halves(DOWN)
        yield forward(UP)
        yield from halves(UP)
    for _ in range(rank):
        yield BackwardInput(next(inputs[DOWN]), DOWN)
        yield BackwardInput(next(inputs[UP]), UP)
    for _ in range(below):
        yield from halves(DOWN)
    for chunk in (UP, DOWN):
        for i in weights[chunk]:
            yield BackwardWeight(i, chunk)
