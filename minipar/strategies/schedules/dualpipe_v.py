"""DualPipeV: DualPipe cut in half, with one copy of every stage: one pipeline goes down the ranks and up again.

Source: DeepSeek-AI, the DualPipe repository, 2025; after Qi, "Cut-in-half" (Sea AI Lab).

    p=2, m=4: rank 0 has stages 0 and 3, rank 1 has 1 and 2; lower case is the second chunk; all halves equally long
    rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1 b1    f2 B0 B0 b2 b2    f3 B1 B1 b3 b3 I2 W2 I3 W3
    rank 1     F0 f0 F1 f1 F2 b0 b0 f2 B0 B0 F3 b1 b1 f3 B1 B1 b2 b2 B2 B2    i3 I3 w3 W3

DualPipe's pipeline from the other end becomes the way back up, and the middle of DualPipe's ranks becomes the last
rank. The time is m(tF+tB) + (p-1)(tF+2tB-3tW)/2 at tF = tI = tW, without any gain from overlap; at other times this
formula is wrong by a few per cent. A rank keeps the activations of p+1/2 micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action
from minipar.strategies.layout import wave
from minipar.strategies.schedules.dualpipe import PAPER, check, eight_steps
from minipar.strategies.schedules.registry import schedule


@schedule(
    "dualpipe-v", paper=PAPER, time="m(tF+tB)+(p-1)(tF+2tB-3tW)/2 at tF=tI=tW", peak="p+1/2",
    needs="m >= 2p", placement=wave, chunks=2,
)  # fmt: skip
def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """DualPipe cut in half: one pipeline, down the ranks and up again in a V, and one copy of every stage."""
    check("dualpipe-v", ranks, microbatches)
    yield from eight_steps(rank, ranks, microbatches)
