"""Naive model parallelism: the model is cut over the ranks, and one micro-batch at a time goes through them.

Source: every pipeline paper begins with it, for example Huang et al., GPipe (2019), figure 2(b).

    p=3, m=2, backward twice as long as forward
    rank 0  F0                   B0 B0 F1                   B1 B1
    rank 1     F0          B0 B0          F1          B1 B1
    rank 2        F0 B0 B0                   F1 B1 B1        (each waits for the whole chain: only one rank works)
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action, Backward, Forward
from minipar.strategies.schedules.registry import schedule


@schedule(
    "naive", paper="model parallelism without a pipeline", time="m p (tF+tB)", peak="1",
)  # fmt: skip
def naive(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    """One micro-batch at a time: forward through all stages, then backward. Only one rank works."""
    for i in range(microbatches):
        yield Forward(i)
        yield Backward(i)
