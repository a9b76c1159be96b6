"""Brute force: every answer of a cost graph, for the smallest ones. What all other searches are held against."""

from __future__ import annotations

from itertools import product
from time import perf_counter

from minipar.errors import PlanError
from minipar.planner.answer import Answer, answer, impossible
from minipar.planner.cost_graph import CostGraph

MOST = 2_000_000


def brute_force(graph: CostGraph) -> Answer:
    """The fastest answer within the budget; of several, the first one.

    Errors: PlanError for a graph of more than 2,000,000 answers, and where none fits.
    """
    began = perf_counter()
    if graph.plans > MOST:
        raise PlanError(f"brute force: {graph.plans:.3g} answers; possible are up to {MOST}")
    best, least, smallest = None, float("inf"), float("inf")
    for choices in product(*(range(len(node.labels)) for node in graph.nodes)):
        if not graph.fits(choices):
            smallest = min(smallest, graph.memory(choices))
            continue
        time = graph.seconds(choices)
        if time < least:
            best, least = choices, time
    if best is None:
        if smallest == float("inf") or graph.budget is None:
            raise PlanError("brute force: no two choices of some neighbours go together")
        raise impossible(graph, smallest)
    return answer(graph, "brute force", best, began, bound=least, tried=graph.plans)
