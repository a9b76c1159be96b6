"""From captured layers to a chain: which strategy does each layer take as a whole?

    layer 0        layer 1        layer 2
    rows           rows           rows             every rank has some rows; gradients of weights are summed
    zero           zero           zero             the same, and weights are stored as shards (ZeRO 3)
    tensor         tensor         tensor           operators are divided, as Megatron or `automatic` do
    sequence       sequence       sequence         the same, and the tokens between them
    + again        + again        + again          each also with its forward run again, to keep its input only

On a mesh of several axes a strategy is one of these for each axis. Edges are the repartitions of what layers hand on.
This is a smaller space than that of `operator_graph`, and a chain, so that the dynamic program with a memory axis
solves it (`chain`), with the choice of recomputation for each layer.

Source: Miao et al., "Galvatron", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from minipar.costs.alpha_beta import collective_seconds
from minipar.errors import PlanError
from minipar.planner.cost_graph import CostGraph, Edge, Node, Table
from minipar.planner.moves import moves
from minipar.planner.operator_graph import ADAM, Machine, computing, kept
from minipar.planner.stages import Submesh
from minipar.program.mesh import Mesh
from minipar.sharding import automatic
from minipar.sharding.forms import Form, I, S, axes_of, divides, whole
from minipar.sharding.graph import Layer
from minipar.sharding.propagation import Sharding, has_names, propagate, sequence_parallel
from minipar.sharding.repartition import DEFAULT_LINK

KINDS = ("rows", "zero", "tensor", "sequence")


@dataclass(frozen=True)
class Strategy:
    """What a layer does on each axis, and whether its forward runs again."""

    kinds: tuple[tuple[str, str], ...]
    again: bool = False

    @property
    def label(self) -> str:
        """In words: "rows on dp, tensor on tp, again"."""
        said = ", ".join(f"{kind} on {axis}" for axis, kind in self.kinds) or "alone"
        return f"{said}, again" if self.again else said


@dataclass(frozen=True)
class Cost:
    """A layer with a strategy: seconds of a step, bytes, and the forms of what it is given and hands on.

    state, saved   bytes of parameters, gradients and optimizer; bytes kept for the backward of a micro-batch
    """

    strategy: Strategy
    seconds: float
    state: float
    saved: float
    given: tuple[Form, ...]
    handed: tuple[Form, ...]

    @property
    def memory(self) -> float:
        """All bytes."""
        return self.state + self.saved


def layer_graph(
    layers: Sequence[Layer],
    mesh: Mesh,
    machine: Machine | None = None,
    *,
    kinds: Sequence[str] = KINDS,
    again: bool = True,
    copies: float = ADAM,
    budget: float | None = None,
) -> CostGraph:
    """The chain of layers with their strategies; arguments as for `operator_graph`.

    kinds   the strategies that are tried on each axis; those that a layer cannot take are left out
    again   whether layers may run their forward again

    Errors: PlanError for an unknown kind, and for a layer that can take none.
    """
    chosen = machine or Machine()
    costs = layer_costs(layers, mesh, chosen, kinds, again, copies)
    if [] in costs:
        raise PlanError(
            f"layer {costs.index([])}: can take none of the strategies {', '.join(kinds)} on {mesh}; possible are "
            "other kinds, or axes that divide its rows"
        )
    nodes = [
        Node(
            f"{number}", tuple(c.strategy.label for c in own), tuple(c.seconds for c in own),
            tuple(c.memory for c in own), 1, tuple(own),
        )
        for number, own in enumerate(costs)
    ]  # fmt: skip
    edges = []
    for number, layer in enumerate(layers[1:]):
        before, after = costs[number], costs[number + 1]
        table: Table = np.zeros((len(before), len(after)))
        for j, name in enumerate(layer.graph.inputs):
            tensor = layer.graph.tensors[name]
            starts, ends = [c.handed[j] for c in before], [c.given[j] for c in after]
            found = moves(tensor.shape, tensor.itemsize, mesh, chosen.links, [*starts, *ends])
            table = table + found.table(starts, ends, tensor.differentiable)
        edges.append(Edge(number, number + 1, table))
    return CostGraph(tuple(nodes), tuple(edges), budget)


def layer_costs(
    layers: Sequence[Layer],
    mesh: Mesh,
    machine: Machine,
    kinds: Sequence[str] = KINDS,
    again: bool = True,
    copies: float = ADAM,
) -> list[list[Cost]]:
    """For each layer what each strategy that it can take costs, or nothing; equal layers are priced once.

    Errors: PlanError for an unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise PlanError(f"strategy {unknown[0] if unknown else ''!r}: unknown; possible are {', '.join(KINDS)}")
    known: dict[tuple[int, bool], list[Cost]] = {}
    found = []
    presets = _presets(layers, mesh)
    for number, layer in enumerate(layers):
        key = id(layer.graph), number == 0
        if key not in known:
            known[key] = list(_of_layer(layer, mesh, machine, kinds, again, copies, presets, number == 0))
        found.append(known[key])
    return found


def _presets(layers: Sequence[Layer], mesh: Mesh) -> dict[tuple[str, str], Mapping[str, str]]:
    """The annotations of each kind on each axis; none where the model has nothing to divide."""
    found: dict[tuple[str, str], Mapping[str, str]] = {}
    for axis in axes_of(mesh):
        found[axis, "rows"] = found[axis, "zero"] = {}
        try:
            found[axis, "tensor"] = automatic.default(layers, mesh.length(axis), axis)
        except PlanError:
            continue
        if has_names(layers):
            found[axis, "sequence"] = sequence_parallel(axis)
    return found


def _of_layer(
    layer: Layer,
    mesh: Mesh,
    machine: Machine,
    kinds: Sequence[str],
    again: bool,
    copies: float,
    presets: Mapping[tuple[str, str], Mapping[str, str]],
    first: bool,
) -> Iterator[Cost]:
    axes = [axis for axis in axes_of(mesh) if mesh.length(axis) > 1]
    for chosen in product(kinds, repeat=len(axes)):
        pairs = tuple(zip(axes, chosen, strict=True))
        if not all(pair in presets for pair in pairs):
            continue
        annotations = {pattern: text for pair in pairs for pattern, text in presets[pair].items()}
        if sum(len(presets[pair]) for pair in pairs) != len(annotations):
            continue  # two axes would divide the same operators
        try:
            given = {name: _given(layer, name, pairs, mesh, first) for name in layer.graph.inputs}
            sharding = propagate(layer, annotations, mesh, given, machine.links, strict=False)
        except PlanError:
            continue
        one = _cost(sharding, Strategy(pairs), machine, copies)
        yield one
        if again:
            yield _again(one, sharding, machine)


def _given(layer: Layer, name: str, pairs: Sequence[tuple[str, str]], mesh: Mesh, first: bool) -> Form:
    """How a layer is given a tensor: some rows, some tokens, or all. Errors: PlanError where it cannot be cut so."""
    shape, form = layer.graph.tensors[name].shape, whole(mesh)
    for axis, kind in pairs:
        place = S(0) if kind in ("rows", "zero") else S(1) if kind == "sequence" and not first else I
        if place.kind == "S" and not divides(shape, place, mesh.length(axis)):
            raise PlanError(f"{name}: cannot be given as {place} on {axis}")
        form = form.put(axis, place)
    return form


def _cost(sharding: Sharding, strategy: Strategy, machine: Machine, copies: float) -> Cost:
    graph, mesh = sharding.graph, sharding.mesh
    seconds = math.fsum(one.time for one in sharding.collectives())
    saved = 0.0
    for one in sharding.operators:
        seconds += computing(graph, one.operator, one.in_shapes, one.out_shapes, machine)
        saved += kept(graph, one.operator, one.out_shapes)
    state = 0.0
    read = {name for op in graph.operators for name in op.inputs}
    for name in graph.parameters:
        if name not in read:
            continue
        size: float = math.prod(sharding.local(name)) * graph.tensors[name].itemsize
        for axis, kind in strategy.kinds:
            if kind == "zero" and sharding.forms[name].on(axis).kind != "S":
                size /= mesh.length(axis)
                link = machine.links.get(axis, DEFAULT_LINK)
                seconds += collective_seconds("all_gather", mesh.length(axis), size, *link)  # before the backward
        state += copies * size
    handed = tuple(_without_sums(sharding.forms[name]) for name in graph.outputs)
    seconds += math.fsum(
        moves(t.shape, t.itemsize, mesh, machine.links, [a, b]).table([a], [b], t.differentiable).item()
        for name, b in zip(graph.outputs, handed, strict=True)
        for t, a in [(graph.tensors[name], sharding.forms[name])]
        if a != b
    )
    return Cost(strategy, seconds, state, saved, tuple(sharding.forms[n] for n in graph.inputs), handed)


def _without_sums(form: Form) -> Form:
    """The form in which a layer hands on: parts of a sum are added up."""
    return Form(form.axes, tuple(I if p.kind == "P" else p for p in form.placements))


def _again(one: Cost, sharding: Sharding, machine: Machine) -> Cost:
    """The same, keeping only what the layer is given: its forward runs once more, with its collectives."""
    graph = sharding.graph
    more = math.fsum(c.time for c in sharding.collectives() if c.phase == "forward")
    more += math.fsum(
        computing(graph, o.operator, o.in_shapes, o.out_shapes, machine, training=False) for o in sharding.operators
    )
    tensors = [graph.tensors[name] for name in graph.inputs]
    inputs: float = sum(
        math.prod(sharding.local(t.name)) * t.itemsize for t in tensors if t.differentiable or not t.floating
    )
    return Cost(
        Strategy(one.strategy.kinds, True), one.seconds + more, one.state, min(one.saved, float(inputs)), one.given,
        one.handed,
    )  # fmt: skip


def times_on(
    layers: Sequence[Layer], meshes: Sequence[Submesh], machine: Machine, near: str = "tp", far: str = "dp"
) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """For the stages of `stages`: seconds, bytes of state and kept bytes of each layer on each submesh.

    Each layer takes the fastest strategy that divides it on all devices of a submesh; nodes are the axis `far`, devices
    of a node the axis `near`. A layer that cannot be divided so has infinite time.
    """
    times, states, saved = [], [], []
    for n, m in meshes:
        mesh = Mesh([(far, n), (near, m)])
        best = [
            min(own, key=lambda c: c.seconds, default=None) for own in layer_costs(layers, mesh, machine, again=False)
        ]
        times.append([math.inf if c is None else c.seconds for c in best])
        states.append([0.0 if c is None else c.state for c in best])
        saved.append([0.0 if c is None else c.saved for c in best])
    return times, states, saved
