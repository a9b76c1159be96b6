"""Cut a chain of layers into stages of neighbouring layers, so that a pipeline of them is as fast as possible.

    costs      5 3 3 | 8 3 | 9        a stage takes the time of its layers, and of the message that it sends:
    cut            2     1            t_s = work_s / speed_s + cut_s / bandwidth
               t = 13   12   9        a step of m micro-batches takes   sum(t) + (m - 1) max(t)

The sum is the time of the first micro-batch. After it, one micro-batch leaves the pipeline every max(t), the time of
the slowest stage. With equal speeds and free cuts the sum is always the same, and the best partition is the one with
the smallest maximum.

`partition` is exact. Given a bound T on the slowest stage, the least sum is a dynamic program over (stages, layers):

    least(s, j) = min over i of  least(s - 1, i) + t(i..j on rank s),   where t <= T           O(stages layers^2)

least(T) falls as T grows. So no partition whose slowest stage takes a < T <= b is faster than least(b) + (m - 1) a. If
this is not faster than the best partition found so far, the interval (a, b] needs no more search. Otherwise it is
halved; the most promising interval comes first. 1,000 layers on 64 ranks take 0.05 to 0.3 s. 10,000 layers take
seconds, and more are refused.

This is what gpipe takes, where every rank has one stage. For split=auto it is a start: `strategies/splitting.py` goes
on by what is predicted of the plan's own schedule.

Sources: Zheng et al., "Alpa", 2022, section 5.2 (the objective; it tries all bounds in turn); Narayanan et al.,
"PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.1 (`partition_replicated`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from operator import sub

from minipar.errors import PlanError
from minipar.wording import several

EXACT = 1e-13  # relative error; rounding errors of sums are of this size
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class Partition:
    """A chain of layers in stages.

    split    number of layers of each stage
    times    time of each stage for one micro-batch, with the message that it sends
    time     time of a step: sum(times) + (microbatches - 1) * max(times)
    """

    split: tuple[int, ...]
    times: tuple[float, ...]
    time: float


def partition(
    costs: Sequence[float],
    stages: int,
    microbatches: int = 1,
    *,
    speeds: Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
    bandwidth: float = 1.0,
) -> Partition:
    """The contiguous partition of least sum(t) + (microbatches - 1) max(t); every stage has at least one layer.

    costs        time of each layer for one micro-batch, forward and backward together
    speeds       speeds of the ranks, in the order of the stages: a rank of speed 2 takes half the time; default 1 each
    activations  bytes sent after each layer if a cut is there, in both directions together; the last entry does not
                 count. The stage before the cut takes activations / bandwidth longer, as if it waited for the message

    It takes O(stages * layers^2) at most for a bound, and tries about 10 to 200 bounds. If several partitions are
    equally good, it returns any of them. Errors: `PlanError` for tables that do not fit, costs below 0, speeds not
    above 0, more stages than layers, or more than 10,000 layers.
    """
    work, cuts, rates = checked(costs, stages, microbatches, speeds, activations, bandwidth)
    if len(work) > MOST_LAYERS:
        raise PlanError(f"partition: {len(work)} layers; possible are up to {MOST_LAYERS}")
    return _best(work, cuts, rates, microbatches)


def stage_times(
    costs: Sequence[float],
    split: Sequence[int],
    *,
    speeds: Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
    bandwidth: float = 1.0,
) -> tuple[float, ...]:
    """Time of each stage of a split for one micro-batch; arguments as for `partition`."""
    work, cuts, rates = checked(costs, len(split), 1, speeds, activations, bandwidth)
    if sum(split) != len(work) or min(split) < 1:
        raise PlanError(f"split={','.join(map(str, split))}: must be stages of at least 1 layer, {len(work)} together")
    return _times(work, cuts, rates, split)


def step_time(times: Sequence[float], microbatches: int) -> float:
    """sum(times) + (microbatches - 1) * max(times): a step of a pipeline that is flushed at its end."""
    return math.fsum(times) + (microbatches - 1) * max(times)


def _times(work: list[float], cuts: list[float], rates: list[float], split: Sequence[int]) -> tuple[float, ...]:
    ends = pairwise(accumulate(split, initial=0))
    return tuple(math.fsum(work[i:j]) / v + cuts[j - 1] for (i, j), v in zip(ends, rates, strict=True))


def checked(
    costs: Sequence[float],
    stages: int,
    microbatches: int,
    speeds: Sequence[float] | None,
    activations: Sequence[float] | None,
    bandwidth: float,
) -> tuple[list[float], list[float], list[float]]:
    """Costs, times of the cuts after each layer, and speeds, as floats. Errors: PlanError for tables that do not
    fit."""
    work = [float(x) for x in costs]
    cuts = [0.0] * len(work) if activations is None else [float(x) / bandwidth for x in activations]
    rates = [1.0] * stages if speeds is None else [float(x) for x in speeds]
    if not 1 <= stages <= len(work):
        raise PlanError(f"stages={stages}: must be from 1 to {len(work)}, the number of layers")
    if microbatches < 1:
        raise PlanError(f"microbatches={microbatches}: must be at least 1")
    if not all(0 <= x < math.inf for x in (*work, *cuts)):
        raise PlanError("partition: costs and activations must be finite numbers of at least 0")
    if not all(0 < x < math.inf for x in (*rates, bandwidth)):
        raise PlanError("partition: speeds and bandwidth must be finite numbers above 0")
    if len(cuts) != len(work) or len(rates) != stages:
        raise PlanError(
            f"partition: {several(len(cuts), 'activation')} for {several(len(work), 'layer')}, "
            f"{len(rates)} speeds for {several(stages, 'stage')}; "
            "each layer and each stage needs one"
        )
    if cuts:
        cuts[-1] = 0.0
    return work, cuts, rates


def _best(work: list[float], cuts: list[float], rates: list[float], microbatches: int) -> Partition:
    after = microbatches - 1
    shortest = max(math.fsum(work) / math.fsum(rates), max(work) / max(rates)) * (1 - EXACT)
    best: Partition | None = None
    # An interval (time, a, b, sum): a partition whose slowest stage takes a < T <= b takes at least `time` for a step,
    # and one micro-batch takes at least `sum` through it.
    intervals = [(0.0, shortest, math.inf, 0.0)]
    while intervals:
        fastest, a, b, least = heappop(intervals)
        if best is not None:
            worth = best.time * (1 - EXACT)
            if fastest >= worth:
                break
            b = min(b, (worth - least) / after)  # no partition with a slower stage is faster
            if b - a <= b * EXACT:
                continue
        split = _least_sum(work, cuts, rates, b)
        if split is None:
            continue
        times = _times(work, cuts, rates, split)
        found = Partition(split, times, step_time(times, microbatches))
        if best is None or found.time < best.time:
            best = found
        if after:
            least, b = math.fsum(times), min(b, max(times))
            for low, high in pairwise((a, (a + b) / 2, b)):
                heappush(intervals, (least + after * low, low, high, least))
    assert best is not None
    return best


def _least_sum(work: list[float], cuts: list[float], rates: list[float], bound: float) -> tuple[int, ...] | None:
    """The split of least sum of stage times, where no stage takes more than `bound`; None if there is none."""
    before = list(accumulate(work, initial=0.0))  # work of the first j layers
    least = [0.0] + [math.inf] * len(work)  # least(s - 1, i) for all i
    tables = []
    for rate in rates:
        # Layers i..j-1 take done - given[i]. So i can be any layer from the first one within the bound to j - 1.
        given = [x / rate for x in before]
        offered = list(map(sub, least, given))
        chosen, least = [0], [math.inf]
        falling: list[int] = []  # the layers before j that are better than all between them and j: the best one first
        for j in range(1, len(before)):
            while falling and offered[falling[-1]] > offered[j - 1]:
                falling.pop()
            falling.append(j - 1)
            done = given[j] + cuts[j - 1]
            at = bisect_left(falling, bisect_left(given, done - bound))
            chosen.append(falling[at] if at < len(falling) else j)
            least.append(offered[chosen[j]] + done if at < len(falling) else math.inf)
        tables.append(chosen)
    if least[-1] == math.inf:
        return None
    split, j = [], len(work)
    for chosen in reversed(tables):
        split.append(j - chosen[j])
        j = chosen[j]
    return tuple(reversed(split))


# stages on several ranks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplicatedPartition:
    """A chain of layers in stages, each replicated on some ranks.

    split    layers of each stage
    ranks    ranks of each stage
    slowest  time between two micro-batches in the steady state, which is the time of the slowest stage or link
    """

    split: tuple[int, ...]
    ranks: tuple[int, ...]
    slowest: float


def partition_replicated(
    costs: Sequence[float],
    ranks: int,
    *,
    activations: Sequence[float] | None = None,
    parameters: Sequence[float] | None = None,
    bandwidth: float = 1.0,
) -> ReplicatedPartition:
    """PipeDream's partition: stages may be replicated on several ranks, and all `ranks` ranks are used.

    The time per micro-batch of layers i..j on r ranks, whose parameters are w bytes, and of the link after j:

        stage(i..j, r) = max(sum of costs, 2 (r - 1) w / bandwidth) / r        link(j) = 2 activations[j] / bandwidth

    It makes the slowest of them as fast as possible. This is right for a pipeline without flushes, where the time of
    the first micro-batch does not count. Replicas take turns, and sum gradients while they compute (this is the paper's
    formula; the code published with it adds the two times). All ranks are equal.

        slowest(j, r) = min over i, r' of  max(slowest(i, r - r'), link(i), stage(i..j, r'))         O(n^2 ranks^2)

    Errors: `PlanError` as for `partition`.
    """
    work, cuts, _ = checked(costs, 1, 1, None, activations, bandwidth)
    weights = [0.0] * len(work) if parameters is None else [float(x) / bandwidth for x in parameters]
    if len(weights) != len(work) or not all(0 <= x < math.inf for x in weights):
        raise PlanError(
            f"partition: {len(weights)} parameters for {several(len(work), 'layer')}; each needs one of at "
            f"least 0 bytes"
        )
    if ranks < 1:
        raise PlanError(f"ranks={ranks}: must be at least 1")
    n = len(work)
    before, weighed = (list(accumulate(table, initial=0.0)) for table in (work, weights))
    link = [0.0, *(2 * x for x in cuts)]
    slowest = [[math.inf] * (n + 1) for _ in range(ranks + 1)]
    slowest[0][0] = 0.0
    come_from: dict[tuple[int, int], tuple[int, int]] = {}
    for r in range(1, ranks + 1):
        for j in range(1, n + 1):
            for here in range(1, r + 1):
                for i, earlier in enumerate(slowest[r - here][:j]):
                    if earlier >= slowest[r][j]:
                        continue
                    stage = max(before[j] - before[i], 2 * (here - 1) * (weighed[j] - weighed[i])) / here
                    if (time := max(earlier, link[i], stage)) < slowest[r][j]:
                        slowest[r][j] = time
                        come_from[r, j] = (i, here)
    split, held, r, j = [], [], ranks, n
    while j:
        i, here = come_from[r, j]
        split.append(j - i)
        held.append(here)
        r, j = r - here, i
    return ReplicatedPartition(tuple(split[::-1]), tuple(held[::-1]), slowest[ranks][n])
