"""1F1B: a backward runs as soon as it can, so that a rank holds few micro-batches at a time.

Sources: Narayanan et al., PipeDream (2019; there without a flush) and PipeDream-2BW (2021, "PipeDream-Flush");
Fan et al., DAPPLE (2021). The eager form starts more forwards early. This hides one hop of latency.

    p=3, m=4, backward twice as long as forward
    rank 0  F0 F1 F2             B0 B0 F3 B1 B1    B2 B2    B3 B3
    rank 1     F0 F1       B0 B0 F2 B1 B1 F3 B2 B2    B3 B3
    rank 2        F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

The time is (m+p-1)(tF+tB), as for GPipe. But rank d keeps the activations of at most p-d micro-batches (eager:
2(p-1-d)+1), not of m.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action, Backward, Forward
from minipar.strategies.schedules.registry import Times, schedule


def warm_up_then_alternate(warm_up: int, microbatches: int) -> Iterator[Action]:
    """`warm_up` forwards, then a forward and a backward by turns, then the remaining backwards."""
    warm_up = min(warm_up, microbatches)
    for i in range(warm_up):
        yield Forward(i)
    for i in range(microbatches - warm_up):
        yield Forward(warm_up + i)
        yield Backward(i)
    for i in range(microbatches - warm_up, microbatches):
        yield Backward(i)


def one_by_one(times: Times, p: int, m: int, v: int) -> float:
    """Seconds of a step. A rank has no forward in reserve, so that it waits for 2(p-1)/p messages in each micro-batch
    (where p divides m and m >= 2p); an eager one waits only while the pipeline fills and drains."""
    messages = 2 * (p - 1) * m / p + 2 * (p - 2) if p > 1 else 0
    return (m + p - 1) * times.both + messages * times.message


@schedule(
    "1f1b", paper="Narayanan et al. 2021; Fan et al. 2021 (DAPPLE)", time="(m+p-1)(tF+tB)", peak="min(p-d, m)",
    form=one_by_one,
)  # fmt: skip
def one_f_one_b(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    """One forward, one backward in turn, after a warm-up that is shorter the later the stage."""
    return warm_up_then_alternate(stages - 1 - rank, microbatches)


@schedule(
    "eager-1f1b", paper="eager warm-up of DAPPLE", time="(m+p-1)(tF+tB)", peak="min(2(p-1-d)+1, m)",
)  # fmt: skip
def eager_1f1b(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    """1F1B with twice the warm-up: more activations, and one hop of latency hidden."""
    return warm_up_then_alternate(2 * (stages - 1 - rank), microbatches)
