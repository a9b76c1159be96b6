"""PipeDream-2BW: no flush, but an update only once a step, so that two versions of the weights are enough.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.

    p=3, m=2: micro-batches 0 and 1 are step 0, 2 and 3 are step 1, ...; F2:0 is a forward that uses version 0
    rank 0  F0:0 F1:0 F2:0                     B0   B0   F3:0 B1   B1|1 F4:1 B2   B2   F5:1 B3   B3|2
    rank 1       F0:0 F1:0           B0   B0   F2:0 B1   B1|1 F3:0 B2   B2   F4:1 B3   B3|2 F5:1 B4
    rank 2            F0:0 B0   B0   F1:0 B1   B1|1 F2:0 B2   B2   F3:0 B3   B3|2 F4:1 B4   B4   F5:1

All micro-batches of step t use version max(t-1, 0): W(t+1) = W(t) - lr grad f(W(t-1)). The delay is one update on every
rank. A rank holds two versions: the version in use, and the version that the next step will use. On rank 0 the first
forward of step t+1 runs p-1 micro-batches before the last backward of step t, and needs the update of step t-1.
Therefore m >= p-1 (the paper asks for m >= p).

The time is (n m + p-1)(tF+tB) for n steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from minipar.errors import PlanError
from minipar.program import Action, Staleness
from minipar.strategies.schedules.one_f_one_b import warm_up_then_alternate
from minipar.strategies.schedules.registry import Asynchronous, schedule


def of_the_step_before(rank: int, ranks: int, microbatch: int, microbatches: int, newest: int) -> int:
    """A version rule: a forward of step t uses version max(t-1, 0)."""
    return max(0, microbatch // microbatches - 1)


def promise(ranks: int, keys: Mapping[str, int]) -> Staleness:
    """The contract: one update a step, with gradients that are one update old. Errors: PlanError if a forward would
    need a version before it exists."""
    m = keys["microbatches"]
    if m < ranks - 1:
        raise PlanError(
            f"schedule=pipedream-2bw: microbatches={m} with pp={ranks} would need a third version of the weights; "
            f"possible are microbatches={ranks - 1} or more, or schedule=pipedream"
        )
    return Staleness(bound=1, versions=2, every=None)


@schedule(
    "pipedream-2bw",
    paper="Narayanan et al. 2021",
    time="(n m+p-1)(tF+tB) for n steps",
    peak="p-d, and 2 versions of the weights",
    needs="microbatches >= p-1",
    asynchronous=Asynchronous(of_the_step_before, promise),
)
def pipedream_2bw(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    """1F1B without a flush: one update a step, with two versions of the weights."""
    return warm_up_then_alternate(stages - 1 - rank, microbatches)
