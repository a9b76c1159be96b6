"""FlexFlow's search: a random walk from plan to plan, each of them simulated, but only where it changed.

    now        a=0  b=2  c=1  d=0        a node is drawn, and a choice for it
    proposed   a=0  b=2  c=3  d=0        c and its edges have other times; what does not wait for them is not touched

A proposal that is faster is taken. A slower one is taken with the chance exp(-(slower by) / temperature). In a part of
the proposals a node takes what suits one of its neighbours best. From time to time the walk goes back to the best plan.

Few nodes change at a time, so this walk does not leave a valley in which several must change together. Programs for
such graphs (`intra`, `elimination`) need no luck.

Source: Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", 2019, sections 5 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from minipar.errors import PlanError
from minipar.planner.answer import Answer, answer
from minipar.planner.cost_graph import CostGraph
from minipar.planner.greedy import greedy

NEIGHBOUR = 0.25  # of all proposals take what suits a neighbour best


def anneal(
    graph: CostGraph,
    seed: int = 0,
    proposals: int = 20_000,
    temperature: float = 0.002,
    start: Sequence[int] | None = None,
) -> Answer:
    """The fastest plan of a random walk; the same one for the same seed.

    temperature   as a share of the time of the first plan
    start         the first plan; default: the greedy one

    Errors: PlanError for a start that does not fit the budget, and as `greedy`.
    """
    began = perf_counter()
    choices = list(greedy(graph).choices if start is None else start)
    if not graph.fits(choices):
        raise PlanError("anneal: the start needs more memory than the budget; possible is another start")
    random = np.random.default_rng(seed)
    clock = Sum(graph, choices)
    best, best_time = list(choices), clock.time
    memory, scale = graph.memory(choices), temperature * clock.time
    free = [k for k, node in enumerate(graph.nodes) if len(node.labels) > 1]
    back = max(1, min(1000, proposals // 100))
    for turn in range(proposals if free else 0):
        node = free[random.integers(len(free))]
        choice = _proposal(graph, choices, node, random)
        before, sizes = choices[node], graph.nodes[node].memory
        more = sizes[choice] - sizes[before]
        if choice == before or (graph.budget is not None and memory + more > graph.budget):
            continue
        old = clock.time
        slower = clock.change(node, choice) - old
        if slower <= 0 or random.random() < math.exp(-min(slower / max(scale, 1e-300), 700.0)):
            choices[node], memory = choice, memory + more
            if clock.time < best_time * (1 - 1e-12):
                best, best_time = list(choices), clock.time
        else:
            clock.undo()
        if turn % back == back - 1:
            for k in [k for k in free if choices[k] != best[k]]:
                clock.change(k, best[k])
                choices[k] = best[k]
            memory = graph.memory(choices)
    return answer(graph, "annealing", tuple(best), began, tried=proposals)


def _proposal(graph: CostGraph, choices: Sequence[int], node: int, random: np.random.Generator) -> int:
    """A random choice, or the one that suits a random neighbour best."""
    touching = graph.touching[node]
    if not touching or random.random() >= NEIGHBOUR:
        return int(random.integers(len(graph.nodes[node].labels)))
    edge = graph.edges[touching[random.integers(len(touching))]]
    beside = edge.seconds[:, choices[edge.end]] if edge.start == node else edge.seconds[choices[edge.start]]
    return int(np.argmin(beside + np.array(graph.nodes[node].seconds)))


class Sum:
    """The time of the cost graph: a change touches a node and its edges."""

    def __init__(self, graph: CostGraph, choices: Sequence[int]) -> None:
        self.graph, self.choices = graph, list(choices)
        self.time = graph.seconds(choices)
        self._last = (0, self.choices[0], self.time)

    def change(self, node: int, choice: int) -> float:
        """Change a node, and return the new time."""
        self._last = node, self.choices[node], self.time
        gone = self._around(node)
        self.choices[node] = choice
        came = self._around(node)
        self.time = self.time + (came - gone) if math.isfinite(self.time) else self.graph.seconds(self.choices)
        return self.time

    def undo(self) -> None:
        """Take the last change back."""
        node, self.choices[node], self.time = self._last

    def _around(self, node: int) -> float:
        graph, choices = self.graph, self.choices
        edges = (graph.edges[e] for e in graph.touching[node])
        return graph.nodes[node].seconds[choices[node]] + sum(
            float(edge.seconds[choices[edge.start], choices[edge.end]]) for edge in edges
        )
