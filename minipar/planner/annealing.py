"""FlexFlow's search: a random walk from plan to plan, each of them simulated, but only where it changed.

    now        a=0  b=2  c=1  d=0        a node is drawn, and a choice for it
    proposed   a=0  b=2  c=3  d=0        c and its edges have other times; what does not wait for them is not touched

A proposal that is faster is taken. A slower one is taken with the chance exp(-(slower by) / temperature). In a part of
the proposals a node takes what suits one of its neighbours best. From time to time the walk goes back to the best plan.

Two clocks can be used. The sum of all times is that of the cost graph: a change touches a node and its edges. With
`overlap` the plan is a timeline: nodes compute one after the other, and messages go one after the other beside them.

    compute   | a |   b   |     | c |          a task starts when the ones that it waits for have ended, and the one
    link          | a-b |  | b-c |             before it on its stream; a change goes from task to task, and ends where
                                               a task ends as before

Few nodes change at a time, so this walk does not leave a valley in which several must change together. Programs for
such graphs (`intra`, `elimination`) need no luck; but the walk takes any clock.

Source: Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", 2019, sections 5 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import perf_counter
from typing import Protocol

import numpy as np

from minipar.errors import PlanError
from minipar.planner.answer import Answer, answer
from minipar.planner.cost_graph import CostGraph
from minipar.planner.greedy import greedy

NEIGHBOUR = 0.25  # of all proposals take what suits a neighbour best


class Clock(Protocol):
    """How long the current plan takes, and how long it would take with one change."""

    @property
    def time(self) -> float:
        """Seconds of the current plan."""

    def change(self, node: int, choice: int) -> float:
        """Change a node, and return the new time."""

    def undo(self) -> None:
        """Take the last change back."""


def anneal(
    graph: CostGraph,
    seed: int = 0,
    proposals: int = 20_000,
    temperature: float = 0.002,
    overlap: bool = False,
    start: Sequence[int] | None = None,
) -> Answer:
    """The fastest plan of a random walk; the same one for the same seed.

    temperature   as a share of the time of the first plan
    overlap       whether the time is that of the timeline; otherwise the sum
    start         the first plan; default: the greedy one

    `Answer.time` is the sum, whichever clock was used; the notes give the other one. Errors: PlanError for a start that
    does not fit the budget, and as `greedy`.
    """
    began = perf_counter()
    choices = list(greedy(graph).choices if start is None else start)
    if not graph.fits(choices):
        raise PlanError("anneal: the start needs more memory than the budget; possible is another start")
    random = np.random.default_rng(seed)
    clock: Clock = Timeline(graph, choices) if overlap else Sum(graph, choices)
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
    notes = f"with overlap {best_time:.6g} s" if overlap else ""
    return answer(graph, "annealing", tuple(best), began, tried=proposals, notes=notes)


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


@dataclass
class _Task:
    """A node or an edge: where it stands, what it waits for, and who waits for it."""

    seconds: float
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    end: float = 0.0


class Timeline:
    """The plan on two streams: nodes compute in their order, and edges are sent in the order of their ends.

    touched   how many tasks the last change simulated again
    """

    def __init__(self, graph: CostGraph, choices: Sequence[int]) -> None:
        self.graph, self.choices = graph, list(choices)
        self.tasks: list[_Task] = []
        self.of_node: dict[int, int] = {}
        self.of_edge: dict[int, int] = {}
        self.touched = 0
        last_compute, last_link = -1, -1
        for number in range(len(graph.nodes)):
            sent = []
            for e in (e for e in graph.touching[number] if graph.edges[e].end == number):
                last_link = self.of_edge[e] = self._add([last_link, self.of_node[graph.edges[e].start]])
                sent.append(last_link)
            last_compute = self.of_node[number] = self._add([last_compute, *sent])
        for number in range(len(graph.nodes)):
            self._set(number)
        self._ends = last_compute, last_link
        self._last: tuple[int, int, list[tuple[int, float]]] = (0, self.choices[0], [])
        self._run(range(len(self.tasks)))

    @property
    def time(self) -> float:
        """When the last task ends."""
        return max(self.tasks[k].end for k in self._ends if k >= 0)

    def change(self, node: int, choice: int) -> float:
        """Change a node, and simulate again what the change touches; returns the new time."""
        before = self.choices[node]
        self.choices[node] = choice
        changed = list(self._set(node))
        self._last = node, before, self._run(changed)
        return self.time

    def undo(self) -> None:
        """Take the last change back."""
        node, choice, ends = self._last
        self.choices[node] = choice
        for _ in self._set(node):
            pass
        for k, end in ends:
            self.tasks[k].end = end

    def _add(self, before: Iterable[int]) -> int:
        number = len(self.tasks)
        waits = sorted({k for k in before if k >= 0})
        self.tasks.append(_Task(0.0, waits))
        for k in waits:
            self.tasks[k].after.append(number)
        return number

    def _set(self, number: int) -> Iterator[int]:
        """The times of a node and its edges, by the present choices; gives the tasks whose time changed."""
        graph, choices = self.graph, self.choices
        times = [(self.of_node[number], graph.nodes[number].seconds[choices[number]])]
        for e in graph.touching[number]:
            edge = graph.edges[e]
            times.append((self.of_edge[e], float(edge.seconds[choices[edge.start], choices[edge.end]])))
        changed = [k for k, seconds in times if self.tasks[k].seconds != seconds]
        for k, seconds in times:
            self.tasks[k].seconds = seconds
        return iter(changed)

    def _run(self, changed: Iterable[int]) -> list[tuple[int, float]]:
        """Ends of these tasks, and of all that wait for one whose end changed; returns the ends that they had."""
        waiting = sorted(changed)
        queued = set(waiting)
        old = []
        self.touched = 0
        while waiting:
            k = heappop(waiting)
            queued.discard(k)
            self.touched += 1
            task = self.tasks[k]
            end = max((self.tasks[j].end for j in task.before), default=0.0) + task.seconds
            if end != task.end:
                old.append((k, task.end))
                task.end = end
                for j in task.after:
                    if j not in queued:
                        queued.add(j)
                        heappush(waiting, j)
        return old


def simulate(graph: CostGraph, choices: Sequence[int]) -> float:
    """The time of a plan on the timeline, from its beginning."""
    return Timeline(graph, choices).time
