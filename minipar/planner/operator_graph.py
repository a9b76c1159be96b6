"""From captured layers to a cost graph: which letter does each operator divide on each axis of the mesh?

    parameter --.                             operator    its ways by its rule (`sharding.rules`) on every axis: the
                 >-- operator --- value --->              seconds of its part, and of the collectives inside of it
    value ------'                             parameter   the forms in which it can be stored: the bytes
                                              value       the form in which several readers share it

Edges are repartitions forward, and of the gradient backward. So strategies are nobody's list. Data parallel is the
answer in which operators divide rows, and weights are whole: their gradients are partial sums, and the edge from weight
to operator is an all-reduce. ZeRO is the same with weights that are stored as shards. Tensor parallel divides a
letter of the weights. Mixtures of all of them are answers, too.

A value that is read once has no node: the edge goes from operator to operator. One that is read several times moves
once to the form that its node chooses, and from there to each reader that wants another one.

Layers that are equal (`Layer.graph` is the same) may be tied: they decide alike, so that their costs are counted times
their number, and the graph stays as small as one layer.

Sources: Zheng et al., "Alpa", 2022, section 4; Jia et al., "Beyond Data and Model Parallelism", 2019 (letters of all
operators as a space).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from minipar.errors import PlanError
from minipar.planner.cost_graph import CostGraph, Edge, Node, Table, consistent
from minipar.planner.moves import moves, same_pieces
from minipar.program.mesh import Mesh
from minipar.sharding.forms import Form, I, P, Placement, S, axes_of, cut, divides, local_shape, parsed, whole
from minipar.sharding.graph import Graph, Layer, Operator, Shape, Tensor
from minipar.sharding.propagation import Divided, Sharding
from minipar.sharding.repartition import Link
from minipar.sharding.rules import RULES, Choice, choices

VIEWS = frozenset(
    (
        "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t",
        "numpy_T", "expand", "broadcast_to", "slice", "narrow", "select", "unbind", "split", "split_with_sizes",
        "chunk", "alias", "detach",
    )
)  # fmt: skip
ADAM = 4.0  # a parameter, its gradient and two numbers of the optimizer, of the same size


@dataclass(frozen=True)
class Machine:
    """What one rank can do.

    flops              operations a second
    memory_bandwidth   bytes a second that operators read and write
    links              (alpha, beta) of each axis of the mesh; default 1 us and 1 GB/s
    """

    flops: float = math.inf
    memory_bandwidth: float = math.inf
    links: Mapping[str, Link] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """A way to run an operator: its choice on each axis, and the forms and local shapes that follow."""

    choices: tuple[Choice, ...]
    ins: tuple[Form, ...]
    outs: tuple[Form, ...]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]

    @property
    def label(self) -> str:
        """What it writes, in words: "S2 on tp"."""
        return "; ".join(dict.fromkeys(map(_title, self.outs))) or "I"

    @property
    def reads(self) -> str:
        """What it reads, in words."""
        return "; ".join(map(_title, self.ins))


def operator_graph(
    layers: Sequence[Layer],
    mesh: Mesh,
    machine: Machine | None = None,
    *,
    inputs: str = "I",
    outputs: str | None = None,
    training: bool = True,
    tied: bool = True,
    replicated: bool = True,
    gathered: bool = True,
    copies: float = ADAM,
    budget: float | None = None,
) -> CostGraph:
    """The cost graph of a chain of layers on a mesh of one or two axes.

    inputs      the form of what the model is given
    outputs     the form in which the loss reads the model's outputs: "R" where ranks compute it alike, as those that
                share layers do; None: any but parts of a sum, as where each rank has the targets of its shard
    training    whether there is a backward
    tied        whether equal layers decide alike
    replicated  whether every rank may compute all of an operator that multiplies matrices
    gathered    whether a weight may be stored as a shard and gathered where it is read, as ZeRO does
    copies      bytes that a parameter needs for each of its own
    budget      bytes that each rank may hold: parameters, and what the forward keeps for the backward

    Errors: PlanError for layers that do not fit one behind the other, and for a mesh without an axis.
    """
    if not axes_of(mesh):
        raise PlanError("operator_graph: the mesh needs an axis that tensors lie on, such as Mesh(tp=2)")
    if not layers:
        raise PlanError("operator_graph: needs at least one layer")
    return _Builder(
        layers, mesh, machine or Machine(), inputs, outputs, training, tied, replicated, gathered, copies
    ).build(budget)


@dataclass
class _Template:
    """Layers that decide alike: one graph, the first of its layers, how many there are."""

    first: int
    layer: Layer
    count: int = 1

    @property
    def graph(self) -> Graph:
        return self.layer.graph


@dataclass
class _Value:
    """A tensor, or several that layers hand on from one to the next: who writes it, and who reads it.

    writer   node that writes it, with the form of each of its choices
    readers  nodes that read it, with the form of each of their choices
    """

    tensor: Tensor
    count: int
    writer: tuple[int, list[Form]] | None = None
    readers: list[tuple[int, list[Form]]] = field(default_factory=list)


def tie(layer: Layer, number: int) -> object:
    """What layers that decide alike have in common. The first layer is given the model's input, so it is by itself."""
    return id(layer.graph), number == 0


class _Builder:
    def __init__(
        self,
        layers: Sequence[Layer],
        mesh: Mesh,
        machine: Machine,
        inputs: str,
        outputs: str | None,
        training: bool,
        tied: bool,
        replicated: bool,
        gathered: bool,
        copies: float,
    ) -> None:
        self.layers, self.mesh, self.machine = layers, mesh, machine
        self.inputs, self.outputs = inputs, outputs
        self.training, self.replicated, self.gathered, self.copies = training, replicated, gathered, copies
        self.axes = axes_of(mesh)
        self.nodes: list[Node] = []
        self.places: list[tuple[int, int, int]] = []  # of each node its template, its operator, and what it is of it
        self.edges: dict[tuple[int, int], Table] = {}
        self.templates: list[_Template] = []
        self.of_layer: list[int] = []
        known: dict[object, int] = {}
        for number, layer in enumerate(layers):
            key = tie(layer, number) if tied else number
            if key in known:
                self.templates[known[key]].count += 1
            else:
                known[key] = len(self.templates)
                self.templates.append(_Template(number, layer))
            self.of_layer.append(known[key])

    def build(self, budget: float | None) -> CostGraph:
        handed: dict[tuple[int, str], tuple[int, list[Form]]] = {}  # who writes what a template hands on
        entered: dict[tuple[int, str], tuple[int, list[Form]]] = {}  # the node of what a template is given
        parameters = self._parameters()
        stored: dict[str, _Value] = {}
        for number, template in enumerate(self.templates):
            graph = template.graph
            values: dict[str, _Value] = {}
            for name in graph.inputs:
                entered[number, name] = writer = self._entrance(template, name)
                values[name] = _Value(graph.tensors[name], template.count, writer)
            hints = self._hints(graph)
            for k, op in enumerate(graph.operators):
                at, ways = self._operator(template, op, hints, (number, k, 1))
                for j, name in enumerate(op.inputs):
                    reads = at, [way.ins[j] for way in ways]
                    tensor = graph.tensors[name]
                    if tensor.kind in ("parameter", "buffer"):
                        own = template.layer.own(name)
                        value = stored.setdefault(own, _Value(tensor, parameters.get(own, template.count)))
                        value.readers.append(reads)
                    else:
                        values[name].readers.append(reads)
                for j, name in enumerate(op.outputs):
                    values[name] = _Value(graph.tensors[name], template.count, (at, [way.outs[j] for way in ways]))
            for name, value in values.items():
                handed[number, name] = self._value(template, name, value, name in graph.outputs)
        self._borders(handed, entered)
        for own, value in stored.items():
            self._stored(own, value)
        return self._ordered(budget)

    # Operators

    def _hints(self, graph: Graph) -> dict[str, set[Placement]]:
        """Cuts in pieces (S1:3) that a view or a split behind an operator makes possible for it, too."""
        found: dict[str, set[Placement]] = {name: set() for name in graph.tensors}
        shapes = {name: tensor.shape for name, tensor in graph.tensors.items()}
        for ranks in {self.mesh.length(axis) for axis in self.axes} - {1}:
            changed = True
            while changed:
                changed = False
                for op in graph.operators:
                    names = (*op.inputs, *op.outputs)
                    wanted = [(j, p) for j, name in enumerate(names) for p in sorted(found[name], key=str)]
                    ins, outs = [shapes[n] for n in op.inputs], [shapes[n] for n in op.outputs]
                    for choice in choices(op, ins, outs, ranks, wanted):
                        for name, p in zip(names, (*choice.ins, *choice.outs), strict=True):
                            if p.pieces > 1 and p not in found[name]:
                                found[name].add(p)
                                changed = True
        return found

    def _operator(
        self, template: _Template, op: Operator, hints: Mapping[str, set[Placement]], place: tuple[int, int, int]
    ) -> tuple[int, list[Way]]:
        graph = template.graph
        ways = list(self._ways(graph, op, hints))
        costs = [self._cost(graph, op, way) for way in ways]
        if not self.replicated and flops_of(op, ways[-1].in_shapes, ways[-1].out_shapes):
            divided = [k for k, way in enumerate(ways) if not self._repeats(way)]
            if divided:
                ways, costs = [ways[k] for k in divided], [costs[k] for k in divided]
        labels = _distinct([way.label for way in ways], ways)
        at = self._add(
            template.layer.own(op.name), labels, [s * template.count for s, _ in costs],
            [m * template.count for _, m in costs], template.count, ways, place,
        )  # fmt: skip
        return at, ways

    def _repeats(self, way: Way) -> bool:
        """Whether ranks of an axis do the same work."""
        return any(
            not choice.divided and self.mesh.length(axis) > 1
            for axis, choice in zip(self.axes, way.choices, strict=True)
        )

    def _ways(self, graph: Graph, op: Operator, hints: Mapping[str, set[Placement]]) -> Iterator[Way]:
        """The product of an operator's choices on all axes; an inner axis divides what the outer one left."""
        names = (*op.inputs, *op.outputs)
        values = [graph.tensors[name].kind not in ("parameter", "buffer") for name in op.inputs]

        def extend(k: int, so_far: tuple[Choice, ...], ins: list[Shape], outs: list[Shape]) -> Iterator[Way]:
            if k == len(self.axes):
                yield Way(
                    so_far,
                    tuple(Form(self.axes, tuple(c.ins[j] for c in so_far)) for j in range(len(ins))),
                    tuple(Form(self.axes, tuple(c.outs[j] for c in so_far)) for j in range(len(outs))),
                    tuple(ins), tuple(outs),
                )  # fmt: skip
                return
            ranks = self.mesh.length(self.axes[k])
            wanted = [(j, p) for j, name in enumerate(names) for p in sorted(hints[name], key=str)]
            seen = set()
            for choice in choices(op, ins, outs, ranks, wanted) if ranks > 1 else [_undivided(op)]:
                sums = [value for value, p in zip(values, choice.ins, strict=True) if p == P]
                if choice.name == "sum" and not any(sums):
                    continue  # a weight that is a part of a sum: nobody stores one
                if choice.exclusive and any(outer.exclusive for outer in so_far):
                    continue
                if any(
                    not same_pieces(pair) for outer in so_far for pair in zip(_all(outer), _all(choice), strict=True)
                ):
                    continue
                if (choice.ins, choice.outs) in seen:
                    continue
                seen.add((choice.ins, choice.outs))
                yield from extend(
                    k + 1, (*so_far, choice),
                    [cut(s, p, ranks) for s, p in zip(ins, choice.ins, strict=True)],
                    [cut(s, p, ranks) for s, p in zip(outs, choice.outs, strict=True)],
                )  # fmt: skip

        shapes = graph.tensors
        yield from extend(0, (), [shapes[n].shape for n in op.inputs], [shapes[n].shape for n in op.outputs])

    def _cost(self, graph: Graph, op: Operator, way: Way) -> tuple[float, float]:
        """Seconds of an operator's part and of the collectives inside; bytes that it keeps for the backward."""
        seconds = computing(graph, op, way.in_shapes, way.out_shapes, self.machine, self.training)
        if any(choice.inside for choice in way.choices):
            chosen = dict(zip(self.axes, way.choices, strict=True))
            one = Divided(op, way.ins, way.outs, chosen, way.in_shapes, way.out_shapes)
            found = Sharding(graph, self.mesh, {}, (one,), (), self.machine.links).collectives()
            seconds += math.fsum(c.time for c in found if self.training or c.phase == "forward")
        return seconds, kept(graph, op, way.out_shapes) if self.training else 0.0

    # Values and parameters

    def _entrance(self, template: _Template, name: str) -> tuple[int, list[Form]]:
        """The node of what a layer is given: of the first layer one form, of others any."""
        tensor = template.graph.tensors[name]
        if template.first == 0:
            placements = parsed(self.inputs, self.mesh, None, "inputs")
            form = whole(self.mesh)
            for axis, p in placements.items():
                if p.kind != "S" or p.dim < len(tensor.shape):
                    form = form.put(axis, p)
            local_shape(tensor.shape, form, self.mesh, name)
            forms = [form]
        else:
            forms = self._plain(tensor.shape)
        title = f"{template.first}:{template.layer.own(name)}"
        at = self._add(
            title,
            list(map(_title, forms)),
            [0.0] * len(forms),
            [0.0] * len(forms),
            template.count,
            forms,
            (self.templates.index(template), -1, 0),
        )
        return at, forms

    def _plain(self, shape: Shape, cuts: Sequence[Placement] = ()) -> list[Form]:
        """Whole or cut, on every axis; also in these ways."""
        found = [whole(self.mesh)]
        for axis in self.axes:
            ranks = self.mesh.length(axis)
            ways = [I, *(S(d) for d in range(len(shape))), *cuts] if ranks > 1 else [I]
            found = [form.put(axis, p) for form in found for p in dict.fromkeys(ways)]
        return [form for form in found if self._possible(shape, form)]

    def _possible(self, shape: Shape, form: Form) -> bool:
        local = shape
        for axis, p in form.items():
            if not divides(local, p, self.mesh.length(axis)):
                return False
            local = cut(local, p, self.mesh.length(axis))
        return same_pieces(form.placements)

    def _value(self, template: _Template, name: str, value: _Value, leaves: bool) -> tuple[int, list[Form]]:
        """Edges from who writes a value to who reads it; over a node of its own, if there are several."""
        assert value.writer is not None
        last = self.of_layer[-1] == self.templates.index(template)
        if len(value.readers) + leaves > 1 and value.writer[0] not in [at for at, _ in value.readers]:
            forms = list(dict.fromkeys(f for _, reads in (value.writer, *value.readers) for f in reads))
            if leaves:
                forms = [f for f in forms if P not in f.placements] or forms
            title = f"{template.first}:{template.layer.own(name)}"
            if title not in {node.name for node in self.nodes}:
                zeros = [0.0] * len(forms)
                number, k, _ = self.places[value.writer[0]]
                at = self._add(title, list(map(_title, forms)), zeros, zeros, template.count, forms, (number, k, 2))
                self._edge(value, value.writer, (at, forms), value.count)
                value = _Value(value.tensor, value.count, (at, forms), value.readers)
        assert value.writer is not None
        for reader in value.readers:
            self._edge(value, value.writer, reader, value.count)
        if leaves and last:
            self._exit(template, name, value)
        return value.writer

    def _exit(self, template: _Template, name: str, value: _Value) -> None:
        """The end of the model."""
        assert value.writer is not None
        shape = value.tensor.shape
        if self.outputs is None:
            forms = [form for form in self._plain(shape) if P not in form.placements]
        else:
            forms = [Form.parse(self.outputs, self.mesh, len(shape), "outputs")]
        title = f"end:{template.layer.own(name)}"
        zeros = [0.0] * len(forms)
        at = self._add(title, list(map(_title, forms)), zeros, zeros, 1, forms, (len(self.templates), 0, 0))
        self._edge(value, value.writer, (at, forms), 1)

    def _borders(
        self,
        handed: Mapping[tuple[int, str], tuple[int, list[Form]]],
        entered: Mapping[tuple[int, str], tuple[int, list[Form]]],
    ) -> None:
        """What layers hand on to the next one."""
        pairs = Counter(zip(self.of_layer, self.of_layer[1:], strict=False))
        for (a, b), count in pairs.items():
            before, after = self.templates[a], self.templates[b]
            if len(before.graph.outputs) != len(after.graph.inputs):
                raise PlanError(
                    f"layer {after.first} reads {len(after.graph.inputs)} tensors, and the one before hands on "
                    f"{len(before.graph.outputs)}; a cost graph takes chains of layers"
                )
            for out, given in zip(before.graph.outputs, after.graph.inputs, strict=True):
                value = _Value(after.graph.tensors[given], count)
                self._edge(value, handed[a, out], entered[b, given], count)

    def _parameters(self) -> Counter[str]:
        """Of each parameter, by its name in the first of its layers, how many there are in the tied layers."""
        names: dict[str, set[str]] = {}
        for number, layer in zip(self.of_layer, self.layers, strict=True):
            first = self.templates[number].layer
            for name in layer.graph.tensors:
                names.setdefault(first.own(name), set()).add(layer.own(name))
        return Counter({name: len(own) for name, own in names.items()})

    def _stored(self, own: str, value: _Value) -> None:
        """The node of a parameter or buffer: how it is stored."""
        shape = value.tensor.shape
        cuts = [p for _, reads in value.readers for form in reads for p in form.placements if p.pieces > 1]
        forms = self._plain(shape, sorted(set(cuts), key=str)) if value.tensor.kind == "parameter" else [
            whole(self.mesh)
        ]  # fmt: skip
        copies = self.copies if self.training and value.tensor.kind == "parameter" else 1.0
        sizes = [
            math.prod(local_shape(shape, f, self.mesh, own)) * value.tensor.itemsize * copies * value.count
            for f in forms
        ]
        number, k, _ = min(self.places[at] for at, _ in value.readers)
        at = self._add(own, list(map(_title, forms)), [0.0] * len(forms), sizes, value.count, forms, (number, k, 0))
        for reader in value.readers:
            self._edge(value, (at, forms), reader, value.count)

    # Edges

    def _edge(self, value: _Value, writer: tuple[int, list[Form]], reader: tuple[int, list[Form]], count: int) -> None:
        """The cost between two nodes; of a node and itself, in tied layers, a part of the node's own."""
        tensor = value.tensor
        starts, ends = list(dict.fromkeys(writer[1])), list(dict.fromkeys(reader[1]))
        stored = tensor.kind in ("parameter", "buffer")
        found = moves(tensor.shape, tensor.itemsize, self.mesh, self.machine.links, [*starts, *ends], stored)
        table = found.table(starts, ends, self.training and tensor.differentiable)
        if stored and self.training:  # what was gathered is freed after the forward, and gathered again
            table += found.table(starts, ends, training=False)
        if stored and not self.gathered and tensor.kind == "parameter":
            for i, start in enumerate(starts):
                for j, end in enumerate(ends):
                    if any(a.kind == "S" and a != b for a, b in zip(start.placements, end.placements, strict=True)):
                        table[i, j] = np.inf
        rows = [starts.index(form) for form in writer[1]]
        columns = [ends.index(form) for form in reader[1]]
        whole_table = count * table[np.ix_(rows, columns)]
        a, b = writer[0], reader[0]
        if a == b:
            node = self.nodes[a]
            same = np.diag(whole_table)
            seconds = tuple(float(s + more) for s, more in zip(node.seconds, same, strict=True))
            self.nodes[a] = Node(node.name, node.labels, seconds, node.memory, node.count, node.meaning)
            return
        self.edges[a, b] = self.edges.get((a, b), 0.0) + whole_table

    def _add(
        self,
        name: str,
        labels: list[str],
        seconds: list[float],
        memory: list[float],
        count: int,
        meaning: Sequence[object],
        place: tuple[int, int, int],
    ) -> int:
        self.places.append(place)
        self.nodes.append(Node(name, tuple(labels), tuple(seconds), tuple(memory), count, tuple(meaning)))
        return len(self.nodes) - 1

    def _ordered(self, budget: float | None) -> CostGraph:
        """Nodes in the order in which they run, and edges from earlier to later ones: those of tied layers, from the
        end of one to the beginning of the next, are turned round."""
        order = sorted(range(len(self.nodes)), key=lambda k: self.places[k])
        new = {old: k for k, old in enumerate(order)}
        joined: dict[tuple[int, int], Table] = {}
        for (a, b), table in self.edges.items():
            low, high = sorted((new[a], new[b]))
            joined[low, high] = joined.get((low, high), 0.0) + (table if new[a] < new[b] else table.T)
        edges = tuple(Edge(a, b, table) for (a, b), table in sorted(joined.items(), key=lambda one: one[0]))
        return consistent(CostGraph(tuple(self.nodes[k] for k in order), edges, budget))


def _undivided(op: Operator) -> Choice:
    return Choice("whole", (I,) * len(op.inputs), (I,) * len(op.outputs))


def _all(choice: Choice) -> tuple[Placement, ...]:
    return (*choice.ins, *choice.outs)


def _title(form: Form) -> str:
    return str(form) or "I"


def _distinct(labels: Sequence[str], ways: Sequence[Way]) -> list[str]:
    """What each way writes; of several that write the same, also what they read."""
    often = Counter(labels)
    return [x if often[x] == 1 else f"{x}, from {way.reads}" for x, way in zip(labels, ways, strict=True)]


# Work -----------------------------------------------------------------------------------------------------------------


def computing(
    graph: Graph, op: Operator, ins: Sequence[Shape], outs: Sequence[Shape], machine: Machine, training: bool = True
) -> float:
    """Seconds of an operator on parts of these shapes: operations / flops, or bytes / bandwidth if that is longer.

    The backward is counted as two forwards.
    """
    tensors = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
    times = 3 if training and any(graph.tensors[name].differentiable for name in op.outputs) else 1
    moved = 0
    if op.op.rpartition("::")[2] not in VIEWS:
        moved = sum(math.prod(shape) * t.itemsize for shape, t in zip((*ins, *outs), tensors, strict=True))
    return times * max(flops_of(op, ins, outs) / machine.flops, moved / machine.memory_bandwidth)


def kept(graph: Graph, op: Operator, outs: Sequence[Shape]) -> float:
    """Bytes that an operator keeps for the backward: what it writes, unless that is a view."""
    if op.op.rpartition("::")[2] in VIEWS:
        return 0.0
    tensors = [graph.tensors[name] for name in op.outputs]
    return float(sum(math.prod(s) * t.itemsize for s, t in zip(outs, tensors, strict=True) if t.differentiable))


_INNER = {"linear": (0, -1), "mm": (0, -1), "bmm": (0, -1), "matmul": (0, -1), "mv": (0, -1), "dot": (0, -1)}
_INNER |= {"addmm": (1, -1), "baddbmm": (1, -1)}


def flops_of(op: Operator, ins: Sequence[Shape], outs: Sequence[Shape]) -> float:
    """Operations of the forward of an operator on these shapes: 2 for each product of a matrix product; others 0."""
    name = op.op.rpartition("::")[2]
    if name in _INNER:
        which, dim = _INNER[name]
        return 2.0 * math.prod(outs[0]) * ins[which][dim]
    if name.startswith("conv"):
        return 2.0 * math.prod(outs[0]) * math.prod(ins[1][1:])
    if name == "scaled_dot_product_attention":
        return 2.0 * math.prod(ins[0]) * ins[1][-2] + 2.0 * math.prod(outs[0]) * ins[1][-2]
    if name == "mixture":
        return 4.0 * math.prod(ins[0]) * ins[2][-1]
    if name == "einsum" and op.op in RULES:
        line = RULES[op.op].of(op, ins, outs)
        return 2.0 * math.prod(
            {letter: n for t in (*line.inputs, *line.outputs) for dim in t for letter, n in dim}.values()
        )
    return 0.0
