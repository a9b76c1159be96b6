"""DualPipe: two pipelines, one down and one up the ranks; a forward of one runs beside a backward of the other.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024. The eight steps below are those of its DualPipe repository.

    p=4, m=8; rank d has stages d and p-1-d; lower case goes up the ranks; forwards and both halves equally long
    rank 0  F0 F1 F2 f4 i4 w4 f5 F3 b5 b5    f6 B0 B0 b6 b6    f7 B1 B1 b7 b7 I2 W2 I3 W3
    rank 1     F0 f4 F1 f5 F2 b4 b4 f6 B0 B0 F3 b5 b5 f7 B1 B1 b6 b6 B2 B2    i7 I3 w7 W3
    rank 2     f4 F0 f5 F1 f6 B0 B0 F2 b4 b4 f7 B1 B1 F3 b5 b5 B2 B2 b6 b6    I3 i7 W3 w7
    rank 3  f4 f5 f6 F0 I0 W0 F1 f7 B1 B1    F2 b4 b4 B2 B2    F3 b5 b5 B3 B3 i6 w6 i7 w7

It is made for devices on which kernels of the forward and of the backward overlap: one communicates while the other
computes. So the two are one piece of work (`Forward.beside`), and their results are sent when both are done. Here one
runs after the other: no gain from overlap is assumed. The time is m(tF+tB) + (p/2-1)(tF+2tB-3tW) at tF = tI = tW; at
other times this formula is wrong by a few per cent. A rank keeps the activations of p+1 micro-batches. There are two
copies of every stage, which sum their gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from minipar.errors import PlanError
from minipar.program import Action, Backward, BackwardInput, BackwardWeight, Forward
from minipar.strategies.layout import both_ways
from minipar.strategies.schedules.registry import schedule

PAPER = "DeepSeek-AI 2024 (DeepSeek-V3)"
NEAR, FAR = 0, 1  # the two pipelines of a rank: NEAR begins at the end that is nearer to the rank, FAR at the other


@schedule(
    "dualpipe", paper=PAPER, time="m(tF+tB)+(p/2-1)(tF+2tB-3tW) at tF=tI=tW", peak="p+1",
    needs="p and m even, m >= 2p", placement=both_ways, chunks=2,
)  # fmt: skip
def dualpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Two pipelines in opposite directions, forwards of one beside backwards of the other; halves at the ends."""
    if ranks % 2:
        possible = f"{ranks - 1}, {ranks + 1}" if ranks > 1 else "2"
        raise PlanError(f"schedule=dualpipe: pp={ranks} is odd, and two ways need it even; possible are pp={possible}")
    check("dualpipe", ranks, microbatches)
    if microbatches % 2:
        raise PlanError(
            f"schedule=dualpipe: microbatches={microbatches} is odd, and each way takes half of them; "
            f"possible are {microbatches - 1}, {microbatches + 1}"
        )
    half = microbatches // 2
    upper = rank >= ranks // 2  # for these ranks, the pipeline that goes up is NEAR
    for action in eight_steps(min(rank, ranks - 1 - rank), ranks // 2, half):
        chunk = action.chunk ^ upper
        yield replace(action, microbatch=action.microbatch + half * chunk, chunk=chunk)


def check(name: str, ranks: int, microbatches: int) -> None:
    """PlanError for fewer micro-batches than the order needs to fill the pipeline."""
    if microbatches < 2 * ranks:
        raise PlanError(
            f"schedule={name}: microbatches={microbatches} cannot fill pp={ranks}; "
            f"possible are {2 * ranks} or more, or schedule=1f1b"
        )


def eight_steps(place: int, places: int, count: int) -> Iterator[Action]:
    """The order of the rank that is `place` ranks from its end, with `count` micro-batches in each pipeline. `places`
    is the number of ranks from the end to the middle."""
    forwards, backwards = ([iter(range(count)), iter(range(count))] for _ in range(2))
    waiting: deque[BackwardWeight] = deque()
    inner = places - place - 1  # ranks between this one and the middle

    def forward(way: int, beside: bool = False) -> Forward:
        return Forward(next(forwards[way]), way, beside)

    def backward(way: int) -> Action:
        return Backward(next(backwards[way]), way)

    def input_half(way: int) -> Action:
        i = next(backwards[way])
        waiting.append(BackwardWeight(i, way))
        return BackwardInput(i, way)

    for _ in range(2 * inner):  # 1
        yield forward(NEAR)
    for _ in range(place + 1):  # 2
        yield forward(NEAR)
        yield forward(FAR)
    for _ in range(inner):  # 3
        yield input_half(FAR)
        yield waiting.popleft()
        yield forward(FAR)
    for k in range(count - places - inner):  # 4
        yield forward(NEAR, beside=k > 0 or inner > 0)  # (in the middle, the next stage waits for its output)
        yield backward(FAR)
        yield forward(FAR, beside=True)
        yield backward(NEAR)
    for _ in range(inner):  # 5
        yield backward(FAR)
        yield forward(FAR, beside=True)
        yield backward(NEAR)
    for k in range(2 * (place + 1)):  # 6
        yield (backward if k <= place else input_half)(NEAR if k % 2 else FAR)
    for _ in range(inner):  # 7
        yield waiting.popleft()
        yield input_half(NEAR)
    yield from waiting  # 8
