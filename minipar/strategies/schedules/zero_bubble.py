"""Zero bubble: the backward is split in halves. No rank waits for the gradients of weights, so these fill the gaps.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (ZB-H1, ZB-H2).

    zb-h1, p=3, m=4, each half as long as a forward
    rank 0  F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3         I: gradient of the input, which another rank waits for
    rank 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3         W: gradients of the weights; on rank d, d of them wait
    rank 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

The time is m(tF+tB) + (p-1)(tF+tI) - (min(p, m)-1) min(tF, tI, tW), for any m: each micro-batch after the first lets
one weight half fill a gap, up to p-1 of them. The paper gives m(tF+tB) + (p-1)(tF+tI-tW), which is the same for m >= p
where tW is the shortest time. Every rank keeps min(p, m) micro-batches, including those that wait for their weight
half.

    zb-h2, p=3, m=5: rank d begins with 2(p-d)-1 forwards, and then never waits before its last instruction
    rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
    rank 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
    rank 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

It needs m >= 2p-1 and keeps 2p-1 micro-batches. Between its first and last instruction (its window) a rank idles
w = (p-1) max(0, tF+tI-2tW, tI-tF) (the paper: at tI = tF). The windows are shifted: rank d begins later by d forwards,
and ends later by the same time. So steps without a barrier between them overlap. A single step takes
m(tF+tB) + max((p-1)tF, w), which at equal times is as long as ZB-H1. Here each rank's STEP waits only for the rank's
own gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.errors import PlanError
from minipar.program import Action, BackwardInput, BackwardWeight, Forward
from minipar.strategies.schedules.registry import Times, schedule

PAPER = "Qi et al. 2024 (Zero Bubble)"


def h1(times: Times, p: int, m: int, v: int) -> float:
    """Seconds of a step of ZB-H1: weight halves fill gaps. A message delays it four times a rank."""
    f, i, w, message, _ = times
    filled = (min(p, m) - 1) * min(f, i, w)
    return m * times.both + (p - 1) * (f + i) - filled + 4 * (p - 1) * message


@schedule(
    "zb-h1", paper=PAPER, time="m(tF+tB)+(p-1)(tF+tI)-(min(p, m)-1)min(tF, tI, tW)", peak="min(p, m)",
    form=h1,
)  # fmt: skip
def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """1F1B with the backward in halves; weight halves wait until every rank keeps as much as the first."""
    warm_up = min(ranks - 1 - rank, microbatches)
    yield from _in_halves(microbatches, warm_up, waiting=rank)


@schedule(
    "zb-h2", paper=PAPER, time="m(tF+tB)+(p-1)max(tF, w), window w=max(0, tF+tI-2tW, tI-tF)", peak="2p-1",
    needs="m >= 2p-1",
)  # fmt: skip
def zb_h2(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """The warm-up is so long that no rank waits between its first and last instruction."""
    if microbatches < 2 * ranks - 1:
        raise PlanError(
            f"schedule=zb-h2: microbatches={microbatches} cannot fill pp={ranks}; "
            f"possible are {2 * ranks - 1} or more, or schedule=zb-h1"
        )
    yield from _in_halves(microbatches, 2 * (ranks - 1 - rank), waiting=2 * rank)


def _in_halves(microbatches: int, warm_up: int, waiting: int) -> Iterator[Action]:
    """`warm_up` forwards; then by turns a forward, an input half, and the weight half of the micro-batch `waiting`
    places before."""
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
