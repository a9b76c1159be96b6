"""PipeDream: a pipeline that never drains. Each micro-batch is a mini-batch of its own, with an update of its own.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.

    p=3, backward twice as long as forward; | is an update, and the number after it the version that it made
    rank 0  F0   F1   F2                       B0   B0|1 F3   B1   B1|2 F4   B2   B2|3 F5   B3
    rank 1       F0   F1             B0   B0|1 F2   B1   B1|2 F3   B2   B2|3 F4   B3   B3|4 F5
    rank 2            F0   B0   B0|1 F1   B1   B1|2 F2   B2   B2|3 F3   B3   B3|4 F4   B4   B4|5

So F3 uses version 1 on rank 0, and version 3 on rank 2.

Weight stashing: a forward uses the newest parameters of its rank, and they are kept until its backward has used them,
too. So forward and backward of a micro-batch use the same parameters, and its gradient is the gradient of a function.
But the parameters have another age on each stage: on rank d the gradient is p-1-d updates old when it is applied, and
the rank holds up to p-d versions. The last rank holds one version.

The time is (n+p-1)(tF+tB) for n micro-batches in all: the pipeline fills once and drains once, for any number of steps.
There is no condition on n.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minipar.program import Action, Staleness
from minipar.strategies.schedules.one_f_one_b import warm_up_then_alternate
from minipar.strategies.schedules.registry import Asynchronous, newest, schedule


def promise(ranks: int, keys: Mapping[str, int]) -> Staleness:
    """The contract: an update after every micro-batch. The gradients of rank 0 are the stalest."""
    return Staleness(bound=ranks - 1, versions=ranks, every=1)


@schedule(
    "pipedream",
    paper="Narayanan et al. 2019",
    time="(n+p-1)(tF+tB) for n micro-batches of all steps",
    peak="p-d, and p-d versions of the weights",
    asynchronous=Asynchronous(newest, promise),
)
def pipedream(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    """1F1B without a flush: an update after every backward, of weights that are kept for each micro-batch."""
    return warm_up_then_alternate(stages - 1 - rank, microbatches)
