"""Forms for a model whose names no preset knows: operators are divided in their order, columns and rows in turn.

    linear | relu | linear | relu | linear         the operators of a layer, or of a chain of layers
    column   S1     row  P   whole  column         a column cuts what it writes; an elementwise operator keeps the cut

The first matmul or convolution writes a shard of its outputs. What it writes goes through elementwise operators, views
and attention as propagation finds it. Where it comes to the next matmul cut along what that one sums over, that one is
a row: it reads a shard of its weights, and writes a part of the sum. Where it does not, that one is a column again. The
queries of attention are a column, and so propagation makes columns of the keys and values, heads by heads, and a row of
the projection behind. Of a fused projection every equal piece is cut, where that divides more of the layer.

The result is annotations by name, as a user would write them: print them, change one, and give them to `train`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from minipar.errors import PlanError
from minipar.program.mesh import Mesh
from minipar.sharding.forms import Form, P, Placement, S, divides, whole
from minipar.sharding.graph import Graph, Layer, Operator
from minipar.sharding.propagation import (
    Preset,
    Sharding,
    Ways,
    has_names,
    megatron,
    propagate,
)
from minipar.sharding.rules import RULES
from minipar.wording import several

PIECES = (1, 3, 2)  # of a projection: one; queries, keys and values; a gate and what it multiplies


def default(layers: Sequence[Layer], ranks: int, axis: str = "tp") -> Preset:
    """The annotations that a model gets if nobody gives any: Megatron's by name, or those of `by_operators`.

    Errors: PlanError, if nothing of the model can be divided by so many ranks.
    """
    return megatron(axis) if has_names(layers) else by_operators(layers, ranks, axis)


def by_operators(layers: Sequence[Layer], ranks: int, axis: str = "tp") -> Preset:
    """Annotations for every matmul and convolution of a chain of layers: columns and rows in turn, without names.

    Errors: PlanError, if none of them can be divided by so many ranks, with the sizes and what is possible.
    """
    mesh = Mesh([(axis, ranks)])
    shared = _shared(layers)
    stored: dict[str, Form] = {}  # parameters that layers share, as the first of them reads them
    done: dict[object, tuple[dict[str, str], Sharding]] = {}
    found = Preset()
    handed = [whole(mesh)] * (len(layers[0].graph.inputs) if layers else 0)
    for layer in layers:
        graph = layer.graph
        given = dict(zip(graph.inputs, handed, strict=False))
        own = {name: stored.get(layer.own(name)) for name in graph.parameters if layer.own(name) in shared}
        key = id(graph), tuple(map(str, given.values())), tuple((name, str(form)) for name, form in own.items())
        if key not in done:
            done[key] = _of_layer(layer, given, own, mesh, axis)
        annotations, sharding = done[key]
        found.update({layer.own(name): text for name, text in annotations.items()})
        for one in sharding.operators:
            for name, form in zip(one.operator.inputs, one.ins, strict=True):
                if layer.own(name) in shared:
                    stored.setdefault(layer.own(name), form)
        handed = [sharding.forms[name] for name in graph.outputs]
    if not found:
        raise PlanError(_nothing(layers, ranks, axis))
    return found


def _shared(layers: Sequence[Layer]) -> set[str]:
    """Parameters that several operators read."""
    seen: set[str] = set()
    twice: set[str] = set()
    for layer in layers:
        for op in layer.graph.operators:
            for name in op.inputs:
                if layer.graph.tensors[name].kind == "parameter":
                    (twice if layer.own(name) in seen else seen).add(layer.own(name))
    return twice


def _of_layer(
    layer: Layer, given: Mapping[str, Form], shared: Mapping[str, Form | None], mesh: Mesh, axis: str
) -> tuple[dict[str, str], Sharding]:
    """What is said of a layer's operators, by their names in the graph; and the forms that follow.

    shared   parameters that other operators read, too: the form that they have there, or None before the first
    """
    graph, ranks = layer.graph, mesh.length(axis)
    plain = Layer(graph)
    annotations: dict[str, str] = {}
    ways: Ways = {}
    now = propagate(plain, {}, mesh, given, ways=ways)
    for op in graph.operators:
        if now[op.name].choices[axis].divided:
            continue
        tries = []
        for place in _columns(op, graph, ranks, shared):
            text = f"{place} on {axis}"
            try:
                sharding = propagate(plain, {**annotations, op.name: text}, mesh, given, ways=ways)
            except PlanError:
                continue  # it does not go together with what stands already
            if sharding[op.name].choices[axis].divided and _agrees(sharding, shared, axis):
                tries.append((text, sharding))
        if tries:
            annotations[op.name], now = min(tries, key=lambda one: _price(one[1]))
    for one in now.operators:
        if _weight(one.operator, graph) and one.operator.name not in annotations and one.choices[axis].divided:
            annotations[one.operator.name] = f"{one.outs[0].on(axis)} on {axis}"
    return annotations, now


def _weight(op: Operator, graph: Graph) -> str:
    """The parameter that an operator multiplies its input by and sums over; "" if it is no such operator."""
    stored = [n for n in op.inputs if graph.tensors[n].kind == "parameter" and len(graph.tensors[n].shape) > 1]
    if len(stored) != 1 or len(op.outputs) != 1 or op.op not in RULES:
        return ""
    ins, outs = _shapes(op.inputs, graph), _shapes(op.outputs, graph)
    line = RULES[op.op].of(op, ins, outs)
    if not outs[0]:  # (a sum of the parameter alone)
        return ""
    letters = {letter for dim in line.inputs[op.inputs.index(stored[0])] for letter, _ in dim}
    built = {letter for dim in line.outputs[0] for letter, _ in dim}
    return stored[0] if letters - built - line.fixed and line.linear else ""


def _shapes(names: Sequence[str], graph: Graph) -> list[tuple[int, ...]]:
    return [graph.tensors[name].shape for name in names]


def _columns(op: Operator, graph: Graph, ranks: int, shared: Mapping[str, Form | None]) -> Iterator[Placement]:
    """How an operator may write what it makes of its weight, cut."""
    name = _weight(op, graph)
    if not name:
        return
    shape = graph.tensors[op.outputs[0]].shape
    if "embedding" in op.op:
        # A table of its own stays whole: looking up is no work, and the parts would have to be added up. One that the
        # logits share is cut by rows, since a parameter lies in one way.
        if name in shared and divides(graph.tensors[name].shape, S(0), ranks):
            yield P
        return
    dim = 1 if "conv" in op.op else len(shape) - 1
    columns = [S(dim, pieces) for pieces in PIECES if divides(shape, S(dim, pieces), ranks)]
    yield from columns or [P]  # a row by itself, whose parts are added up at once


def _agrees(sharding: Sharding, shared: Mapping[str, Form | None], axis: str) -> bool:
    """Whether a parameter that several operators read is read in one form."""
    reads: dict[str, set[str]] = {name: {str(form.on(axis))} for name, form in shared.items() if form is not None}
    for one in sharding.operators:
        for name, form in zip(one.operator.inputs, one.ins, strict=True):
            if sharding.graph.tensors[name].kind == "parameter":
                reads.setdefault(name, set()).add(str(form.on(axis)))
    return all(len(found) == 1 for found in reads.values())


def _price(sharding: Sharding) -> tuple[float, float]:
    """Bytes of parameters that are read whole; then the seconds of all collectives."""
    graph = sharding.graph
    undivided = {
        name: graph.tensors[name].bytes
        for one in sharding.operators
        for name, form in zip(one.operator.inputs, one.ins, strict=True)
        if graph.tensors[name].kind == "parameter" and not any(p.kind == "S" for p in form.placements)
    }
    return sum(undivided.values()), sum(one.time for one in sharding.collectives())


def _nothing(layers: Sequence[Layer], ranks: int, axis: str) -> str:
    widths: dict[str, int] = {}
    for layer in layers:
        for op in layer.graph.operators:
            if _weight(op, layer.graph) and "embedding" not in op.op:
                shape = layer.graph.tensors[op.outputs[0]].shape
                widths[f"{layer.own(op.name)} ({op.op})"] = shape[1 if "conv" in op.op else -1]
    if not widths:
        return (
            f"{axis}={ranks}: the model has no matmul and no convolution with parameters, so there is nothing to "
            f"divide; possible is {axis}=1"
        )
    words = ", ".join(f"{name} makes {size}" for name, size in list(widths.items())[:3])
    more = f" and {len(widths) - 3} more" if len(widths) > 3 else ""
    fitting = [n for n in range(ranks - 1, 1, -1) if any(size % n == 0 for size in widths.values())]
    ways = " or ".join(f"{axis}={n}" for n in [*fitting[:1], 1])
    return (
        f"{axis}={ranks}: none of the {several(len(widths), 'matmul')} and convolutions can be cut into equal parts: "
        f"{words} features{more}; possible is {ways}, or annotations of your own"
    )
