"""PipeDream with vertical sync: all stages use the same version for a micro-batch, the one that rank 0 had.

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3.

    p=3: F2:0 is a forward that uses version 0 (and so does its backward)
    rank 0  F0:0 F1:0 F2:0                     B0   B0|1 F3:1 B1   B1|2 F4:2 B2   B2|3
    rank 1       F0:0 F1:0           B0   B0|1 F2:0 B1   B1|2 F3:1 B2   B2|3 F4:2        PipeDream: F2:1, F3:2
    rank 2            F0:0 B0   B0|1 F1:0 B1   B1|2 F2:0 B2   B2|3 F3:1 B3   B3|4        PipeDream: F1:1, F2:2, F3:3

In the paper the version's number travels with the micro-batch. Rank 0 has done max(0, i-(p-1)) updates when it begins
micro-batch i, so here all ranks know the number and nothing has to be sent. The gradient is that of the whole model at
one earlier version, as in plain SGD with a delay of p-1 updates. In return every rank holds up to p versions.

Time and activations are those of PipeDream.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action
from minipar.strategies.schedules.one_f_one_b import warm_up_then_alternate
from minipar.strategies.schedules.pipedream import promise
from minipar.strategies.schedules.registry import Asynchronous, schedule


def seen_by_rank_0(rank: int, ranks: int, microbatch: int, microbatches: int, newest: int) -> int:
    """A version rule: a forward uses the version that rank 0 has when it begins this micro-batch."""
    return max(0, microbatch - (ranks - 1))


@schedule(
    "pipedream-vertical",
    paper="Narayanan et al. 2019, section 3.3",
    time="(n+p-1)(tF+tB) for n micro-batches of all steps",
    peak="p-d, and p versions of the weights",
    asynchronous=Asynchronous(seen_by_rank_0, promise),
)
def pipedream_vertical(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    """PipeDream in which all stages use the version that rank 0 used for the micro-batch."""
    return warm_up_then_alternate(stages - 1 - rank, microbatches)
