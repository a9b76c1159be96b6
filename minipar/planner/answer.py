"""What every search returns, and several of them side by side.

found = compare(graph)
print(found)                    a row for each method: time, gap to the best and to the bound, memory, seconds
found.best.labels()             of each node its choice
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from time import perf_counter
from typing import Any

from minipar.errors import PlanError
from minipar.planner.cost_graph import Choices, CostGraph


@dataclass(frozen=True)
class Answer:
    """What one search found.

    method    its name
    choices   of each node of the graph its choice
    time      seconds of the answer, as the cost graph counts them
    memory    bytes on each rank
    search    seconds that the search took
    bound     no answer within the budget is faster; None if the method knows none
    tried     how many answers, or parts of them, it looked at; 0 if it does not count them
    notes     what else is worth knowing, in words
    """

    graph: CostGraph = field(repr=False, compare=False)
    method: str
    choices: Choices
    time: float
    memory: float
    search: float = 0.0
    bound: float | None = None
    tried: int = 0
    notes: str = ""

    @property
    def gap_to_bound(self) -> float | None:
        """How much slower it is than the bound, at most: 0.02 is 2 %."""
        if self.bound is None:
            return None
        return max(0.0, self.time / self.bound - 1) if self.bound > 0 else (0.0 if self.time <= 0 else float("inf"))

    def labels(self) -> dict[str, str]:
        """Of each node its choice, in words."""
        return self.graph.labels(self.choices)

    def __str__(self) -> str:
        bound = f", at most {self.gap_to_bound:.1%} over the bound" if self.gap_to_bound is not None else ""
        return f"{self.method}: {self.time:.6g} s, {self.memory / 2**20:.1f} MiB{bound}, found in {self.search:.2f} s"


def answer(graph: CostGraph, method: str, choices: Choices, began: float, **more: Any) -> Answer:
    """An answer, with its time and memory as the graph counts them. `began`: perf_counter() before the search."""
    found = Answer(graph, method, choices, graph.seconds(choices), graph.memory(choices), perf_counter() - began)
    return replace(found, **more)


def impossible(graph: CostGraph, least: float) -> PlanError:
    """The error of a budget that no answer fits in. `least`: bytes of the smallest answer."""
    budget = graph.budget or 0.0
    return PlanError(
        f"budget={budget / 2**20:.1f}MiB: no answer fits; the smallest needs {least / 2**20:.1f} MiB on each rank: "
        "possible is a budget of that size, or a mesh with more ranks"
    )


def least_memory(graph: CostGraph) -> float:
    """Bytes that every answer needs at least: each node's smallest choice. An answer of this size need not exist."""
    return sum(min(node.memory) for node in graph.nodes)


@dataclass(frozen=True)
class Comparison:
    """Answers of several methods to one problem, the fastest first.

    answers   of the methods that have one within the budget
    failed    why the others have none, by method
    """

    answers: tuple[Answer, ...]
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Answer:
        """The fastest one. Errors: PlanError, if no method has an answer."""
        if not self.answers:
            raise PlanError("; ".join(self.failed.values()) or "no method was asked")
        return self.answers[0]

    @property
    def bound(self) -> float | None:
        """The largest lower bound that any of them knows."""
        known = [one.bound for one in self.answers if one.bound is not None]
        return max(known) if known else None

    def __getitem__(self, method: str) -> Answer:
        """The answer of a method. Errors: PlanError for one that has none."""
        for one in self.answers:
            if one.method == method:
                return one
        known = ", ".join(one.method for one in self.answers)
        raise PlanError(f"method {method!r}: {self.failed.get(method, f'was not asked; there are {known}')}")

    def table(self) -> list[tuple[str, ...]]:
        """A row of text per method."""
        head = ("method", "time", "over the best", "over the bound", "memory", "search")
        rows = []
        for one in self.answers:
            over = f"{one.time / self.best.time - 1:.1%}" if self.best.time else "0.0%"
            above = f"{max(0.0, one.time / self.bound - 1):.1%}" if self.bound else "-"
            rows.append(
                (one.method, f"{one.time * 1e3:.4g} ms", over, above, f"{one.memory / 2**20:.1f} MiB",
                 f"{one.search:.3f} s")
            )  # fmt: skip
        return [head, *rows, *((method, "-", why, "", "", "") for method, why in self.failed.items())]

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(len(row[k]) for row in rows if row[1] != "-") for k in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        head, *rows = self.table()
        lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
        lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        return "<table>" + "".join(lines) + "</table>"


def compare(graph: CostGraph, methods: Mapping[str, Callable[[CostGraph], Answer]] | None = None) -> Comparison:
    """All methods on one problem, side by side; a method that cannot answer says why.

    methods   functions from a cost graph to an answer, by name; default: `side_by_side.METHODS`
    """
    if methods is None:
        from minipar.planner.side_by_side import METHODS

        methods = METHODS
    answers, failed = [], {}
    for name, search in methods.items():
        try:
            answers.append(replace(search(graph), method=name))
        except PlanError as error:
            failed[name] = str(error)
    return Comparison(tuple(sorted(answers, key=lambda one: one.time)), failed)
