"""Greedy: each node in turn takes the choice that is cheapest beside the neighbours that have chosen. A baseline."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from minipar.errors import PlanError
from minipar.planner.answer import Answer, answer, impossible, least_memory
from minipar.planner.cost_graph import Choices, CostGraph


def greedy(graph: CostGraph) -> Answer:
    """One answer, within the budget if this method finds one: bytes cost more and more, until it fits.

    Errors: PlanError, if it does not fit at any price, or if it ends at two choices that do not go together.
    """
    began = perf_counter()
    prices = [0.0]
    if graph.budget is not None:
        ratio = sum(max(node.seconds) for node in graph.nodes) / max(1.0, sum(max(n.memory) for n in graph.nodes))
        prices += [ratio * 2.0**k for k in range(-10, 31, 2)]
    for price in prices:
        choices = _once(graph, price)
        if graph.fits(choices):
            if not np.isfinite(graph.seconds(choices)):
                raise PlanError("greedy: came to choices of two neighbours that do not go together")
            return answer(graph, "greedy", choices, began, tried=len(graph.nodes))
    raise impossible(graph, least_memory(graph))


def _once(graph: CostGraph, price: float) -> Choices:
    chosen: list[int] = []
    for number, node in enumerate(graph.nodes):
        cost = np.array(node.seconds) + price * np.array(node.memory)
        for e in graph.touching[number]:
            edge = graph.edges[e]
            if edge.end == number:
                cost = cost + edge.seconds[chosen[edge.start]]
        chosen.append(int(np.argmin(cost)))
    return tuple(chosen)
