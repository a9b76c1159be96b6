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


def eliminate(graph: CostGraph, price: float = 0.0, largest: int = LARGEST) -> Answer:
    """The fastest answer.

    price     seconds for each byte, which are added to the time while it is searched
    largest   entries of a table

    Errors: PlanError, if a table would have more than `largest` entries, if no answer goes together, or if the answer
    needs more memory than the budget: the budget is not looked at on the way.
    """
    began = perf_counter()
    kept = undominated(graph)
    small = graph.keep(kept)
    chosen = _solve(small, price, largest)
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


def marginals(graph: CostGraph, price: float = 0.0, largest: int = LARGEST) -> list[Table]:
    """Of each node's choices the time of the best answer that has it, with `price` seconds for each byte.

    All are found by two sweeps: nodes are removed one after another, and on the way back each one learns what all that
    was removed after it costs. largest: entries of a table. Errors: PlanError, as `eliminate`.
    """
    removed = _remove(graph, price, largest)
    roots = [one for one in removed if not one.others]  # (one for each part of the graph)
    least = [float(one.total.min()) for one in roots]
    for k, one in enumerate(roots):
        one.total = one.total + sum(least[:k] + least[k + 1 :])
    found: list[Table] = [np.zeros(0)] * len(graph.nodes)
    for one in reversed(removed):
        found[one.node] = one.total.min(axis=tuple(range(one.total.ndim - 1)))
        axes = (*one.others, one.node)
        for before in one.senders:
            with np.errstate(invalid="ignore"):
                rest = one.total - _spread(_Factor(before.others, before.total.min(axis=-1)), axes)
            rest = np.where(np.isnan(rest), np.inf, rest)  # (what cannot be, less what cannot be)
            down = rest.min(axis=tuple(d for d, n in enumerate(axes) if n not in before.others))
            shared = tuple(n for n in axes if n in before.others)
            before.total = before.total + _spread(_Factor(shared, down), (*before.others, before.node))
    return found


@dataclass
class _Removed:
    """A node that was removed: the others of its table, the table with the node as last dimension, and the nodes
    removed before whose tables are a part of it."""

    node: int
    others: tuple[int, ...]
    total: Table
    senders: list[_Removed]


def _remove(graph: CostGraph, price: float, largest: int) -> list[_Removed]:
    """All nodes in the order in which they are removed."""
    sizes = [len(node.labels) for node in graph.nodes]
    factors: list[tuple[_Factor, _Removed | None]] = [
        (_Factor((k,), np.array(node.seconds) + price * np.array(node.memory)), None)
        for k, node in enumerate(graph.nodes)
    ]
    factors += [(_Factor((edge.start, edge.end), edge.seconds), None) for edge in graph.edges]
    left = set(range(len(sizes)))
    removed: list[_Removed] = []
    while left:
        around = {k: {n for f, _ in factors if k in f.nodes for n in f.nodes} for k in left}
        node = min(left, key=lambda k: math.prod(sizes[n] for n in around[k]))
        if math.prod(sizes[n] for n in around[node]) > largest:
            raise PlanError(
                f"elimination: {graph.nodes[node].name} has {len(around[node]) - 1} neighbours, and their table would "
                f"have more than {largest} entries; possible is the linear program (ilp)"
            )
        others = tuple(sorted(around[node] - {node}))
        total = np.zeros([sizes[n] for n in others] + [sizes[node]])
        own = [one for one in factors if node in one[0].nodes]
        for factor, _ in own:
            total = total + _spread(factor, (*others, node))
        factors = [one for one in factors if node not in one[0].nodes]
        removed.append(_Removed(node, others, total, [sender for _, sender in own if sender is not None]))
        if others:
            factors.append((_Factor(others, np.min(total, axis=-1)), removed[-1]))
        left.remove(node)
    return removed


def _solve(graph: CostGraph, price: float, largest: int) -> list[int]:
    chosen = [0] * len(graph.nodes)
    for one in reversed(_remove(graph, price, largest)):
        chosen[one.node] = int(np.argmin(one.total[tuple(chosen[n] for n in one.others)]))
    return chosen


def _spread(factor: _Factor, nodes: tuple[int, ...]) -> Table:
    """A factor's table with a dimension for each of more nodes, in their order."""
    order = sorted(range(len(factor.nodes)), key=lambda d: nodes.index(factor.nodes[d]))
    table = factor.table.transpose(order)
    sizes = dict(zip(factor.nodes, factor.table.shape, strict=True))
    return table.reshape([sizes.get(n, 1) for n in nodes])
