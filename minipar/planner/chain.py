"""The dynamic program over a chain of layers, with an axis for memory.

    layer     0     1     2     3            least(l, m, s) = the least time of layers 0..l, if layer l takes strategy s
    strategy  a b   a b   a b   a b                           and they need at most m bytes together
               \\___/ \\___/ \\___/
                move  move  move             least(l, m, s) = time(l, s) + min over r of
                                                              least(l - 1, m - bytes(l, s), r) + move(l, r, s)

Memory is counted in cells, rounded up for each layer. So an answer never needs more than the budget, and with many
cells it is the best one. The bound is the same program with all bytes rounded down. One layer costs cells x strategies
x strategies.

Sources: Miao et al., "Galvatron", 2022; Lin et al., "nnScaler", 2024 (the same recurrence).
"""

from __future__ import annotations

import math
from time import perf_counter

import numpy as np

from minipar.errors import PlanError
from minipar.planner.answer import Answer, answer, impossible
from minipar.planner.cost_graph import Choices, CostGraph, Table


def chain(graph: CostGraph, cells: int = 512) -> Answer:
    """The fastest answer of a graph whose edges go from each node to the next one.

    cells   how finely the budget is counted

    Errors: PlanError for a graph that is no chain, and where no answer fits.
    """
    began = perf_counter()
    if not graph.is_chain:
        edge = next(e for e in graph.edges if e.end != e.start + 1)
        raise PlanError(
            f"chain: an edge goes from {graph.nodes[edge.start].name} to {graph.nodes[edge.end].name}, which is not "
            "the next node; possible are elimination and ilp"
        )
    choices, time = _solve(graph, cells, up=True)
    if choices is None:
        least = _least(graph)
        if graph.budget is not None and least > graph.budget:
            raise impossible(graph, least)
        raise PlanError(f"chain: nothing fits in {cells} cells of memory, rounded up; possible are more cells")
    bound = time if graph.budget is None else _solve(graph, cells, up=False)[1]
    return answer(graph, "chain", choices, began, bound=bound)


def _solve(graph: CostGraph, cells: int, up: bool) -> tuple[Choices | None, float]:
    """The best choices and their time; None and infinity where nothing fits."""
    whole = cells if graph.budget is not None else 0
    unit = (graph.budget or 0.0) / cells
    tables = {edge.start: edge.seconds for edge in graph.edges}
    came: list[Table] = []
    needs: list[list[int]] = []
    least = np.zeros((whole + 1, 1))  # [bytes, strategy of the layer before]
    for number, node in enumerate(graph.nodes):
        bytes_of = [_cells(size, unit, up) if whole else 0 for size in node.memory]
        between = tables.get(number - 1, np.zeros((least.shape[1], len(node.labels))))
        moved = least[:, :, None] + between[None]  # [bytes before, strategy before, strategy]
        best = np.min(moved, axis=1)
        came.append(np.argmin(moved, axis=1))
        needs.append(bytes_of)
        least = np.full((whole + 1, len(node.labels)), np.inf)
        for s, need in enumerate(bytes_of):
            if need <= whole:
                least[need:, s] = best[: whole + 1 - need, s] + node.seconds[s]
    time = float(least[whole].min())
    if not math.isfinite(time):
        return None, math.inf
    left, strategy = whole, int(np.argmin(least[whole]))
    chosen = []
    for before, bytes_of in zip(reversed(came), reversed(needs), strict=True):
        chosen.append(strategy)
        left -= bytes_of[strategy]
        strategy = int(before[left, strategy])
    return tuple(reversed(chosen)), time


def _cells(size: float, unit: float, up: bool) -> int:
    """Bytes in cells; a hair over a whole number of them counts as that number."""
    exact = size / unit if unit else (0.0 if size == 0 else math.inf)
    if math.isinf(exact):
        return 2**62
    return math.ceil(exact - 1e-9) if up else math.floor(exact + 1e-9)


def _least(graph: CostGraph) -> float:
    """Bytes of the smallest answer whose choices go together."""
    tables = {edge.start: edge.seconds for edge in graph.edges}
    least = np.array(graph.nodes[0].memory)
    for number, node in enumerate(graph.nodes[1:]):
        between = tables.get(number, np.zeros((len(least), len(node.labels))))
        least = np.min(np.where(np.isinf(between), np.inf, 0.0) + least[:, None], axis=0) + np.array(node.memory)
    return float(least.min())
