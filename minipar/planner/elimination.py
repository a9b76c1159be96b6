"""Variable elimination: the exact optimum of a cost graph, node by node, as long as the graph is thin.

    a --- b --- c          b is asked once for each pair of choices of a and c what it would do best,
       table + table       and is then gone:      a --- c    with the table  min over b of (a,b) + b + (b,c)

Each round removes the node that has the fewest answers of its neighbours to ask for. A layer of a transformer is a
chain with a detour for the residual, so two neighbours are nearly always enough, and a model takes milliseconds. Where
many neighbours meet, the tables get too large; then the linear program of `intra` is the method.

A budget of memory is a constraint over all nodes at once, and does not fit in these tables.

Source: Bertele and Brioschi, "Nonserial Dynamic Programming", 1972; Alpa's and FlexFlow's graphs allow it, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from minipar.errors import PlanError
from minipar.planner.answer import Answer, answer, impossible, least_memory
from minipar.planner.cost_graph import CostGraph, Table, undominated

LARGEST = 20_000_000  # entries of a table


@dataclass
class _Factor:
    """A table over the choices of some nodes, one dimension for each."""

    nodes: tuple[int, ...]
    table: Table


def eliminate(graph: CostGraph, price: float = 0.0) -> Answer:
    """The fastest answer. `price`: seconds for each byte, which are added to the time while it is searched.

    Errors: PlanError, if a table would have more than 20 million entries, if no answer goes together, or if the answer
    needs more memory than the budget: the budget is not looked at on the way.
    """
    began = perf_counter()
    kept = undominated(graph)
    small = graph.keep(kept)
    chosen = _solve(small, price)
    choices = tuple(own[k] for own, k in zip(kept, chosen, strict=True))
    time = graph.seconds(choices)
    if not math.isfinite(time):
        raise PlanError("elimination: no two choices of some neighbours go together")
    if price == 0 and not graph.fits(choices):
        least = least_memory(graph)
        if graph.budget is not None and least > graph.budget:
            raise impossible(graph, least)
        raise PlanError(
            f"elimination: the fastest answer needs {graph.memory(choices) / 2**20:.1f} MiB, more than the budget, "
            "which this method cannot look at; possible are the linear program (ilp) and the chain"
        )
    return answer(graph, "elimination", choices, began, bound=time if price == 0 else None)


def _solve(graph: CostGraph, price: float) -> list[int]:
    sizes = [len(node.labels) for node in graph.nodes]
    factors = [
        _Factor((k,), np.array(node.seconds) + price * np.array(node.memory)) for k, node in enumerate(graph.nodes)
    ]
    factors += [_Factor((edge.start, edge.end), edge.seconds) for edge in graph.edges]
    left = set(range(len(sizes)))
    removed: list[tuple[int, tuple[int, ...], Table]] = []
    while left:
        around = {k: {n for f in factors if k in f.nodes for n in f.nodes} for k in left}
        node = min(left, key=lambda k: math.prod(sizes[n] for n in around[k]))
        if math.prod(sizes[n] for n in around[node]) > LARGEST:
            raise PlanError(
                f"elimination: {graph.nodes[node].name} has {len(around[node]) - 1} neighbours, and their table would "
                f"have more than {LARGEST} entries; possible is the linear program (ilp)"
            )
        others = tuple(sorted(around[node] - {node}))
        total = np.zeros([sizes[n] for n in others] + [sizes[node]])
        for factor in (f for f in factors if node in f.nodes):
            total = total + _spread(factor, (*others, node))
        factors = [f for f in factors if node not in f.nodes]
        removed.append((node, others, np.argmin(total, axis=-1)))
        if others:
            factors.append(_Factor(others, np.min(total, axis=-1)))
        left.remove(node)
    chosen = [0] * len(sizes)
    for node, others, best in reversed(removed):
        chosen[node] = int(best[tuple(chosen[n] for n in others)])
    return chosen


def _spread(factor: _Factor, nodes: tuple[int, ...]) -> Table:
    """A factor's table with a dimension for each of more nodes, in their order."""
    order = sorted(range(len(factor.nodes)), key=lambda d: nodes.index(factor.nodes[d]))
    table = factor.table.transpose(order)
    sizes = dict(zip(factor.nodes, factor.table.shape, strict=True))
    return table.reshape([sizes.get(n, 1) for n in nodes])
