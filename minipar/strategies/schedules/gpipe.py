"""GPipe: all forwards, then all backwards (fill and drain).

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.

    p=3, m=4, backward twice as long as forward
    rank 0  F0 F1 F2 F3                   B0 B0 B1 B1 B2 B2 B3 B3
    rank 1     F0 F1 F2 F3          B0 B0 B1 B1 B2 B2 B3 B3
    rank 2        F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3

Time (m+p-1)(tF+tB); every rank keeps all m micro-batches' activations.

In the paper's figure the backwards begin with the last micro-batch. Here they begin with the first one, as in
torch.distributed.pipelining. Time and memory are the same. `schedule=looped-bfs chunks=1` is the paper's order.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action, Backward, Forward
from minipar.strategies.schedules.registry import Times, schedule


def fill_and_drain(times: Times, p: int, m: int, v: int) -> float:
    """Seconds of a step: the pipeline fills and drains once, in steps of a rank's share."""
    return m * times.both + (p - 1) * times.both + 2 * (p - 1) * times.message


@schedule("gpipe", paper="Huang et al. 2019", time="(m+p-1)(tF+tB)", peak="m", form=fill_and_drain)
def gpipe(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards in the same order."""
    for i in range(microbatches):
        yield Forward(i)
    for i in range(microbatches):
        yield Backward(i)
