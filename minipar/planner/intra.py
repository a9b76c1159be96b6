"""Intra-operator parallelism as an integer linear program, solved by HiGHS.

    s[v, i] = 1    node v takes choice i           e[v, i, u, j] = 1    node v takes i, and u takes j

    minimise    sum over nodes of  time . s   +   sum over edges of  table . e
    subject to  sum over i of s[v, i] = 1                        one choice for each node
                sum over j of e[v, i, u, j] = s[v, i]            an edge agrees with both of its ends
                sum over i of e[v, i, u, j] = s[u, j]
                sum over nodes of  bytes . s <= budget
                s is 0 or 1,  e >= 0

Only s has to be whole: where it is, the two equalities leave one way to choose e. Rows of a table that are the same
(choices that write the same form) share one variable, and columns do, too. What the program takes if s may be a
fraction is a lower bound: the certificate that an answer is at most so far from the best one there is.

A large budget leaves the relaxation at, or close to, the optimum. A small one leaves a gap, since fractions of layers
fill it to the last byte. Then the bound is that of HiGHS's branch and bound, which ends where it meets the answer.
Before that a price of memory (`priced`) finds an answer and a bound, and leaves out choices that cannot be better.

Sources: Zheng et al., "Alpa", 2022, equation 1 (there e is binary, and its sums are at most s); Werner, "A Linear
Programming Approach to Max-sum Problem", 2007 (the equalities: the local polytope).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np

from minipar.errors import PlanError
from minipar.planner.answer import Answer, answer, impossible, least_memory
from minipar.planner.cost_graph import CostGraph, Table, undominated
from minipar.planner.priced import left, priced


def ilp(graph: CostGraph, seconds: float = 60.0, gap: float = 0.0) -> Answer:
    """The fastest answer within the budget, with the bound of the relaxation.

    seconds   that the solver may take; then it returns what it has, with its gap to the bound
    gap       how far from the optimum it may stop: 0.01 is 1 %

    Errors: PlanError where scipy is not installed, where no answer fits, and where there is none yet when time is over.
    """
    if find_spec("scipy") is None:
        raise PlanError(
            "linear programs are solved by scipy, which is not installed: pip install 'minipar[search]', or pip "
            "install scipy"
        )
    from scipy.optimize import milp

    began = perf_counter()
    if graph.budget is not None and least_memory(graph) > graph.budget * (1 + 1e-9):
        raise impossible(graph, least_memory(graph))
    kept = all_kept = undominated(graph)
    small = graph.keep(kept)
    known = priced(small) if graph.budget is not None else None
    if known is not None:
        if known.best.time <= known.bound * (1 + gap):
            return _answer(graph, kept, known.best.choices, began, known.bound, "a price of memory was enough")
        fewer = left(small, known)
        small = small.keep(fewer)
        kept = [[own[k] for k in some] for own, some in zip(kept, fewer, strict=True)]
    problem = _problem(small)
    options = {"time_limit": seconds, "mip_rel_gap": gap}
    relaxed = milp(**problem.asked, options={"time_limit": seconds})
    if relaxed.status == 2:
        raise _nothing_fits(graph)
    found = relaxed
    if relaxed.status == 0 and not problem.whole(relaxed.x):
        found = milp(**problem.asked, integrality=problem.integrality, options=options)
    if found.status == 2:
        raise _nothing_fits(graph)
    notes = f"{len(problem.asked['c'])} variables"
    bound = known.bound if known is not None else 0.0
    if relaxed.status == 0:
        proven = found.mip_dual_bound if found is not relaxed else None
        bound = max(bound, problem.scale * float(relaxed.fun if proven is None else max(relaxed.fun, proven)))
    if found.status == 0:
        return _answer(graph, kept, problem.chosen(found.x), began, bound, notes)
    notes += f"; stopped after {seconds:g} s"
    there = []
    if found.status == 1 and found is not relaxed and found.x is not None:
        there.append(_answer(graph, kept, problem.chosen(found.x), began, bound, notes))
    if known is not None:
        there.append(_answer(graph, all_kept, known.best.choices, began, bound, notes))
    if there:
        return min(there, key=lambda one: one.time)
    raise PlanError(f"ilp: no answer after {seconds:g} s ({found.message}); allow more seconds, or a gap")


def _answer(
    graph: CostGraph, kept: list[list[int]], chosen: Sequence[int], began: float, bound: float, notes: str
) -> Answer:
    """An answer in the choices of the whole graph."""
    choices = tuple(own[k] for own, k in zip(kept, chosen, strict=True))
    found = answer(graph, "ilp", choices, began, bound=bound, notes=notes)
    return replace(found, bound=min(bound, found.time))


def smallest(graph: CostGraph) -> Answer:
    """The answer that needs least memory; of several, the fastest one. Errors: as `ilp`."""
    least = ilp(_for_memory(graph))
    return ilp(graph.within(least.memory))


def _for_memory(graph: CostGraph) -> CostGraph:
    """The same graph, in which bytes are the time: only whether two choices go together is left of the edges."""
    nodes = tuple(replace(node, seconds=node.memory) for node in graph.nodes)
    edges = tuple(replace(edge, seconds=np.where(np.isinf(edge.seconds), np.inf, 0.0)) for edge in graph.edges)
    return CostGraph(nodes, edges)


def _nothing_fits(graph: CostGraph) -> PlanError:
    if graph.budget is None:
        return PlanError("ilp: no two choices of some neighbours go together")
    return impossible(graph, ilp(_for_memory(graph)).memory)


@dataclass(frozen=True)
class _Problem:
    """What `milp` is asked, and how its numbers are read."""

    asked: dict[str, Any]
    integrality: Table
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    scale: float

    def chosen(self, x: Table) -> list[int]:
        """Of each node its choice."""
        return [int(np.argmax(x[a : a + n])) for a, n in zip(self.first, self.sizes, strict=True)]

    def whole(self, x: Table) -> bool:
        """Whether no node is a fraction of several choices."""
        s = x[: sum(self.sizes)]
        return bool(np.all(np.minimum(s, 1 - s) < 1e-7))


def _problem(graph: CostGraph) -> _Problem:
    """Costs, equalities and the budget as sparse matrices. Times are in units of the largest of them."""
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import coo_array

    sizes = tuple(len(node.labels) for node in graph.nodes)
    first = tuple(int(x) for x in np.concatenate([[0], np.cumsum(sizes)[:-1]]))
    costs = [np.concatenate([node.seconds for node in graph.nodes])]
    count = sum(sizes)
    rows: list[Table] = []
    columns: list[Table] = []
    values: list[Table] = []
    right: list[float] = []

    def equation(where: Any, what: Any, equal: float) -> None:
        rows.append(np.full(len(where), len(right)))
        columns.append(np.asarray(where))
        values.append(np.asarray(what, dtype=float))
        right.append(equal)

    for a, n in zip(first, sizes, strict=True):
        equation(range(a, a + n), np.ones(n), 1.0)
    for edge in graph.edges:
        table, of_row = np.unique(edge.seconds, axis=0, return_inverse=True)
        table, of_column = np.unique(table, axis=1, return_inverse=True)
        here = np.isfinite(table)  # only pairs that go together have a variable
        at = np.full(table.shape, -1)
        at[here] = count + np.arange(here.sum())
        costs.append(table[here])
        count += int(here.sum())
        sides = ((edge.start, of_row.ravel(), at), (edge.end, of_column.ravel(), at.T))
        for node, of_class, places in sides:
            for k, line in enumerate(places):
                members = first[node] + np.flatnonzero(of_class == k)
                pairs = line[line >= 0]
                signs = np.concatenate([np.ones(len(pairs)), -np.ones(len(members))])
                equation(np.concatenate([pairs, members]), signs, 0.0)
    cost = np.concatenate(costs)
    scale = float(cost.max()) or 1.0
    matrix = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(len(right), count)
    ).tocsr()
    constraints = [LinearConstraint(matrix, np.array(right), np.array(right))]
    if graph.budget is not None:
        memory = np.concatenate([node.memory for node in graph.nodes]) / max(graph.budget, 1.0)
        line = coo_array((memory, (np.zeros(len(memory), int), np.arange(len(memory)))), shape=(1, count)).tocsr()
        constraints.append(LinearConstraint(line, -np.inf, 1.0 + 1e-9))
    integrality = (np.arange(count) < sum(sizes)).astype(int)
    asked = {"c": cost / scale, "bounds": Bounds(0.0, 1.0), "constraints": constraints}
    return _Problem(asked, integrality, first, sizes, scale)
