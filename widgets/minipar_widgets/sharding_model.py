"""What the sharding explorer shows for some fixed forms: the forms that follow, collectives, blocks. No pixels here.

    found = explore(example("MLP"), Mesh(tp=2), [Pick("up", "tp", "S2")])
    found.rows       a tensor each, in the order in which the layer computes them, with its form on each axis
    found.moves      a collective each, and before which row it happens
    found.problem    why the newest pick cannot be, and `found.where`: at which row

If the newest picks cannot be, the forms are those of the picks before them: nothing disappears because of a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from minipar.errors import PlanError
from minipar.program.mesh import Mesh
from minipar.sharding import (
    Collective,
    Form,
    Graph,
    I,
    Layer,
    Operator,
    Path,
    Sharding,
    Slot,
    Tensor,
    backward,
    path,
    propagate,
)
from minipar.sharding.forms import Placement, axes_of, divides, parsed
from minipar.sharding.propagation import resolve
from minipar.sharding.repartition import Link
from minipar.wording import several

MOST_RANKS = 16
MANY_CHOICES = 160  # of a layer with more, what each would give is found for one tensor at a time


class Pick(NamedTuple):
    """A form that is fixed: of a tensor, on an axis, in letters (R, P, S0, S1, ...)."""

    tensor: str
    axis: str
    letters: str


@dataclass(frozen=True)
class Row:
    """A tensor.

    own       its name as it is shown: of a value, the name of the operator that writes it
    made      how it comes about: "linear(n, up.weight)", or "input", "parameter", "buffer"
    operator  the operator that writes it; "" for what the layer is given
    local     the shape that a rank has
    forms     its letters on each axis
    offered   the letters that can be asked for, on each axis
    blocks    for each rank what it has: of each dimension the intervals (start, stop)
    """

    name: str
    own: str
    shape: tuple[int, ...]
    itemsize: int
    made: str
    operator: str
    local: tuple[int, ...]
    forms: Mapping[str, str]
    offered: Mapping[str, tuple[str, ...]]
    blocks: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def local_bytes(self) -> int:
        """Of what a rank has."""
        return math.prod(self.local) * self.itemsize


@dataclass(frozen=True)
class Move:
    """A collective that follows from the forms.

    at             before which row it happens; of a gradient, before which row its value is read. len(rows): at the end
    before, after  the letters on its axis; "" inside of an operator
    bytes          that each rank has before it
    once           whether the gradient of a parameter is summed: once a step is enough
    """

    at: int
    phase: str
    op: str
    axis: str
    value: str
    before: str
    after: str
    bytes: int
    seconds: float
    why: str
    once: bool = False


@dataclass(frozen=True)
class Found:
    """A layer with the forms that follow from `picks`; see the top of the file.

    refused   newer picks, which cannot be: `problem` says why the last one cannot
    """

    layer: Layer
    mesh: Mesh
    picks: tuple[Pick, ...]
    rows: tuple[Row, ...]
    moves: tuple[Move, ...]
    refused: tuple[Pick, ...] = ()
    problem: str = ""
    where: int = -1

    @property
    def fixed(self) -> dict[str, dict[str, str]]:
        """The picks by tensor and axis."""
        found: dict[str, dict[str, str]] = {}
        for pick in self.picks:
            found.setdefault(pick.tensor, {})[pick.axis] = pick.letters
        return found

    @property
    def newest(self) -> int:
        """The row of the newest pick; of the layer's last tensor, if nothing is fixed."""
        every = (*self.picks, *self.refused)
        name = every[-1].tensor if every else ""
        return next((k for k, row in enumerate(self.rows) if row.name == name), len(self.rows) - 1)


def own(layer: Layer, tensor: str) -> str:
    """The name of a tensor as it is shown: of a value, the name of the operator that writes it."""
    writer = layer.graph.writer(tensor)
    if writer is None:
        return layer.own(tensor)
    number = f"[{writer.outputs.index(tensor)}]" if len(writer.outputs) > 1 else ""
    return layer.own(writer.name) + number


def annotated(found: Found) -> dict[str, str]:
    """The picks as annotations: by the tensor's own name, such as "S2 on tp"."""
    return {
        own(found.layer, name): ", ".join(f"{letters} on {axis}" for axis, letters in said.items())
        for name, said in found.fixed.items()
    }


def column(letters: str) -> str:
    """The column in which letters stand: S2:3 is drawn where S2 is."""
    return letters.partition(":")[0]


def letters(placement: Placement) -> str:
    """How the explorer writes a placement: R and I are both whole, and are both written R."""
    return "R" if placement.whole else str(placement)


def explore(layer: Layer, mesh: Mesh, picks: Sequence[Pick], links: Mapping[str, Link] | None = None) -> Found:
    """The forms that follow from picks, the newest one last.

    Errors: PlanError for a mesh that is too large to be drawn, or without an axis that tensors lie on.
    """
    mesh = Mesh((axis, mesh.length(axis)) for axis in axes_of(mesh))
    if not 1 <= len(mesh) <= 3 or mesh.size > MOST_RANKS:
        raise PlanError(f"{mesh}: the explorer draws meshes of 1 to 3 axes beside pp, and of up to {MOST_RANKS} ranks")
    problem, tensor, operator = "", "", ""
    for count in range(len(picks), -1, -1):
        try:
            found = _propagated(layer, mesh, picks[:count], links)
            break
        except PlanError as error:
            if not count:
                raise
            if count == len(picks):
                problem, tensor, operator = str(error), picks[-1].tensor, error.operator
    rows = tuple(_rows(layer, found))
    where = -1
    if problem:
        named = [k for k, row in enumerate(rows) if row.operator == operator and operator]
        where = named[0] if named else next((k for k, row in enumerate(rows) if row.name == tensor), -1)
    moves = tuple(_moves(layer, found, rows))
    return Found(layer, mesh, tuple(picks[:count]), rows, moves, tuple(picks[count:]), problem, where)


def outlook(
    found: Found, links: Mapping[str, Link] | None = None, tensor: str = ""
) -> dict[str, dict[str, dict[str, tuple[bool, str]]]]:
    """What each form that can be asked for would give: by tensor, axis and letters, whether it can be, and in words.

    tensor   if the layer has many choices, only this one's are found; "" stands for all tensors
    """
    choices = [(row, axis, one) for row in found.rows for axis, some in row.offered.items() for one in some]
    if tensor and len(choices) > MANY_CHOICES:
        choices = [choice for choice in choices if choice[0].name == tensor]
    words: dict[str, dict[str, dict[str, tuple[bool, str]]]] = {}
    for row, axis, one in choices:
        there = words.setdefault(row.name, {}).setdefault(axis, {})
        try:
            then = _propagated(found.layer, found.mesh, picked(found.picks, Pick(row.name, axis, one)), links)
            there[one] = (True, totals(tuple(_moves(found.layer, then, found.rows))))
        except PlanError as error:
            there[one] = (False, error.reason)
    return words


def picked(picks: Sequence[Pick], new: Pick) -> tuple[Pick, ...]:
    """The picks with a new one, in place of an older one of the same tensor and axis."""
    return (*(pick for pick in picks if pick[:2] != new[:2]), new)


def total(moves: Sequence[Move], phase: str) -> str:
    """How many collectives of a phase, the bytes that each rank gives to them, and their time; "" if there are none."""
    those = [move for move in moves if move.phase == phase]
    if not those:
        return ""
    nbytes, seconds = sum(move.bytes for move in those), math.fsum(move.seconds for move in those)
    return f"{phase} {several(len(those), 'collective')}, {amount(nbytes)}, {duration(seconds)}"


def totals(moves: Sequence[Move]) -> str:
    """The same of both phases."""
    return "; ".join(filter(None, (total(moves, "forward"), total(moves, "backward")))) or "no collectives"


def amount(nbytes: int) -> str:
    """Bytes with a unit and about three digits: `64 KiB`."""
    for unit, whole in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= whole:
            return f"{nbytes / whole:.3g} {unit}" if nbytes < 1000 * whole else f"{nbytes / whole:,.0f} {unit}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """A time with a unit and about three digits: `1.67 ms`."""
    for unit, whole in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= whole:
            return f"{seconds / whole:.3g} {unit}" if seconds < 1000 * whole else f"{seconds / whole:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def picks_of(layer: Layer, annotations: Mapping[str, str], mesh: Mesh) -> tuple[Pick, ...]:
    """Annotations, as `sharding.propagate` takes them, as picks. The name of an input can be one, too.

    Errors: PlanError for a form that a tensor cannot have.
    """
    found: list[Pick] = []
    inputs = {layer.own(name): name for name in layer.graph.inputs}
    for pattern, text in annotations.items():
        if pattern in inputs:
            rank = len(layer.graph.tensors[inputs[pattern]].shape)
            found += [Pick(inputs[pattern], axis, letters(p)) for axis, p in parsed(text, mesh, rank, pattern).items()]
    others = {pattern: text for pattern, text in annotations.items() if pattern not in inputs}
    for name, said in resolve(layer, others, mesh).items():
        found += [Pick(name, axis, letters(p)) for axis, (p, _) in said.items()]
    return tuple(found)


# Propagation ----------------------------------------------------------------------------------------------------------


def _propagated(layer: Layer, mesh: Mesh, picks: Sequence[Pick], links: Mapping[str, Link] | None) -> Sharding:
    """A value is fixed through its operator, a parameter by its name, and an input by the form in which it is given."""
    graph = layer.graph
    annotations: dict[str, str] = {}
    inputs: dict[str, str] = {}
    for pick in picks:
        writer = graph.writer(pick.tensor)
        said = f"{pick.letters} on {pick.axis}"
        if pick.tensor in graph.inputs:
            inputs[pick.tensor] = ", ".join(filter(None, (inputs.get(pick.tensor), said)))
            continue
        name = layer.own(writer.name if writer else pick.tensor)
        annotations[name] = ", ".join(filter(None, (annotations.get(name), said)))
    found = propagate(layer, annotations, mesh, links=links)
    if not inputs:
        return found
    given = {}  # on an axis on which nothing is said of an input, it lies as suits the others
    for name, text in inputs.items():
        form = found.forms[name]
        for axis, placement in parsed(text, mesh, len(graph.tensors[name].shape), layer.own(name)).items():
            form = form.put(axis, I if placement.whole else placement)
        given[name] = form
    return propagate(layer, annotations, mesh, given, links)


def _rows(layer: Layer, found: Sharding) -> Iterator[Row]:
    """What is given stands before its first reader."""
    graph, seen = found.graph, set[str]()
    for op in graph.operators:
        for name in (*op.inputs, *op.outputs):
            if name not in seen:
                seen.add(name)
                writes = name in op.outputs
                yield _row(layer, found, graph.tensors[name], op if writes else None)


def _row(layer: Layer, found: Sharding, tensor: Tensor, writer: Operator | None) -> Row:
    read = ", ".join(own(layer, name) for name in writer.inputs) if writer else ""
    form = found.forms[tensor.name]
    return Row(
        tensor.name, own(layer, tensor.name), tensor.shape, tensor.itemsize,
        f"{writer.op.rpartition('::')[2]}({read})" if writer else tensor.kind, writer.name if writer else "",
        found.local(tensor.name), {axis: letters(p) for axis, p in form.items()},
        {axis: _offered(tensor, letters(p)) for axis, p in form.items()},
        tuple(block(tensor.shape, form, found.mesh, rank) for rank in range(found.mesh.size)),
    )  # fmt: skip


def _offered(tensor: Tensor, now: str) -> tuple[str, ...]:
    """A letter for each column, with the pieces of the present form. A parameter is stored: it is no part of a sum."""
    every = ["R", *(f"S{dim}" for dim in range(len(tensor.shape)))]
    every += ["P"] if tensor.kind in ("value", "input") else []
    return tuple(now if one == column(now) else one for one in every)


def block(shape: Sequence[int], form: Form, mesh: Mesh, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """What a rank has of a tensor: of each dimension the intervals (start, stop), in the order in which it has them."""
    place = mesh.coordinates(rank)
    held: list[tuple[tuple[int, int], ...]] = [((0, size),) for size in shape]
    for axis, placement in form.items():
        if placement.kind == "S" and divides(shape, placement, mesh.length(axis)):
            held[placement.dim] = _cut(held[placement.dim], placement.pieces, mesh.length(axis), place[axis])
    return tuple(held)


def _cut(held: Sequence[tuple[int, int]], pieces: int, ranks: int, number: int) -> tuple[tuple[int, int], ...]:
    """Of each of some equal pieces of what is held, block `number` of `ranks`."""
    size = sum(stop - start for start, stop in held) // pieces
    length = size // ranks
    found: list[tuple[int, int]] = []
    for piece in range(pieces):
        first = piece * size + number * length
        passed = 0
        for start, stop in held:
            low, high = max(first, passed), min(first + length, passed + stop - start)
            if low < high:
                found.append((start + low - passed, start + high - passed))
            passed += stop - start
    joined: list[tuple[int, int]] = []
    for start, stop in found:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)


# Collectives ----------------------------------------------------------------------------------------------------------


def _moves(layer: Layer, found: Sharding, rows: Sequence[Row]) -> Iterator[Move]:
    """In the order of the rows; at one row forward ones first."""
    every = [*_between(layer, found, rows), *_at_the_end(layer, found, rows), *_inside(layer, found, rows)]
    return iter(sorted(every, key=lambda move: (move.at, move.phase == "backward")))


def _between(layer: Layer, found: Sharding, rows: Sequence[Row]) -> Iterator[Move]:
    at = {row.operator: k for k, row in reversed(list(enumerate(rows))) if row.operator}  # its first output's row
    for move in found.repartitions:
        first = min(at[reader] for reader in move.readers)
        readers = ", ".join(map(layer.own, move.readers))
        one = len(move.readers) == 1
        start, end = _text(move.forward.start), _text(move.forward.end)
        if start == end:  # (I is read as R: nothing moves forward)
            why = f"each rank's part of {readers} gives {'a part' if one else 'parts'} of its gradient"
        else:
            writer = f"{layer.own(move.writer)} writes it" if move.writer else "it is given"
            why = f"{writer} as {start}, {readers} {'needs' if one else 'need'} it as {end}"
        yield from _steps(first, own(layer, move.value), why, move.forward, move.backward, move.parameter)


def _at_the_end(layer: Layer, found: Sharding, rows: Sequence[Row]) -> Iterator[Move]:
    """What the layer hands on is no part of a sum: it is added up."""
    for name in found.graph.outputs:
        tensor, form = found.graph.tensors[name], found.forms[name]
        end = Form(form.axes, tuple(I if p.kind == "P" else p for p in form.placements))
        if end != form:
            way = path(form, end, tensor.shape, tensor.itemsize, found.mesh, found.links, name)
            back = backward(way, tensor.shape, tensor.itemsize, found.mesh, found.links)
            why = f"it is {_text(form)}, and is handed on as {_text(end)}"
            yield from _steps(len(rows), own(layer, name), why, way, back if tensor.differentiable else None, False)


def _inside(layer: Layer, found: Sharding, rows: Sequence[Row]) -> Iterator[Move]:
    at = {row.name: k for k, row in enumerate(rows)}
    alone: tuple[Collective, ...] = replace(found, repartitions=()).collectives()
    for one in alone:
        yield Move(
            at[one.value], one.phase, one.op, one.axis, own(layer, one.value), "", "", one.bytes, one.time, one.why
        )


def _steps(at: int, value: str, why: str, there: Path, back: Path | None, once: bool) -> Iterator[Move]:
    for phase, way in (("forward", there), ("backward", back)):
        for step in way.collectives if way is not None else ():
            yield Move(
                at, phase, step.op, step.axis, value, letters(step.before), letters(step.after), step.bytes,
                step.seconds, why, once and phase == "backward",
            )  # fmt: skip


def _text(form: Form) -> str:
    said = [f"{letters(p)} on {axis}" for axis, p in form.items() if not p.whole]
    return ", ".join(said) or "R"


# Layers by hand -------------------------------------------------------------------------------------------------------


def example(name: str) -> Layer:
    """A layer of `EXAMPLES`. Errors: PlanError for another name."""
    if name not in EXAMPLES:
        raise PlanError(f"{name!r}: no layer that is known here; possible are {', '.join(EXAMPLES)}, or a Layer")
    return Layer(EXAMPLES[name])


def _graph(shapes: Mapping[str, tuple[int, ...]], given: Sequence[str], operators: Sequence[Operator]) -> Graph:
    """A chain: what the last operator writes is handed on. Names with a dot are parameters."""
    tensors = {
        name: Tensor(name, shape, kind="input" if name in given else "parameter" if "." in name else "value")
        for name, shape in shapes.items()
    }
    return Graph(tuple(operators), tensors, tuple(given), operators[-1].outputs)


def _matmul(rows: int = 4096, inner: int = 1024, columns: int = 4096) -> Graph:
    shapes = {"A": (rows, inner), "B": (inner, columns), "C": (rows, columns)}
    return _graph(shapes, ("A", "B"), [Operator("C", "aten::matmul", ("A", "B"), ("C",))])


def _mlp(batch: int = 16, sequence: int = 256, width: int = 1024) -> Graph:
    x, inner = (batch, sequence, width), (batch, sequence, 4 * width)
    shapes = {
        "x": x, "norm.weight": (width,), "norm": x, "up.weight": (4 * width, width), "up": inner, "gelu": inner,
        "down.weight": (width, 4 * width), "down": x, "y": x,
    }  # fmt: skip
    norm = {"input": Slot(0), "normalized_shape": [width], "weight": Slot(1)}
    return _graph(shapes, ("x",), [
        Operator("norm", "aten::layer_norm", ("x", "norm.weight"), ("norm",), norm),
        Operator("up", "aten::linear", ("norm", "up.weight"), ("up",)),
        Operator("gelu", "aten::gelu", ("up",), ("gelu",)),
        Operator("down", "aten::linear", ("gelu", "down.weight"), ("down",)),
        Operator("y", "aten::add", ("x", "down"), ("y",)),
    ])  # fmt: skip


def _attention(batch: int = 16, sequence: int = 256, heads: int = 16, size: int = 64) -> Graph:
    x, head = (batch, sequence, heads * size), (batch, heads, sequence, size)
    weight, scores = (heads * size, heads, size), (batch, heads, sequence, sequence)
    shapes = {
        "x": x, "q.weight": weight, "q": head, "k.weight": weight, "k": head, "v.weight": weight, "v": head,
        "scores": scores, "softmax": scores, "mix": head, "out.weight": (heads, size, heads * size), "out": x, "y": x,
    }  # fmt: skip

    def product(name: str, equation: str, *inputs: str) -> Operator:
        return Operator(name, "aten::einsum", inputs, (name,), {"equation": equation})

    return _graph(shapes, ("x",), [
        *(product(name, "bsd,dhe->bhse", "x", f"{name}.weight") for name in ("q", "k", "v")),
        product("scores", "bhse,bhte->bhst", "q", "k"),
        Operator("softmax", "aten::softmax", ("scores",), ("softmax",), {"dim": -1}),
        product("mix", "bhst,bhte->bhse", "softmax", "v"),
        product("out", "bhse,hed->bsd", "mix", "out.weight"),
        Operator("y", "aten::add", ("x", "out"), ("y",)),
    ])  # fmt: skip


EXAMPLES = {"matmul": _matmul(), "MLP": _mlp(), "attention": _attention()}

# For each layer what people do with it: annotations of its tensors. Axes that a mesh does not have are left out.
STRATEGIES: dict[str, dict[str, dict[str, str]]] = {
    "matmul": {
        "rows of A (data parallel)": {"A": "S0 on dp, S0 on tp"},
        "columns of B": {"B": "S1 on dp, S1 on tp"},
        "the inner dimension": {"C": "P on dp, P on tp"},
        "blocks of C (2-D)": {"C": "S0 on dp, S1 on tp"},
    },
    "MLP": {
        "data parallel": {"x": "S0 on dp, S0 on tp"},
        "Megatron": {"x": "S0 on dp", "up": "S2 on tp", "down": "P on tp"},
        "Megatron, sequence parallel": {"x": "S0 on dp, S1 on tp", "norm": "S1 on tp", "up": "S2 on tp",
                                        "down": "P on tp", "y": "S1 on tp"},
        "columns only": {"x": "S0 on dp", "up": "S2 on tp", "down": "S2 on tp"},
    },
    "attention": {
        "data parallel": {"x": "S0 on dp, S0 on tp"},
        "Megatron (heads)": {"x": "S0 on dp", "q": "S1 on tp", "k": "S1 on tp", "v": "S1 on tp", "out": "P on tp"},
        "heads, sequence parallel": {"x": "S0 on dp, S1 on tp", "q": "S1 on tp", "k": "S1 on tp", "v": "S1 on tp",
                                     "out": "P on tp", "y": "S1 on tp"},
        "queries by sequence": {"x": "S0 on dp", "q": "S2 on tp", "softmax": "S2 on tp"},
    },
}  # fmt: skip


def strategy(layer: str, name: str, mesh: Mesh) -> tuple[Pick, ...]:
    """The picks of a line of STRATEGIES, on the axes that the mesh has."""
    annotations = {}
    for tensor, text in STRATEGIES[layer][name].items():
        said = [one for one in text.split(", ") if mesh.length(one.rpartition(" ")[2]) > 1]
        if said:
            annotations[tensor] = ", ".join(said)
    return picks_of(example(layer), annotations, mesh)
