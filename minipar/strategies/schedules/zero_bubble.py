"""Zero bubble: the backward in halves, so that the gradients of weights, which nobody waits for, fill the gaps.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (ZB-H1, ZB-H2).

    zb-h1, p=3, m=4, each half as long as a forward
    rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3         I: gradient of the input, which another rank waits for
    rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3         W: gradients of the weights; rank d lets d of them wait
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Time m(tF+tB) + (p-1)(tF+tI) - (min(p, m)-1) min(tF, tI, tW), for any m: each micro-batch after the first lets one
weight half fill a gap, up to p-1 of them. The paper's m(tF+tB) + (p-1)(tF+tI-tW) is that for m >= p where tW is the
shortest. Every rank keeps min(p, m) micro-batches, those that wait for their weight half included.

    zb-h2, p=3, m=5: 2(p-d)-1 forwards first, so that a rank does not wait between its first and last instruction
    rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
    rank 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
    rank 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

It needs m >= 2p-1 and keeps 2p-1 micro-batches. In its window a rank idles w = (p-1) max(0, tF+tI-2tW, tI-tF) (the
paper: at tI = tF). The windows are shifted: rank d begins d forwards late and ends as late. Steps that follow one
another without a barrier fit into each other; a single one takes m(tF+tB) + max((p-1)tF, w), at equal times as long as
ZB-H1. Here each rank's STEP waits for its own gradients only.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.errors import PlanError
from minipar.program import Action, BackwardInput, BackwardWeight, Forward
from minipar.strategies.schedules.registry import schedule

PAPER = "Qi et al. 2024 (Zero Bubble)"


@schedule("zb-h1", paper=PAPER, time="m(tF+tB)+(p-1)(tF+tI)-(min(p, m)-1)min(tF, tI, tW)", peak="min(p, m)")
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with the backward in halves; weight halves wait so long that every rank keeps as much as the first."""
    warm_up = min(ranks - 1 - rank, microbatches)
    yield from _in_halves(microbatches, warm_up, waiting=rank)


@schedule(
    "zb-h2", paper=PAPER, time="m(tF+tB)+(p-1)max(tF, w), window w=max(0, tF+tI-2tW, tI-tF)", peak="2p-1",
    needs="m >= 2p-1",
)  # fmt: skip
def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """A warm-up so long that no rank waits between its first and last instruction."""
    if microbatches < 2 * ranks - 1:
        raise PlanError(
            f"schedule=zb-h2: microbatches={microbatches} cannot fill pp={ranks}; "
            f"possible are {2 * ranks - 1} or more, or schedule=zb-h1"
        )
    yield from _in_halves(microbatches, 2 * (ranks - 1 - rank), waiting=2 * rank)


def _in_halves(microbatches: int, warm_up: int, waiting: int) -> Iterator[Action]:
    """`warm_up` forwards; then forward, input half, and the weight half of `waiting` micro-batches ago, in turn."""
    for i in range(warm_up):
        yield Forward(i)
    for i in range(microbatches):
        if warm_up + i < microbatches:
            yield Forward(warm_up + i)
        yield BackwardInput(i)
        if i >= waiting:
            yield BackwardWeight(i - waiting)
    for i in range(max(0, microbatches - waiting), microbatches):
        yield BackwardWeight(i)
