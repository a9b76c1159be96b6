"""What if? Pin a choice and solve again, ask what another one would cost, see two answers apart, trade time for memory.

explain(graph, "1.mlp.0")       a row for each choice of that node: the best answer that has it, and how much slower
difference(before, after)       the nodes that two answers decide differently
front(graph)                    the best time for each budget of memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from minipar.errors import PlanError
from minipar.planner.answer import Answer
from minipar.planner.cost_graph import CostGraph
from minipar.planner.elimination import eliminate
from minipar.planner.intra import ilp, smallest

Solver = Callable[[CostGraph], Answer]


def solve(graph: CostGraph) -> Answer:
    """The best answer: by elimination where there is no budget, otherwise by the linear program. Errors: as these."""
    return eliminate(graph) if graph.budget is None else ilp(graph)


@dataclass(frozen=True)
class Instead:
    """One choice of a node, and the best answer that has it.

    slower   seconds more than the best answer of all; infinite where no answer has this choice
    reason   where the time goes: nodes and edges that take longer than in the best answer, the largest first
    """

    label: str
    time: float
    slower: float
    memory: float
    reason: str = ""

    def __str__(self) -> str:
        if not np.isfinite(self.time):
            return f"{self.label}: {self.reason}"
        more = f" ({self.reason})" if self.reason else ""
        return f"{self.label}: {self.time * 1e3:.4g} ms, {self.slower * 1e3:+.3g} ms{more}"


@dataclass(frozen=True)
class Explanation:
    """All choices of a node, the best one first."""

    node: str
    chosen: str
    rows: tuple[Instead, ...]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n".join([f"{self.node}: {self.chosen}", *(f"  {row}" for row in self.rows)])


def explain(graph: CostGraph, name: str, solver: Solver = solve) -> Explanation:
    """What each choice of a node would cost instead, when all other nodes may change along with it.

    Errors: PlanError for an unknown node, and if the graph has no answer at all.
    """
    best = solver(graph)
    number = graph.number(name)
    rows = []
    for label in graph.nodes[number].labels:
        try:
            other = solver(graph.pinned({name: label}))
        except PlanError as error:
            rows.append(Instead(label, float("inf"), float("inf"), 0.0, str(error)))
            continue
        choices = list(other.choices)
        choices[number] = graph.choice(name, label)
        there = replace(best, choices=tuple(choices))
        rows.append(Instead(label, other.time, max(0.0, other.time - best.time), other.memory, _where(best, there)))
    rows.sort(key=lambda row: row.time)
    return Explanation(name, graph.nodes[number].labels[best.choices[number]], tuple(rows))


def _where(before: Answer, after: Answer, most: int = 2) -> str:
    """The places in which the second answer takes longest beside the first one."""
    times, others = _places(before), _places(after)
    more = sorted(((others[key] - times[key], key) for key in times), reverse=True)
    return ", ".join(f"{key} {seconds * 1e3:+.3g} ms" for seconds, key in more[:most] if seconds > 0)


def _places(one: Answer) -> dict[str, float]:
    """Seconds of each node and edge in an answer."""
    graph, choices = one.graph, one.choices
    found = {node.name: node.seconds[k] for node, k in zip(graph.nodes, choices, strict=True)}
    for edge in graph.edges:
        key = f"{graph.nodes[edge.start].name} -> {graph.nodes[edge.end].name}"
        found[key] = float(edge.seconds[choices[edge.start], choices[edge.end]])
    return found


@dataclass(frozen=True)
class Difference:
    """What two answers decide differently: (node, in the first, in the second), and how much the second takes more."""

    rows: tuple[tuple[str, str, str], ...]
    seconds: float
    memory: float
    reason: str

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = f"{self.seconds * 1e3:+.4g} ms, {self.memory / 2**20:+.1f} MiB"
        lines = [f"{head}; most of it: {self.reason}" if self.reason else head]
        return "\n".join([*lines, *(f"  {name}: {a} -> {b}" for name, a, b in self.rows)])


def difference(before: Answer, after: Answer) -> Difference:
    """Two answers to one problem. Errors: PlanError, if they are of graphs with other nodes."""
    one, two = before.labels(), after.labels()
    if list(one) != list(two):
        raise PlanError("difference: the answers are of two problems, with other nodes; possible are answers of one")
    rows = tuple((name, one[name], two[name]) for name in one if one[name] != two[name])
    return Difference(rows, after.time - before.time, after.memory - before.memory, _where(before, after))


def front(graph: CostGraph, points: int = 8, gap: float = 0.005) -> tuple[Answer, ...]:
    """The best answers for budgets between the smallest answer and the fastest one, from small to large.

    gap   how far from the best one each may be: 0.005 is 0.5 %

    Of answers that need as much memory, only the fastest is there. Errors: PlanError, as `ilp`.
    """
    fastest, least = solve(graph.within(None)), smallest(graph.within(None))
    found = [least]
    for budget in np.linspace(least.memory, fastest.memory, points)[1:-1]:
        found.append(ilp(graph.within(float(budget)), gap=gap))
    found.append(fastest)
    kept: list[Answer] = []
    for one in sorted(found, key=lambda a: (a.memory, a.time)):
        if not kept or one.time < kept[-1].time * (1 - 1e-12):
            kept.append(replace(one, graph=graph))
    return tuple(kept)
