"""From answers to forms that run, and back: annotations of an answer, and the answer that propagation gives.

    problem = operator_problem(captured.layers, Mesh(tp=2))
    found = ilp(problem.graph)
    train(model, data, "tp=2", annotations=problem.annotations(found))

An annotation is what a user would write: {"1.mlp.0": "S2 on tp"}. It says in which form an operator writes. Propagation
finds the same ways again; `annotations` makes sure of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

from minipar.errors import PlanError
from minipar.planner.answer import Answer, Comparison, answer, compare
from minipar.planner.cost_graph import CostGraph
from minipar.planner.elimination import eliminate
from minipar.planner.operator_graph import Machine, Way, operator_graph, tie
from minipar.program.mesh import Mesh
from minipar.sharding import automatic
from minipar.sharding.graph import Layer
from minipar.sharding.propagation import ModelSharding, propagate_model


@dataclass(frozen=True, eq=False)
class OperatorProblem:
    """Captured layers on a mesh, and their cost graph.

    inputs   the form of what the model is given
    """

    layers: tuple[Layer, ...]
    mesh: Mesh
    machine: Machine
    graph: CostGraph
    inputs: str = "I"

    @cached_property
    def _nodes(self) -> dict[str, int]:
        return {node.name: k for k, node in enumerate(self.graph.nodes)}

    @cached_property
    def _firsts(self) -> list[Layer]:
        """For each layer the one whose names the graph has: the first of those that decide alike."""
        known: dict[object, Layer] = {}
        found = []
        for number, layer in enumerate(self.layers):
            one = known.setdefault(tie(layer, number), layer)
            tied = all(layer.own(op.name) not in self._nodes for op in layer.graph.operators)
            found.append(one if tied else layer)
        return found

    def way(self, found: Answer, operator: str) -> Way:
        """How an answer runs an operator, by the name in the graph."""
        k = self.graph.number(operator)
        built: Way = self.graph.nodes[k].meaning[found.choices[k]]
        return built

    def annotations(self, found: Answer) -> dict[str, str]:
        """The forms of an answer, by the names of operators and parameters, for `propagate_model` and `train`.

        Errors: PlanError, if propagation does not come to the same ways from them.
        """
        annotations: dict[str, str] = {}
        for layer, first in zip(self.layers, self._firsts, strict=True):
            for op in layer.graph.operators:
                way = self.way(found, first.own(op.name))
                annotations[layer.own(op.name)] = str(way.outs[0])
                for name, form in zip(op.inputs, way.ins, strict=True):
                    if layer.graph.tensors[name].kind == "parameter" and any(p.kind == "S" for p in form.placements):
                        annotations[layer.own(name)] = str(form)
            for name in layer.graph.parameters:
                if first.own(name) in self._nodes:
                    k = self._nodes[first.own(name)]
                    stored = self.graph.nodes[k].meaning[found.choices[k]]
                    annotations[layer.own(name)] = str(stored)
        again = propagate_model(self.layers, annotations, self.mesh, self.inputs, self.machine.links)
        other = self._differences(found, again)
        if other:
            raise PlanError(
                f"annotations: propagation divides {other[0]} in another way than the answer; pin it to a form that "
                "its neighbours lead to"
            )
        return annotations

    def _differences(self, found: Answer, model: ModelSharding) -> list[str]:
        """The operators that a sharding runs in another way than an answer does."""
        names = []
        for layer, first, sharding in zip(self.layers, self._firsts, model.shardings, strict=True):
            for one in sharding.operators:
                way = self.way(found, first.own(one.operator.name))
                if (way.ins, way.outs) != (one.ins, one.outs):
                    names.append(layer.own(one.operator.name))
        return names

    def propagated(self) -> Answer:
        """What propagation makes of a few annotations, as an answer: the baseline that searches nothing.

        The annotations are those that `train` takes for the innermost axis of the mesh, Megatron's or automatic ones;
        rows are divided over all other axes. Errors: PlanError, as `propagate_model`; and if it divides an operator in
        a way that the graph does not have.
        """
        began = perf_counter()
        axes = [name for name, size in self.mesh if name != "pp" and size > 1]
        annotations = automatic.default(self.layers, self.mesh.length(axes[-1]), axes[-1]) if axes else {}
        rows = ", ".join(f"S0 on {axis}" for axis in axes[:-1])
        model = propagate_model(self.layers, annotations, self.mesh, rows or self.inputs, self.machine.links)
        return self._answer("propagation", model, began)

    def rows(self) -> Answer:
        """Data parallel on every axis: rows are divided, and every rank has all parameters."""
        began = perf_counter()
        axes = [name for name, size in self.mesh if name != "pp" and size > 1]
        inputs = ", ".join(f"S0 on {axis}" for axis in axes) or self.inputs
        model = propagate_model(self.layers, {}, self.mesh, inputs, self.machine.links)
        return self._answer("data parallel", model, began)

    def _answer(self, method: str, model: ModelSharding, began: float) -> Answer:
        """The answer of a sharding. Tied layers take what their last one does; values take what suits them best."""
        kept = [list(range(len(node.labels))) for node in self.graph.nodes]
        for first, sharding in zip(self._firsts, model.shardings, strict=True):
            for one in sharding.operators:
                k = self._nodes[first.own(one.operator.name)]
                ways: Sequence[Way] = self.graph.nodes[k].meaning
                same = [j for j, way in enumerate(ways) if (way.ins, way.outs) == (one.ins, one.outs)]
                if not same:
                    raise PlanError(
                        f"{method}: {first.own(one.operator.name)} runs as {one}, which the cost graph does not have"
                    )
                kept[k] = same[:1]
            for name in sharding.graph.parameters:
                at = self._nodes.get(first.own(name))
                if at is not None:
                    forms = list(self.graph.nodes[at].meaning)
                    if sharding.forms[name] in forms:
                        kept[at] = [forms.index(sharding.forms[name])]
        small = self.graph.within(None).keep(kept)
        solved = eliminate(small)
        choices = tuple(own[k] for own, k in zip(kept, solved.choices, strict=True))
        built = answer(self.graph, method, choices, began)
        if not self.graph.fits(choices):
            raise PlanError(
                f"{method}: needs {built.memory / 2**20:.1f} MiB on each rank, more than the budget of "
                f"{(self.graph.budget or 0) / 2**20:.1f} MiB"
            )
        return built

    def compare(self) -> Comparison:
        """All methods side by side on this problem, with propagation and data parallel as baselines."""
        from minipar.planner.side_by_side import METHODS

        baselines = {"propagation": lambda _: self.propagated(), "data parallel": lambda _: self.rows()}
        return compare(self.graph, {**METHODS, **baselines})

    def pinned(self, pins: Mapping[str, str]) -> OperatorProblem:
        """The same problem with choices of nodes that are fixed: {"1.mlp.0": "S2 on tp"}."""
        return replace(self, graph=self.graph.pinned(pins))


def operator_problem(
    layers: Sequence[Layer], mesh: Mesh, machine: Machine | None = None, *, inputs: str = "I", **options: Any
) -> OperatorProblem:
    """A problem from captured layers; arguments and errors as for `operator_graph`."""
    chosen = machine or Machine()
    graph = operator_graph(layers, mesh, chosen, inputs=inputs, **options)
    return OperatorProblem(tuple(layers), mesh, chosen, graph, inputs)
