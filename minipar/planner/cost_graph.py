"""The cost graph: what every search of this package minimises.

    norm --- column --- gelu --- row --- sum          a node is a decision, with a few choices
             |                   |                    an edge costs what two choices cost beside each other
             weight              weight

A node has for each of its choices seconds and bytes. An edge has a table: the seconds of moving a value from the form
that one node writes to the form that the other one reads, there and back. The time of an answer is the sum over all
nodes and edges, as if nothing overlapped; its memory is the sum over the nodes. `numpy.inf` in a table: these two
choices do not go together.

`operator_graph` makes one from captured operators. A search takes any cost graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minipar.errors import PlanError
from minipar.wording import several

Table = NDArray[np.float64]
Choices = tuple[int, ...]  # of each node the number of its choice


@dataclass(frozen=True)
class Node:
    """One decision.

    name      unique in its graph
    labels    what each choice is, in words
    seconds   of each choice, for all layers that decide alike
    memory    bytes of each choice, on each rank, for all these layers
    count     how many layers decide alike
    meaning   what stands behind each choice; searches do not look at it
    """

    name: str
    labels: tuple[str, ...]
    seconds: tuple[float, ...]
    memory: tuple[float, ...] = ()
    count: int = 1
    meaning: tuple[Any, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.memory:
            object.__setattr__(self, "memory", (0.0,) * len(self.seconds))
        if not self.labels or len({len(self.labels), len(self.seconds), len(self.memory)}) != 1:
            raise PlanError(
                f"node {self.name}: {several(len(self.labels), 'choice')}, {len(self.seconds)} times and "
                f"{len(self.memory)} sizes; each choice needs one of both"
            )
        if min(self.seconds) < 0 or min(self.memory) < 0:
            raise PlanError(f"node {self.name}: seconds and bytes must be at least 0")


@dataclass(frozen=True, eq=False)
class Edge:
    """What two nodes cost together: `seconds[i, j]` for choice i of node `start` and choice j of node `end`."""

    start: int
    end: int
    seconds: Table
    name: str = ""


@dataclass(frozen=True, eq=False)
class CostGraph:
    """Nodes in the order in which they run, and edges from earlier to later ones.

    budget   bytes that each rank may hold; None: no limit

    Errors: PlanError for two nodes of one name, and for an edge whose table does not fit its nodes.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    budget: float | None = None

    def __post_init__(self) -> None:
        if len({node.name for node in self.nodes}) != len(self.nodes) or not self.nodes:
            raise PlanError(f"cost graph of {several(len(self.nodes), 'node')}: each needs a name of its own")
        for edge in self.edges:
            if not 0 <= edge.start < edge.end < len(self.nodes):
                raise PlanError(
                    f"edge {edge.start}, {edge.end}: must go from a node to a later one, of 0 to {len(self.nodes) - 1}"
                )
            shape = len(self.nodes[edge.start].labels), len(self.nodes[edge.end].labels)
            if edge.seconds.shape != shape:
                raise PlanError(
                    f"edge {self.nodes[edge.start].name} to {self.nodes[edge.end].name}: a table of "
                    f"{'x'.join(map(str, edge.seconds.shape))} for {shape[0]} and {shape[1]} choices"
                )

    @cached_property
    def touching(self) -> tuple[tuple[int, ...], ...]:
        """For each node the numbers of its edges."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for e, edge in enumerate(self.edges):
            found[edge.start].append(e)
            found[edge.end].append(e)
        return tuple(map(tuple, found))

    @property
    def plans(self) -> int:
        """How many answers there are."""
        return math.prod(len(node.labels) for node in self.nodes)

    def seconds(self, choices: Sequence[int]) -> float:
        """The time of an answer: the sum over nodes and edges."""
        of_nodes = math.fsum(node.seconds[k] for node, k in zip(self.nodes, choices, strict=True))
        return of_nodes + math.fsum(float(e.seconds[choices[e.start], choices[e.end]]) for e in self.edges)

    def memory(self, choices: Sequence[int]) -> float:
        """Bytes on each rank."""
        return math.fsum(node.memory[k] for node, k in zip(self.nodes, choices, strict=True))

    def fits(self, choices: Sequence[int]) -> bool:
        """Whether an answer stays within the budget."""
        return self.budget is None or self.memory(choices) <= self.budget * (1 + 1e-9)

    def number(self, name: str) -> int:
        """The number of a node. Errors: PlanError with the closest names."""
        names = [node.name for node in self.nodes]
        if name not in names:
            close = get_close_matches(name, names, 3, 0.4)
            raise PlanError(f"node {name!r}: no such node; the closest are {', '.join(close or names[:3])}")
        return names.index(name)

    def choice(self, name: str, label: str) -> int:
        """The number of a choice of a node. Errors: PlanError with the possible ones."""
        node = self.nodes[self.number(name)]
        if label not in node.labels:
            raise PlanError(f"node {name}: no choice {label!r}; possible are {'; '.join(node.labels)}")
        return node.labels.index(label)

    def labels(self, choices: Sequence[int]) -> dict[str, str]:
        """An answer in words: of each node its choice."""
        return {node.name: node.labels[k] for node, k in zip(self.nodes, choices, strict=True)}

    def pinned(self, pins: Mapping[str, str]) -> CostGraph:
        """The same graph, in which some nodes have one choice only: {"2.mlp.0": "n on tp"}.

        Errors: PlanError for a node or a choice that there is not.
        """
        kept = [range(len(node.labels)) for node in self.nodes]
        for name, label in pins.items():
            k = self.choice(name, label)
            kept[self.number(name)] = range(k, k + 1)
        return self.keep(kept)

    def keep(self, kept: Sequence[Iterable[int]]) -> CostGraph:
        """The same graph with some of the choices of each node."""
        every = [list(one) for one in kept]
        nodes = tuple(
            replace(
                node,
                labels=tuple(node.labels[k] for k in one),
                seconds=tuple(node.seconds[k] for k in one),
                memory=tuple(node.memory[k] for k in one),
                meaning=tuple(node.meaning[k] for k in one) if node.meaning else (),
            )
            for node, one in zip(self.nodes, every, strict=True)
        )
        edges = tuple(
            replace(edge, seconds=edge.seconds[np.ix_(every[edge.start], every[edge.end])]) for edge in self.edges
        )
        return CostGraph(nodes, edges, self.budget)

    def within(self, budget: float | None) -> CostGraph:
        """The same graph with another budget."""
        return replace(self, budget=budget)

    @property
    def is_chain(self) -> bool:
        """Whether every edge goes from a node to the next one."""
        return all(edge.end == edge.start + 1 for edge in self.edges)


def consistent(graph: CostGraph) -> CostGraph:
    """The same graph without choices that go together with no choice of some neighbour: no answer has them.

    Errors: PlanError, if a node has no choice left.
    """
    kept: list[NDArray[np.bool_]] = [np.ones(len(node.labels), dtype=bool) for node in graph.nodes]
    changed = True
    while changed:
        changed = False
        for edge in graph.edges:
            fits = np.isfinite(edge.seconds) & kept[edge.start][:, None] & kept[edge.end][None, :]
            for number, axis in ((edge.start, 1), (edge.end, 0)):
                left = np.asarray(fits.any(axis=axis))
                if not left.any():
                    raise PlanError(f"node {graph.nodes[number].name}: none of its choices goes with its neighbours'")
                changed |= bool((left != kept[number]).any())
                kept[number] = left
    return graph.keep([np.flatnonzero(one).tolist() for one in kept])


def undominated(graph: CostGraph) -> list[list[int]]:
    """Of each node the choices that could be part of a best answer.

    A choice is left out if another one takes no longer, needs no more memory, and costs no more beside any choice of
    any neighbour. This changes no optimum.
    """
    found = []
    for number, node in enumerate(graph.nodes):
        columns = [np.array([node.seconds, node.memory]).T]
        for e in graph.touching[number]:
            edge = graph.edges[e]
            columns.append(edge.seconds if edge.start == number else edge.seconds.T)
        rows = np.hstack(columns)
        kept: list[int] = []
        for k in np.argsort([float(np.where(np.isinf(row), 1e30, row).sum()) for row in rows], kind="stable"):
            if not any(np.all(rows[other] <= rows[k]) for other in kept):
                kept.append(int(k))
        found.append(sorted(kept))
    return found
