"""DualPipeV."""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action
from minipar.strategies.dualpipe import PAPER, check, eight_steps
from minipar.strategies.layout import wave
from minipar.strategies.registry import schedule


@schedule(
    "dualpipe-v", paper=PAPER, time="m(tF+tB)+(p-1)(tF+2tB-3tW)/2 at tF=tI=tW", peak="p+1/2",
    needs="m >= 2p", placement=wave, chunks=2,
)  # fmt: skip
def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """DualPipe cut in half: one pipeline, down the ranks and up again in a V, and one copy of every stage."""
    check("dualpipe-v", ranks, microbatches)
    yield from eight_steps(rank, ranks, microbatches)
