"""A list scheduler: among the actions that are ready, a rank takes the first by a rule. Other limits and rules give
other schedules.

    ahead(rank)     how many micro-batches may wait for their backward, or its input half     GPipe m, 1F1B p-d
    waiting(rank)   how many weight halves may wait before they come first                    ZB-H1 d, ZB-H2 2d
    rule            which of the ready actions comes first: backwards or forwards

    p=2, m=3, ahead p-d, backwards first: 1F1B       rank 0  F0 F1    B0 B0 F2 B1 B1    B2 B2
                                                     rank 1     F0 B0 B0 F1 B1 B1 F2 B2 B2

Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969; for pipelines the automatic schedules of Qi et al.,
"Zero Bubble Pipeline Parallelism", ICLR 2024. A rank keeps at most ahead + waiting micro-batches. It never idles while
an action is ready, although idling can be better. Use it like any schedule:

    @minipar.schedule("greedy")
    def greedy(rank, ranks, microbatches):
        yield from list_schedule(ranks, microbatches, ahead=lambda r: ranks - r)[rank]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from minipar.errors import PlanError
from minipar.program import Action, Backward, BackwardInput, BackwardWeight, Forward
from minipar.strategies.layout import Placement, looped, place

Limit = Callable[[int], int]  # rank -> a number of micro-batches of one chunk
Rule = Callable[[Action], tuple[int, ...]]  # action -> its key; the action with the smallest key comes first


def backward_first(action: Action) -> tuple[int, ...]:
    """Backwards and input halves come first, then forwards, then weight halves; of equal kinds the first
    micro-batch."""
    order = (Backward, BackwardInput, Forward, BackwardWeight)
    return order.index(type(action)), action.microbatch, -action.chunk


def list_schedule(
    ranks: int,
    microbatches: int,
    *,
    ahead: Limit,
    waiting: Limit | None = None,
    rule: Rule = backward_first,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    placement: Placement = looped,
    chunks: int = 1,
) -> list[list[Action]]:
    """The actions of every rank.

    waiting   if it is given, backwards are split in halves
    times     seconds of a forward, and of the two halves of a backward, for one micro-batch on one chunk
    Errors: PlanError if the limits stop all ranks before the end.
    """
    stages = place(placement, ranks, chunks, "of a list scheduler")
    last = max(map(max, stages))
    # when (stage, micro-batch) is done: its forward in `there`, its backward in `back`
    there: dict[tuple[int, int], float] = {(-1, i): 0.0 for i in range(microbatches)}
    back: dict[tuple[int, int], float] = {}
    forward, half, weight = times
    took = {Forward: forward, Backward: half + weight, BackwardInput: half, BackwardWeight: weight}
    orders: list[list[Action]] = [[] for _ in stages]
    free = [0.0] * ranks
    begun: Counter[tuple[int, type, int]] = Counter()  # rank, kind (an input half is a backward), chunk -> how many

    def ready(rank: int, now: float) -> Iterator[Action]:
        """The actions that a rank could begin at time `now`."""
        forwards, backwards, weights = (
            [begun[rank, kind, c] for c in range(chunks)] for kind in (Forward, Backward, BackwardWeight)
        )
        room = sum(forwards) - sum(backwards) < ahead(rank)
        full = waiting is not None and sum(backwards) - sum(weights) > waiting(rank)
        for c, stage in enumerate(stages[rank]):
            if waiting is not None and weights[c] < backwards[c]:
                yield BackwardWeight(weights[c], c)
            if full:
                continue
            i = forwards[c]
            if room and i < microbatches and there.get((stage - 1, i), now + 1) <= now:
                yield Forward(i, c)
            i = backwards[c]
            above = there if stage == last else back
            if i < forwards[c] and above.get((min(stage + 1, last), i), now + 1) <= now:
                yield Backward(i, c) if waiting is None else BackwardInput(i, c)

    now, left = 0.0, sum(map(len, stages)) * microbatches * (2 if waiting is None else 3)
    while left:
        for rank in range(ranks):
            choices = list(ready(rank, now)) if free[rank] <= now else []
            if choices:
                chosen = min(choices, key=rule)
                orders[rank].append(chosen)
                free[rank] = now + took[type(chosen)]
                kind = Backward if isinstance(chosen, BackwardInput) else type(chosen)
                begun[rank, kind, chosen.chunk] += 1
                if kind is not BackwardWeight:
                    done = there if kind is Forward else back
                    done[stages[rank][chosen.chunk], chosen.microbatch] = free[rank]
                left -= 1
        later = [t for t in (*free, *there.values(), *back.values()) if t > now]
        if left and not later:
            raise PlanError(f"list scheduler: its limits stop it after {len(orders[0])} actions of rank 0")
        now = min(later, default=now)
    return orders
