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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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


@dataclass
class _Rank:
    """The state of a rank: for each kind of action, the next micro-batch of each chunk."""

    stages: tuple[int, ...]
    free: float = 0.0
    forwards: list[int] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    done: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forwards, self.backwards, self.weights = ([0] * len(self.stages) for _ in range(3))


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
    every = [_Rank(stages) for stages in place(placement, ranks, chunks, "of a list scheduler")]
    last = max(stage for one in every for stage in one.stages)
    # when (stage, micro-batch) is done: its forward in `there`, its backward in `back`
    there: dict[tuple[int, int], float] = {(-1, i): 0.0 for i in range(microbatches)}
    back: dict[tuple[int, int], float] = {}
    forward, half, weight = times
    took = {Forward: forward, Backward: half + weight, BackwardInput: half, BackwardWeight: weight}

    def ready(rank: int, now: float) -> Iterator[Action]:
        """The actions that a rank could begin at time `now`."""
        one = every[rank]
        done = sum(one.backwards)
        room = sum(one.forwards) - done < ahead(rank)
        full = waiting is not None and done - sum(one.weights) > waiting(rank)
        for c, stage in enumerate(one.stages):
            if waiting is not None and one.weights[c] < one.backwards[c]:
                yield BackwardWeight(one.weights[c], c)
            if full:
                continue
            i = one.forwards[c]
            if room and i < microbatches and there.get((stage - 1, i), now + 1) <= now:
                yield Forward(i, c)
            i = one.backwards[c]
            above = there if stage == last else back
            if i < one.forwards[c] and above.get((min(stage + 1, last), i), now + 1) <= now:
                yield Backward(i, c) if waiting is None else BackwardInput(i, c)

    now, left = 0.0, sum(len(one.stages) for one in every) * microbatches * (2 if waiting is None else 3)
    while left:
        for rank, one in enumerate(every):
            choices = list(ready(rank, now)) if one.free <= now else []
            if choices:
                chosen = min(choices, key=rule)
                one.done.append(chosen)
                one.free = now + took[type(chosen)]
                _note(one, chosen, there, back)
                left -= 1
        later = [t for t in (*(one.free for one in every), *there.values(), *back.values()) if t > now]
        if left and not later:
            raise PlanError(f"list scheduler: its limits stop it after {len(every[0].done)} actions of rank 0")
        now = min(later, default=now)
    return [one.done for one in every]


def _note(one: _Rank, chosen: Action, there: dict[tuple[int, int], float], back: dict[tuple[int, int], float]) -> None:
    i, c = chosen.microbatch, chosen.chunk
    if isinstance(chosen, Forward):
        one.forwards[c] += 1
        there[one.stages[c], i] = one.free
    elif isinstance(chosen, BackwardWeight):
        one.weights[c] += 1
    else:
        one.backwards[c] += 1
        back[one.stages[c], i] = one.free
