"""Propagation: a few forms are fixed by name, and the forms of all other tensors follow, forward and backward.

    propagate(graph, {"*.mlp.0": "S-1 on tp", "*.mlp.2": "P on tp"}, Mesh(tp=2))

A pattern names operators, whose output is fixed, or parameters. What is fixed never changes. From there forms spread to
the neighbours until nothing changes any more: an operator of which one tensor is cut takes the choice of its rule that
leaves most bytes where they are. Values count first: a parameter that lies otherwise is gathered, as in ZeRO, unless
what its operator writes is fixed, too. Light operators (elementwise, views) go first, then all others one by one,
as GSPMD raises its aggressiveness. What no form reaches is computed whole by every rank.

An operator may read a value in another form than it was written in. Such a place is a `Repartition`, with the steps
forward and the gradient's steps backward; one that several operators read in the same form is moved once. So Megatron's
two all-reduces a layer and direction are nobody's list: they are where P is read as I, and I as R. Axes of the mesh are
settled one after the other, each on what the ones before left to a rank.

Sources: Xu et al., "GSPMD", 2021; Shoeybi et al., "Megatron-LM", 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from minipar.costs.alpha_beta import collective_seconds
from minipar.errors import PlanError
from minipar.program.mesh import Mesh
from minipar.sharding.forms import Form, I, P, Placement, R, axes_of, cut, divides, local_shape, nearest, parsed, whole
from minipar.sharding.graph import Graph, Layer, Operator, Shape, Tensor
from minipar.sharding.repartition import DEFAULT_LINK, Link, Path, backward, path
from minipar.sharding.rules import RULES, Choice, Inside, choices
from minipar.sharding.rules import whole as computed_whole


@dataclass(frozen=True)
class Divided:
    """An operator with its forms: how each input is read, how each output is written, its choice on each axis."""

    operator: Operator
    ins: tuple[Form, ...]
    outs: tuple[Form, ...]
    choices: Mapping[str, Choice]
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape, ...]

    def __str__(self) -> str:
        return f"{self.operator.name}: {'; '.join(map(str, self.ins))} -> {'; '.join(map(str, self.outs))}"


@dataclass(frozen=True)
class Repartition:
    """A value that is read in another form than it was written in.

    value            the tensor
    writer, readers  names of operators; the writer is "" of what the graph is given, a reader of what it hands on
    forward          the steps to what is read; from the written form, or from one that another reader needed before
    backward         the gradient's steps back; None where there is no gradient
    parameter        whether it is one: its gradient may be summed once a step instead of once a micro-batch
    """

    value: str
    writer: str
    readers: tuple[str, ...]
    forward: Path
    backward: Path | None
    parameter: bool = False


@dataclass(frozen=True)
class Collective:
    """One collective of a layer: bytes that each rank has before it, and seconds by the alpha-beta model."""

    op: str
    value: str
    axis: str
    bytes: int
    time: float
    phase: str
    why: str = ""
    parameter: bool = False

    def as_dict(self) -> dict[str, object]:
        """What the command line prints."""
        keys = ("op", "value", "axis", "bytes", "time", "phase")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True)
class Sharding:
    """A layer with the forms of all its tensors.

    forms          of each tensor, as it is written or given
    operators      in the order of the graph
    repartitions   where a value changes its form
    carried        of a slice of sequences, the form of each tensor that the layer carries to the next one
    """

    graph: Graph
    mesh: Mesh
    forms: Mapping[str, Form]
    operators: tuple[Divided, ...]
    repartitions: tuple[Repartition, ...]
    links: Mapping[str, Link] = field(default_factory=dict)
    carried: Mapping[str, Form] = field(default_factory=dict)

    def __getitem__(self, operator: str) -> Divided:
        """An operator by its name."""
        for one in self.operators:
            if one.operator.name == operator:
                return one
        raise PlanError(f"{operator}: no such operator{_close(operator, [o.operator.name for o in self.operators])}")

    def local(self, tensor: str) -> Shape:
        """The shape that one rank has of a tensor."""
        return local_shape(self.graph.tensors[tensor].shape, self.forms[tensor], self.mesh, tensor)

    def read(self, operator: str, tensor: str) -> Form:
        """The form in which an operator reads a tensor."""
        one = self[operator]
        return one.ins[one.operator.inputs.index(tensor)]

    def collectives(self) -> tuple[Collective, ...]:
        """All of them: of repartitions and inside of operators; forward ones first."""
        return tuple(sorted(self._collectives(), key=lambda one: one.phase == "backward"))

    def _collectives(self) -> Iterator[Collective]:
        for move in self.repartitions:
            yield from _of_move(move)
        for one in self.operators:
            for axis, inside in _inside(one, self.mesh):
                value = one.operator.outputs[0]
                nbytes = inside.elements * self.graph.tensors[one.operator.inputs[0]].itemsize
                time = _seconds(inside.op, self.mesh.length(axis), nbytes, self.links.get(axis, DEFAULT_LINK))
                yield Collective(inside.op, value, axis, nbytes, time, inside.phase, inside.why)


def _of_move(move: Repartition) -> Iterator[Collective]:
    """The collectives of a repartition, forward and backward."""
    why = f"{move.writer or 'given'} -> {', '.join(name or 'end' for name in move.readers)}"
    for phase, way in (("forward", move.forward), ("backward", move.backward)):
        for step in way.collectives if way is not None else ():
            yield Collective(step.op, move.value, step.axis, step.bytes, step.seconds, phase, why, move.parameter)


def _inside(one: Divided, mesh: Mesh) -> Iterator[tuple[str, Inside]]:
    """Collectives within an operator, counted on what a rank has on all other axes."""
    for axis, choice in one.choices.items():
        rule = RULES.get(one.operator.op)
        if not choice.inside or rule is None or rule.variants is None:
            continue
        ranks = mesh.length(axis)
        ins = [_uncut(shape, p, ranks) for shape, p in zip(one.in_shapes, choice.ins, strict=True)]
        outs = [_uncut(shape, p, ranks) for shape, p in zip(one.out_shapes, choice.outs, strict=True)]
        for again in rule.variants(one.operator, ins, outs, ranks):
            if (again.name, again.ins) == (choice.name, choice.ins):
                yield from ((axis, inside) for inside in again.inside)


def _uncut(shape: Shape, p: Placement, ranks: int) -> Shape:
    return tuple(size * (ranks if p.kind == "S" and d == p.dim else 1) for d, size in enumerate(shape))


def _seconds(op: str, ranks: int, nbytes: int, link: Link) -> float:
    return collective_seconds(op, ranks, nbytes, *link)


# Annotations ----------------------------------------------------------------------------------------------------------

Annotations = Mapping[str, str]
Fixed = dict[str, dict[str, tuple[Placement, str]]]  # tensor -> axis -> placement and the pattern that said so


def resolve(layer: Layer, annotations: Annotations, mesh: Mesh, used: set[str] | None = None) -> Fixed:
    """What annotations say of the tensors of a layer.

    Patterns are shell patterns (`*`, `?`) of own names; several may be joined by `|`. A name of an operator stands for
    what it writes. R and I both mean whole. Patterns that match something are added to `used`.

    Errors: PlanError for a form that a tensor cannot have, with operator, tensor and the nearest choice; and for two
    patterns that say different things of one tensor.
    """
    graph = layer.graph
    fixed: Fixed = {}
    targets = [(layer.own(op.name), op.name, output) for op in graph.operators for output in op.outputs]
    targets += [(layer.own(t.name), "", t.name) for t in graph.tensors.values() if t.kind in ("parameter", "buffer")]
    for pattern, text in annotations.items():
        for own, operator, name in targets:
            if not matches(pattern, own):
                continue
            if used is not None:
                used.add(pattern)
            tensor = graph.tensors[name]
            what = f"{pattern!r}: {own}" + (f" ({layer.own(name)})" if operator else "")
            placements = parsed(text, mesh, len(tensor.shape), what)
            shape = tensor.shape
            for axis, placement in placements.items():
                cut_to = I if placement.whole else placement
                if cut_to == P and not operator:
                    raise PlanError(
                        f"{what}: form P on {axis}: it is given, not computed; possible are S0, S1, ... or R"
                    )
                shape = cut(shape, cut_to, mesh.length(axis), axis, what)
                before = fixed.setdefault(name, {}).get(axis)
                if before is not None and before[0] != cut_to:
                    raise PlanError(
                        f"{own}: {before[1]!r} fixes it as {before[0]} on {axis}, and {pattern!r} as {placement}; "
                        "keep one of the two"
                    )
                fixed[name][axis] = (cut_to, pattern)
    return fixed


def matches(pattern: str, name: str) -> bool:
    """Whether a name, or its end behind a dot, fits one of the shell patterns that are joined by `|`."""
    return any(fnmatchcase(name, one) or fnmatchcase("." + name, one) for one in pattern.split("|"))


def _close(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, list(known), 3, 0.4)
    return f"; the closest are {', '.join(found)}" if found else ""


def check_used(annotations: Annotations, used: Iterable[str], layers: Sequence[Layer]) -> None:
    """Errors: PlanError for a pattern that matches nothing; of a preset, if all of them do, or those of its matmuls."""
    core = _MATMULS.intersection(annotations) if isinstance(annotations, Preset) else set()
    if core and core.isdisjoint(used):
        words = ", ".join(name for pattern in sorted(core) for name in pattern.split("|"))
        raise PlanError(
            f"the preset divides nothing here: no operator has one of its names ({words}); possible are annotations of "
            "your own, such as those that minipar.sharding.by_operators makes"
        )
    wanted = [pattern for pattern in annotations if pattern != FED]  # only experts without a capacity have that one
    unused = [pattern for pattern in wanted if pattern not in set(used)]
    if not unused or (isinstance(annotations, Preset) and len(unused) < len(wanted)):
        return
    names = {layer.own(op.name) for layer in layers for op in layer.graph.operators}
    names |= {layer.own(name) for layer in layers for name in layer.graph.parameters}
    raise PlanError(f"annotation {unused[0]!r}: no operator or parameter has such a name{_close(unused[0], names)}")


# Choices of operators by their number and shapes, and by the pieces that were asked for.
Ways = dict[tuple[Any, ...], tuple[Choice, ...]]


# One axis -------------------------------------------------------------------------------------------------------------


@dataclass
class _Axis:
    """The state of propagation on one axis.

    known    placements that tensors have, or that a neighbour would like them to have
    chosen   choices of operators, by their number
    kept     tensors that are carried from slice to slice as R: all that read them read them so
    silent   what was known around an operator, by its number, when nothing spoke for a choice
    ways     the choices of operators that were asked for before
    """

    graph: Graph
    layer: Layer
    axis: str
    ranks: int
    ins: list[list[Shape]]
    outs: list[list[Shape]]
    fixed: Mapping[str, tuple[Placement, str]]
    given: Mapping[str, Placement]
    outer: Sequence[Mapping[str, Choice]] = ()  # of each operator the choices on the axes before
    kept: Set[str] = frozenset()
    known: dict[str, Placement] = field(default_factory=dict)
    chosen: dict[int, Choice] = field(default_factory=dict)
    writers: dict[str, int] = field(default_factory=dict)
    silent: dict[int, list[tuple[int, Placement]]] = field(default_factory=dict)
    ways: Ways = field(default_factory=dict)

    def settle(self) -> None:
        """Choose for every operator."""
        self.known = {name: p for name, p in self.given.items() if p.kind == "S"}
        self.known |= {name: p for name, (p, _) in self.fixed.items()}
        self.writers = {name: k for k, op in enumerate(self.graph.operators) for name in op.outputs}
        order = range(len(self.graph.operators))
        while self._sweep(order, light=True) or self._sweep(order, light=False):
            pass
        for k in order:
            if k not in self.chosen:
                self._take(k, self._last(k))

    def _sweep(self, order: Sequence[int], light: bool) -> bool:
        """Forward and backward once; of operators that are not light, only the first one that can decide."""
        changed = False
        for k in (*order, *reversed(order)):
            if k in self.chosen:
                continue
            rule = RULES.get(self.graph.operators[k].op)
            if light and (rule is None or not rule.light):
                continue
            choice = self._decide(k)
            if choice is not None:
                self._take(k, choice)
                changed = True
                if not light:
                    return True
        return changed

    def _decide(self, k: int) -> Choice | None:
        """The choice that fits best to what is known; None if nothing speaks for one."""
        op = self.graph.operators[k]
        tensors = (*op.inputs, *op.outputs)
        wanted = [(j, self.known[name]) for j, name in enumerate(tensors) if name in self.known]
        cuts = [(j, p) for j, p in wanted if p.kind == "S"]
        sums = [(j, p) for j, p in wanted if p == P and j >= len(op.inputs)]
        if (not cuts and not sums) or self.silent.get(k) == wanted:
            return None
        possible = self._possible(k, cuts)
        fixed = [(j, self.fixed[name][0]) for j, name in enumerate(tensors) if name in self.fixed]
        written = [(j, p) for j, p in fixed if j >= len(op.inputs)]
        fitting = [c for c in possible if all(_fits(_all(c)[j], p) for j, p in written)]
        if not fitting:
            raise self._refused(k, self._cannot_write(k, written[0], possible))
        stored = [(j, p) for j, p in fixed if self.graph.tensors[tensors[j]].kind == "parameter"]
        agreeing = [c for c in fitting if not any(_contradicts(c.ins[j], p) for j, p in stored)]
        if not agreeing:
            raise self._refused(k, self._contradiction(k, fixed, possible))
        speaking = [
            c for c in agreeing
            if any(_all(c)[j] == p for j, p in cuts) or any(_all(c)[j] == P for j, p in sums)
        ]  # fmt: skip
        speaking = [c for c in speaking if c.divided or c.name == "sum"]
        if not speaking:
            self.silent[k] = wanted
            return None
        return min(speaking, key=lambda c: self._price(k, c, cuts))

    def _possible(self, k: int, wanted: Sequence[tuple[int, Placement]] = ()) -> list[Choice]:
        """The choices that an operator has beside those on other axes."""
        op = self.graph.operators[k]
        key = k, self.ranks, *self.ins[k], *self.outs[k], *wanted
        if key not in self.ways:
            self.ways[key] = choices(op, self.ins[k], self.outs[k], self.ranks, wanted)
        every = self.ways[key]
        taken = any(choice.exclusive for choice in self.outer[k].values())
        found = [choice for choice in every if not (choice.exclusive and taken)]
        kept = [j for j, name in enumerate(op.inputs) if name in self.kept]
        if kept:
            found = [*(choice for choice in found if all(choice.ins[j] == R for j in kept)), self._whole(k)]
        return found

    def _whole(self, k: int) -> Choice:
        """Every rank computes all of an operator: as R, if it reads what is carried so."""
        op = self.graph.operators[k]
        return computed_whole(op, R if any(name in self.kept for name in op.inputs) else I)

    def _price(self, k: int, choice: Choice, cuts: Sequence[tuple[int, Placement]]) -> tuple[float, ...]:
        """Bytes of values that would move, then of parameters, then what moves inside; then what stays undivided."""
        tensors = [
            self.graph.tensors[name] for name in (*self.graph.operators[k].inputs, *self.graph.operators[k].outputs)
        ]
        every = _all(choice)
        moved = [tensors[j] for j, p in cuts if every[j] != p]
        stored = [tensor.bytes for tensor in moved if tensor.kind == "parameter"]
        stays = sum(tensor.bytes for tensor, p in zip(tensors, every, strict=True) if p.kind != "S")
        inside = sum(one.elements for one in choice.inside)
        values = sum(tensor.bytes for tensor in moved) - sum(stored)
        return values, sum(stored), inside, choice.name == "sum", stays

    def _take(self, k: int, choice: Choice) -> None:
        self.chosen[k] = choice
        op = self.graph.operators[k]
        for name, p in zip(op.outputs, choice.outs, strict=True):
            self.known[name] = p
        for name, p in zip(op.inputs, choice.ins, strict=True):
            writer = self.writers.get(name)
            free = name not in self.known and (writer is None or writer not in self.chosen)
            wish = p.kind == "S" or (p == P and choice.name == "sum" and writer is not None)
            if free and wish and self.graph.tensors[name].kind != "buffer":
                self.known[name] = p

    def _last(self, k: int) -> Choice:
        """Of an operator that no form reached: on parts of a sum, if it is given nothing else, or whole."""
        op = self.graph.operators[k]
        written = [p for name in op.outputs if name in self.fixed for p in [self.fixed[name][0]]]
        parts = bool(op.inputs) and all(self._written(name) == P and not self._read_whole(name) for name in op.inputs)
        if parts and not written:
            for choice in choices(op, self.ins[k], self.outs[k], self.ranks):
                if choice.name == "sum" and all(p == P for p in choice.ins):
                    return choice
        if any(not p.whole for p in written):
            raise self._refused(k, self._cannot_write(k, (len(op.inputs), written[0]), self._possible(k)))
        return self._whole(k)

    def _read_whole(self, name: str) -> bool:
        """Whether an operator reads the sum of a tensor's parts, so that others may read it, too."""
        return any(
            name in op.inputs and k in self.chosen and self.chosen[k].ins[op.inputs.index(name)] != P
            for k, op in enumerate(self.graph.operators)
        )

    def _written(self, name: str) -> Placement:
        writer = self.writers.get(name)
        return self.known.get(name, I) if writer is not None else self.given.get(name, I)

    def written(self, name: str) -> Placement:
        """How a tensor lies in the end."""
        if name in self.writers:
            op = self.graph.operators[self.writers[name]]
            return self.chosen[self.writers[name]].outs[op.outputs.index(name)]
        found = self.given.get(name)
        return found if found is not None else self.known.get(name, I)

    # Reasons

    def _title(self, k: int) -> str:
        op = self.graph.operators[k]
        return f"{self.layer.own(op.name)} ({op.op})"

    def _refused(self, k: int, reason: str) -> PlanError:
        error = PlanError(reason)
        error.operator = self.graph.operators[k].name
        return error

    def _cannot_write(self, k: int, wanted: tuple[int, Placement], possible: Sequence[Choice]) -> str:
        op = self.graph.operators[k]
        j, p = wanted
        name = op.outputs[j - len(op.inputs)]
        pattern = self.fixed[name][1]
        shape = self.outs[k][j - len(op.inputs)]
        head = f"{self._title(k)} cannot write {self.layer.own(name)} as {p} on {self.axis}, which {pattern!r} fixes"
        if not divides(shape, p, self.ranks):
            return f"{head}: {nearest(shape, p, self.ranks)}"
        outs = sorted({str(c.outs[j - len(op.inputs)]) for c in possible if c.divided})
        ways = f"the nearest choice is {' or '.join([*outs, 'R'])}"
        if op.op not in RULES:
            return f"{head}: the operator has no rule, and is computed whole; {ways}"
        if p == P:
            return f"{head}: no way to divide it gives parts of a sum; {ways}"
        return f"{head}: it needs all of that dimension, or its inputs cannot be cut so; {ways}"

    def _contradiction(self, k: int, fixed: Sequence[tuple[int, Placement]], possible: Sequence[Choice]) -> str:
        op = self.graph.operators[k]
        tensors = (*op.inputs, *op.outputs)
        text = ", ".join(f"{self.layer.own(tensors[j])} as {p} ({self.fixed[tensors[j]][1]!r})" for j, p in fixed)

        def distance(choice: Choice) -> tuple[int, int]:
            other = [j for j, p in fixed if _all(choice)[j] != p]
            return sum(j >= len(op.inputs) for j in other), len(other)

        best = min((c for c in possible if c.divided), key=distance, default=possible[-1])
        return f"{self._title(k)}: annotations do not fit together on {self.axis}: {text}; the nearest choice is {best}"


def _all(choice: Choice) -> tuple[Placement, ...]:
    return (*choice.ins, *choice.outs)


def _fits(chosen: Placement, fixed: Placement) -> bool:
    """Whether an output lies as it is fixed. A whole value may be written as parts of a sum, which readers add up."""
    return chosen == fixed or (fixed.whole and (chosen.whole or chosen == P))


def _contradicts(read: Placement, fixed: Placement) -> bool:
    """Whether a parameter would be read cut in another way than it is fixed. Gathering it is possible, as ZeRO does."""
    return fixed.kind == "S" and read.kind == "S" and read != fixed


# All axes -------------------------------------------------------------------------------------------------------------


def propagate(
    graph: Graph | Layer,
    annotations: Annotations,
    mesh: Mesh,
    given: Mapping[str, Form] | None = None,
    links: Mapping[str, Link] | None = None,
    ways: Ways | None = None,
) -> Sharding:
    """The forms of all tensors of a layer, from a few that are fixed by name.

    annotations   {"*.mlp.0": "S-1 on tp"}: patterns of operators and parameters, and forms
    given         the forms in which tensors come that the graph is given; others are taken as it suits
    links         (alpha, beta) of each axis, for the repartitions
    ways          kept from one call to the next, for the same graph: how each operator may be divided

    Errors: PlanError with operator, tensor and the nearest choice, where an annotation cannot be.
    """
    layer = graph if isinstance(graph, Layer) else Layer(graph)
    used: set[str] = set()
    fixed = resolve(layer, annotations, mesh, used)
    check_used(annotations, used, [layer])
    return _propagate(layer, fixed, mesh, dict(given or {}), dict(links or {}), ways={} if ways is None else ways)


def _propagate(
    layer: Layer,
    fixed: Fixed,
    mesh: Mesh,
    given: Mapping[str, Form],
    links: Mapping[str, Link],
    tokens: Set[str] = frozenset(),
    ways: Ways | None = None,
) -> Sharding:
    """The same, of annotations that are resolved.

    tokens   axes along which ranks have parts of the tokens. Of a rank's parts of all slices one cannot make its part
             of the sequence, so what would be a shard is carried whole from slice to slice there. Each rank reads it
             for its own tokens, and has a part of its gradient: it is R
    """
    graph = layer.graph
    shapes = {name: tensor.shape for name, tensor in graph.tensors.items()}
    ins = [[shapes[name] for name in op.inputs] for op in graph.operators]
    outs = [[shapes[name] for name in op.outputs] for op in graph.operators]
    written: dict[str, list[Placement]] = {name: [] for name in graph.tensors}
    whole_on: dict[str, Set[str]] = {}  # axis -> what is carried whole along it
    chosen: list[dict[str, Choice]] = [{} for _ in graph.operators]
    for axis in axes_of(mesh):
        ranks = mesh.length(axis)
        if ranks == 1:
            state = None
            for k, op in enumerate(graph.operators):
                chosen[k][axis] = computed_whole(op)
        else:
            here = {name: placements[axis] for name, placements in fixed.items() if axis in placements}
            comes = {name: form.on(axis) for name, form in given.items()}
            given_so = {name for name in graph.before if comes.get(name) == R}
            state = _Axis(graph, layer, axis, ranks, ins, outs, here, comes, chosen, given_so)
            if ways is not None:
                state.ways = ways
            state.settle()
            if axis in tokens:
                whole_on[axis] = {name for name in graph.after if state.written(name).kind in ("S", "R")}
                if whole_on[axis]:
                    state = replace(state, kept=given_so | whole_on[axis], known={}, chosen={}, writers={}, silent={})
                    state.settle()
            for k in range(len(graph.operators)):
                choice = chosen[k][axis] = state.chosen[k]
                ins[k] = [cut(s, p, ranks) for s, p in zip(ins[k], choice.ins, strict=True)]
                outs[k] = [cut(s, p, ranks) for s, p in zip(outs[k], choice.outs, strict=True)]
        for name in graph.tensors:
            written[name].append(I if state is None else state.written(name))
    axes = axes_of(mesh)
    forms = {name: Form(axes, tuple(placements)) for name, placements in written.items()}
    operators = tuple(
        Divided(
            op,
            tuple(Form(axes, tuple(c.ins[j] for c in chosen[k].values())) for j in range(len(op.inputs))),
            tuple(Form(axes, tuple(c.outs[j] for c in chosen[k].values())) for j in range(len(op.outputs))),
            chosen[k],
            tuple(ins[k]),
            tuple(outs[k]),
        )
        for k, op in enumerate(graph.operators)
    )
    carried = {name: forms[name] for name in graph.after}
    for axis, names in whole_on.items():
        carried |= {name: carried[name].put(axis, R) for name in names}
    moves = tuple(_repartitions(graph, mesh, forms, operators, links, carried))
    return Sharding(graph, mesh, forms, operators, moves, links, carried)


def _repartitions(
    graph: Graph,
    mesh: Mesh,
    forms: Mapping[str, Form],
    operators: Sequence[Divided],
    links: Mapping[str, Link],
    carried: Mapping[str, Form],
) -> Iterator[Repartition]:
    reads: dict[str, dict[Form, list[str]]] = {name: {} for name in graph.tensors}
    for one in operators:
        for name, form in zip(one.operator.inputs, one.ins, strict=True):
            reads[name].setdefault(form, []).append(one.operator.name)
    for name, form in carried.items():
        reads[name].setdefault(form, []).append("")
    writers = {name: one.operator.name for one in operators for name in one.operator.outputs}
    for name, wanted in reads.items():
        tensor = graph.tensors[name]
        there = [forms[name]]
        for form, readers in wanted.items():
            if form in there or (not tensor.differentiable and any(_alike(form, one) for one in there)):
                continue
            ways = [_both(tensor, start, form, mesh, links) for start in there]
            way, back = min(ways, key=lambda both: both[0].seconds + (both[1].seconds if both[1] else 0.0))
            there.append(form)
            yield Repartition(
                name, writers.get(name, ""), tuple(dict.fromkeys(readers)), way, back, tensor.kind == "parameter"
            )


def _alike(a: Form, b: Form) -> bool:
    """Whether two forms are the same numbers: R and I differ in the gradient alone."""
    return all(p == q or (p.whole and q.whole) for p, q in zip(a.placements, b.placements, strict=True))


def _both(tensor: Tensor, start: Form, end: Form, mesh: Mesh, links: Mapping[str, Link]) -> tuple[Path, Path | None]:
    way = path(start, end, tensor.shape, tensor.itemsize, mesh, links, tensor.name)
    return way, backward(way, tensor.shape, tensor.itemsize, mesh, links) if tensor.differentiable else None


# A model --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSharding:
    """The layers of a model with their forms; equal layers share one `Sharding`.

    ends   where the loss reads what the model hands on in another form than it was written in
    """

    layers: tuple[Layer, ...]
    shardings: tuple[Sharding, ...]
    ends: tuple[Repartition, ...] = ()

    def forms(self) -> dict[str, Form]:
        """Of all tensors by their own names; values have the number of their layer in front: "3:linear"."""
        found = {}
        for k, (layer, sharding) in enumerate(zip(self.layers, self.shardings, strict=True)):
            for name, form in sharding.forms.items():
                stored = sharding.graph.tensors[name].kind in ("parameter", "buffer")
                found[layer.own(name) if stored else f"{k}:{name}"] = form
        return found

    def collectives(self) -> tuple[Collective, ...]:
        """Of all layers, forward in their order, then backward in the opposite one. Those at the model's end, whose
        value is the last layer's, lie between."""
        every = [(k, one) for k, sharding in enumerate(self.shardings) for one in sharding.collectives()]
        every += [(len(self.layers), one) for move in self.ends for one in _of_move(move)]
        every.sort(key=lambda found: (1, -found[0]) if found[1].phase == "backward" else (0, found[0]))
        return tuple(replace(one, value=self._own(min(k, len(self.layers) - 1), one)) for k, one in every)

    def _own(self, number: int, one: Collective) -> str:
        """The name of a collective's value, as in `forms`."""
        return self.layers[number].own(one.value) if one.parameter else f"{number}:{one.value}"


def propagate_model(
    layers: Sequence[Layer],
    annotations: Annotations,
    mesh: Mesh,
    inputs: str = "I",
    links: Mapping[str, Link] | None = None,
    before: ModelSharding | None = None,
) -> ModelSharding:
    """The forms of all tensors of a chain of layers.

    inputs   the form of what the model is given: "S0 on dp" for rows of a batch
    before   of a slice of sequences the same for the slice before, whose layers wrote the carries that these are given

    What one layer writes is what the next one is given, each output in its place. A parameter that several layers share
    lies as in the first of them. Layers of the same graph, annotations and given forms are settled once.

    Errors: PlanError, as `propagate`; or if layers do not fit one behind the other.
    """
    used: set[str] = set()
    done: dict[object, Sharding] = {}
    parameters: dict[str, Form] = {}
    chosen = dict(links or {})
    found: list[Sharding] = []
    handed: list[Form] | None = None
    placements = parsed(inputs, mesh, None, "inputs")
    tokens = {axis for axis, p in placements.items() if p.kind == "S" and p.dim == 1}
    for number, layer in enumerate(layers):
        try:
            graph = layer.graph
            fixed = resolve(layer, annotations, mesh, used)
            if handed is None:
                known = [whole(mesh)] * len(graph.inputs)
                for axis, p in placements.items():
                    known = [
                        form.put(axis, p) if p.kind != "S" or p.dim < len(graph.tensors[name].shape) else form
                        for name, form in zip(graph.inputs, known, strict=True)
                    ]
            elif len(handed) != len(graph.inputs):
                raise PlanError(
                    f"layer {number} reads {len(graph.inputs)} tensors, and layer {number - 1} hands on {len(handed)}; "
                    "propagation takes chains of layers"
                )
            else:
                known = handed
            given = dict(zip(graph.inputs, known, strict=True))
            if before is not None and graph.before:
                carried = before.shardings[number]
                given |= zip(graph.before, [carried.carried[name] for name in carried.graph.after], strict=True)
            for name, form in given.items():
                local_shape(graph.tensors[name].shape, form, mesh, f"layer {number}: {name}")
            for name in graph.parameters:
                if layer.own(name) in parameters:
                    for axis, p in parameters[layer.own(name)].items():
                        fixed.setdefault(name, {}).setdefault(axis, (p, "the layer that shares it"))
            key = (
                id(graph), tuple(sorted(given.items(), key=lambda item: item[0])),
                tuple((name, axis, p) for name, one in sorted(fixed.items()) for axis, (p, _) in sorted(one.items())),
            )  # fmt: skip
            if key not in done:
                done[key] = _propagate(layer, fixed, mesh, given, chosen, tokens)
            sharding = done[key]
            found.append(sharding)
            read = {name for op in graph.operators for name in op.inputs}
            for name in read.intersection(graph.parameters):
                parameters.setdefault(layer.own(name), sharding.forms[name])
            handed = [sharding.forms[name] for name in graph.outputs]
        except PlanError as error:
            error.layer = number
            raise
    check_used(annotations, used, layers)
    parts = {axis for axis, p in placements.items() if p.kind == "S"}
    return ModelSharding(tuple(layers), tuple(found), tuple(_ends(layers, found, mesh, chosen, parts)))


def _ends(
    layers: Sequence[Layer], shardings: Sequence[Sharding], mesh: Mesh, links: Mapping[str, Link], parts: Set[str]
) -> Iterator[Repartition]:
    """The loss reads what the model hands on: a sum is added up, and a shard is gathered. On axes whose ranks have a
    part of the rows or tokens (`parts`) each computes the loss of its shard."""
    if not layers:
        return
    graph, forms = layers[-1].graph, shardings[-1].forms
    for name in graph.outputs:
        placements = (p if p.whole or (p.kind == "S" and axis in parts) else I for axis, p in forms[name].items())
        end = Form(forms[name].axes, tuple(placements))
        if end != forms[name]:
            writer = graph.writer(name)
            way, back = _both(graph.tensors[name], forms[name], end, mesh, links)
            yield Repartition(name, writer.name if writer else "", ("",), way, back)


# Presets --------------------------------------------------------------------------------------------------------------


class Preset(dict[str, str]):
    """Annotations that know several models' names: some of the patterns may match nothing."""


FUSED = "*.qkv|*.c_attn"  # queries, keys and values of one projection, behind each other
COLUMNS = "*.q_proj|*.k_proj|*.v_proj|*.mlp.0|*.mlp.up|*.c_fc|*.gate_proj|*.up_proj"
ROWS = "*.attention.out|*.attn.c_proj|*.o_proj|*.mlp.2|*.mlp.down|*.mlp.c_proj|*.down_proj"
TOKENS = "*.token|*.wte|*.embed_tokens"
LOGITS = "*.logits|*.lm_head"
EXPERTS = "*.experts.up|*.experts.down"
FED = "*.feed_experts"  # without a capacity: the experts' tokens, of which ranks have unequal parts
EXPERT_OUTPUTS = "*.experts.bmm|*.experts.matmul|*.experts.einsum|*.experts"
_MATMULS = {FUSED, COLUMNS, ROWS}  # what a model must have some of, so that its preset divides anything
NORMS = "*norm|*norm1|*norm2|*.ln_1|*.ln_2|*.ln_f"


def has_names(layers: Sequence[Layer]) -> bool:
    """Whether some operators of a model have the names that the presets know."""
    return any(matches(p, layer.own(op.name)) for layer in layers for op in layer.graph.operators for p in _MATMULS)


def megatron(axis: str = "tp", vocabulary: bool = True) -> Preset:
    """Tensor parallel as Megatron-LM: heads and the MLP's inner width are cut, two all-reduces a layer and direction.

    `vocabulary`: the table of tokens and the logits are cut, too; the loss of cut logits needs three numbers a row.
    """
    built = Preset({FUSED: f"S-1:3 on {axis}", COLUMNS: f"S-1 on {axis}", ROWS: f"P on {axis}"})
    return Preset({**built, TOKENS: f"P on {axis}", LOGITS: f"S-1 on {axis}"}) if vocabulary else built


def sequence_parallel(axis: str = "tp", vocabulary: bool = True) -> Preset:
    """Megatron's, and between its regions every rank has a part of the sequence: norms, dropouts and the residual.

    Each all-reduce becomes a reduce-scatter and an all-gather. Source: Korthikanti et al., 2022.
    """
    return Preset(
        {**megatron(axis, vocabulary), NORMS: f"S1 on {axis}", "0.add|0.dropout|embedding.add": f"S1 on {axis}"}
    )


def experts(axis: str = "ep") -> Preset:
    """Every rank has some of the experts; tokens go to the ranks of theirs and back, by two all-to-alls a layer and
    direction.

    The module `experts` has all experts side by side: the first dimension of its parameters `up` and `down`, and of
    what its matrix products write, is that of the experts. Without a capacity `feed_experts` writes what they make, in
    unequal parts. Source: Lepikhin et al., "GShard", 2020.
    """
    return Preset({EXPERTS: f"S0 on {axis}", EXPERT_OUTPUTS: f"S0 on {axis}", FED: f"U1 on {axis}"})


def two_dimensional(data: str = "dp", model: str = "tp") -> Preset:
    """Rows of the batch over one axis, heads and the inner width over the other, and weights over both.

    Weights are stored in blocks of both dimensions, and are gathered over `data` where they are read, as ZeRO does.
    Source: GSPMD, section 5.1.
    """
    columns = "|".join(f"{name}.weight" for name in f"{FUSED}|{COLUMNS}".split("|"))
    rows = "|".join(f"{name}.weight" for name in ROWS.split("|"))
    return Preset({**megatron(model, vocabulary=False), columns: f"S1 on {data}", rows: f"S0 on {data}"})
