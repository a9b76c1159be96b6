"""A budget of memory as a price: seconds for each byte are added to the time, until the cheapest answer fits.

    time + price * (memory - budget)        the least of this over all answers is no more than the time of any that fits

So every price gives a bound, and an answer that may fit. Elimination finds each of them in milliseconds. What is left
between the best bound and the best answer that fits is for the linear program, which is small by then: a choice goes if
the best answer with it costs more, at the best price, than the answer that is known (`left`).

Source: Everett, "Generalized Lagrange Multiplier Method", 1963.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minipar.errors import PlanError
from minipar.planner.answer import Answer
from minipar.planner.cost_graph import CostGraph
from minipar.planner.elimination import eliminate, marginals

LARGEST = 200_000  # entries of a table; elimination is asked some thirty times
STEPS = 24  # of bisection


@dataclass(frozen=True)
class Priced:
    """The fastest answer that was seen to fit, a bound that no answer within the budget undercuts, and its price."""

    best: Answer
    bound: float
    price: float


def priced(graph: CostGraph) -> Priced | None:
    """The best price for the budget of a graph. None, if no price is needed, if no answer at any price fits, and if the
    tables of elimination are too large."""
    assert graph.budget is not None
    free, seen = graph.within(None), []
    try:
        first = eliminate(free, 0.0, LARGEST)
        if graph.fits(first.choices):
            return None
        scale = first.time or 1.0
        low, high = 0.0, scale / max(1.0, first.memory)
        while not graph.fits((one := eliminate(free, high, LARGEST)).choices):
            seen.append((one, high))
            low, high = high, 4 * high
            if high * max(1.0, graph.budget) > 1e6 * scale:
                return None
        seen += [(first, 0.0), (one, high)]
        for _ in range(STEPS):
            price = (low + high) / 2
            one = eliminate(free, price, LARGEST)
            seen.append((one, price))
            low, high = (low, price) if graph.fits(one.choices) else (price, high)
            if high - low < 1e-3 * high:
                break
    except PlanError:
        return None
    bound, price = max((one.time + price * (one.memory - graph.budget), price) for one, price in seen)
    best = min((one for one, _ in seen if graph.fits(one.choices)), key=lambda one: one.time)
    return Priced(replace(best, graph=graph), bound, price)


def left(graph: CostGraph, found: Priced) -> list[list[int]]:
    """Of each node the choices that an answer may have which fits, and is as fast as the one that was found."""
    assert graph.budget is not None
    limit = found.best.time * (1 + 1e-9) + found.price * graph.budget
    return [
        [k for k, time in enumerate(times) if time <= limit]
        for times in marginals(graph.within(None), found.price, LARGEST)
    ]
