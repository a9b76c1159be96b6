"""AMPNet: there is no fixed order. A rank works on what has arrived, backwards first, and updates when it has enough
gradients.

Source: Gaunt et al., "AMPNet: Asynchronous Model-Parallel Training for Dynamic Neural Networks", 2017.

    p=3, in_flight=3, update_every=1            rank 0 starts a micro-batch if fewer than `in_flight` are under way
    rank 0  F0   F1   F2                       B0   B0|1 F3   B1   B1|2 F4   B2   B2|3 F5
    rank 1       F0   F1   F2        B0   B0|1      B1   B1|2 F3   B2   B2|3 F4   B3   B3|4
    rank 2            F0   B0   B0|1 F1   B1   B1|2 F2   B2   B2|3 F3   B3   B3|4 F4   B4

No weights are stashed: a backward uses the present weights, which may have changed since its forward. So the update is
not the gradient of any function. in_flight=1, update_every=m is synchronous SGD.

The rule is local and pure (`choose`): each rank knows what has arrived, and how many forwards and backwards it has
done. Links keep their order, so all ranks see micro-batches in the order in which they began. A rank decides only in
what order forwards and backwards alternate. Let K be in_flight and u update_every. At most K-1 other micro-batches are
under way between a micro-batch's forward and its backward, so gradients are at most ceil((K-1)/u) updates old. With
equal times K=p keeps all ranks busy, and a larger K only makes gradients older.

    p=4, tF=1, tB=2     K=1          K=4          K=8          K=16          K=16, u=4
    utilisation         25 %         99 %         99 %         99 %          99 %        (300 micro-batches)
    updates old         0 0 0 0      3 3 3 0      7 7 4 0      12 8 4 0      3 2 1 0     maximum on each rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial

from minipar.program import Action, Backward, Forward, Staleness
from minipar.program.event_loop import EventLoop
from minipar.strategies.schedules.registry import Asynchronous, newest, schedule

Timing = Callable[[int, Action, float], tuple[float, float]]
Rule = Callable[[int, int, int, int, int, int, int, int], Action | None]  # arguments and result of `choose`
_FREE, _OUTPUT, _GRADIENT = -1, 0, 1


def choose(
    rank: int, ranks: int, total: int, in_flight: int, forwards: int, backwards: int, outputs: int, gradients: int
) -> Action | None:
    """What a rank does next; None: it waits.

    forwards, backwards   how many of them the rank has done
    outputs, gradients    how many have arrived, outputs from the rank before it, gradients from the rank after it
    """
    if backwards < forwards and (rank == ranks - 1 or backwards < gradients):
        return Backward(backwards)
    if forwards < total and (forwards - backwards < in_flight if rank == 0 else forwards < outputs):
        return Forward(forwards)
    return None


def decide(ranks: int, total: int, in_flight: int, run: Timing, rule: Rule = choose) -> list[list[Action]]:
    """The order of every rank, if all follow the rule. At one moment, a rank first becomes free, then messages arrive.

    run    (rank, action, time) -> the time when the rank is free again, and the time when the next rank has the
           action's result
    rule   what a rank does next; it has the arguments of `choose`
    """
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    done = [[0, 0] for _ in range(ranks)]
    arrived = [[0, 0] for _ in range(ranks)]
    free = [True] * ranks
    loop = EventLoop()

    def announce(time: float, rank: int, what: int) -> None:
        loop.at(time, partial(happen, rank, what), (rank, what))

    def happen(rank: int, what: int) -> None:
        if what == _FREE:
            free[rank] = True
        else:
            arrived[rank][what] += 1
        action = rule(rank, ranks, total, in_flight, *done[rank], *arrived[rank]) if free[rank] else None
        if action is None:
            return
        there = isinstance(action, Forward)
        orders[rank].append(action)
        done[rank][_OUTPUT if there else _GRADIENT] += 1
        free[rank] = False
        end, arrival = run(rank, action, loop.now)
        announce(end, rank, _FREE)
        target = rank + 1 if there else rank - 1
        if 0 <= target < ranks:
            announce(arrival, target, _OUTPUT if there else _GRADIENT)

    for rank in range(ranks):
        announce(0.0, rank, _FREE)
    loop.run()
    return orders


def promise(ranks: int, keys: Mapping[str, int]) -> Staleness:
    """The contract: one version of the parameters. The number of micro-batches under way bounds the age of
    gradients."""
    u = keys["update_every"]
    return Staleness(bound=-(-(keys["in_flight"] - 1) // u), versions=1, every=u, stashed=False)


@schedule(
    "ampnet",
    paper="Gaunt et al. 2017",
    time="to tF+tB for each micro-batch where in_flight >= p",
    peak="min(in_flight, n)",
    asynchronous=Asynchronous(newest, promise, decides=True),
)
def ampnet(
    rank: int, stages: int, microbatches: int, in_flight: int | None = None, update_every: int | None = None
) -> Iterator[Action]:
    """Whatever has arrived, backwards first; the order shown is that of a backward twice as long as a forward."""

    return iter(with_equal_times(stages, microbatches, in_flight or stages)[rank])


@lru_cache(maxsize=1)
def with_equal_times(ranks: int, total: int, in_flight: int) -> list[list[Action]]:
    """The order of every rank if a backward takes twice as long as a forward. It is cached, because it is computed for
    all ranks at once."""

    def run(rank: int, action: Action, now: float) -> tuple[float, float]:
        end = now + (1.0 if isinstance(action, Forward) else 2.0)
        return end, end

    return decide(ranks, total, in_flight, run)
