"""From the forms of a layer's operators to nodes: a layer is cut where a value, or its gradient, changes its form.

    norm | column, gelu, row | sum         Megatron's perceptron: what follows P is another node, and so is what is in
      I  R          P        I             front of a column, whose input's gradient is a partial sum

A node is a piece of the layer's own torch code. It runs the captured operators on this rank's parts (`local.py`). What
goes from node to node is a value, or a tuple of several: the residual goes along with what is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.randomness import RowDropout
from minipar.models.selective_checkpoint import Recomputed
from minipar.models.tensors import tensors
from minipar.program.forms import COUNTS, PARTIAL, WHOLE, Forms, text_of
from minipar.sharding import local
from minipar.sharding.forms import Placement, cut
from minipar.sharding.graph import Graph, Layer, Operator, Slot
from minipar.sharding.nodes import Cut, Held, Node
from minipar.sharding.propagation import Divided, Sharding

AXIS = "tp"
ROWS = (17, 19)  # of the two captures that tell what depends on the rows of a batch: primes, which are seen in sizes
# of the two captures that tell what depends on the rows of a batch; a prime, so that it is seen in sizes


@dataclass(frozen=True)
class Part:
    """A tensor that goes from node to node: as it was written, and as it is read behind the first border.

    rows     of the micro-batch with which the layer was captured
    counts   whether it counts unequal parts of others
    """

    name: str
    written: Placement
    read: Placement
    differentiable: bool
    floating: bool
    rows: int
    counts: bool


def _shard(placement: Placement, rows: int) -> str:
    """The letter of a shard. Pieces that depend on the rows of the batch, as in a view of rows and tokens together, are
    counted in rows."""
    if placement.pieces % rows:
        return str(placement)
    return f"S{placement.dim}:{placement.pieces // rows}r"


def _at_rows(placement: Placement, captured: int, rows: int) -> Placement:
    """A placement that was captured with some rows, in a micro-batch of so many."""
    if placement.pieces % captured:
        return placement
    return replace(placement, pieces=placement.pieces // captured * rows)


def _forward(placement: Placement, rows: int) -> str:
    """The letter of a value."""
    return _shard(placement, rows) if placement.kind == "S" else PARTIAL if placement.kind == "P" else WHOLE


def _backward(placement: Placement, rows: int) -> str:
    """The letter of its gradient."""
    return _shard(placement, rows) if placement.kind == "S" else PARTIAL if placement.kind == "R" else WHOLE


def _letters(part: Part) -> tuple[str, str, str, str]:
    """The letters of a border: what the writer gives, what the reader takes, and backward what the reader gives, and
    what the writer takes."""
    writes, reads = _forward(part.written, part.rows), _forward(part.read, part.rows)
    grad_writes, grad_reads = _backward(part.read, part.rows), _backward(part.written, part.rows)
    if writes == WHOLE and reads[0] == "S":
        reads = f"C{reads[1:]}"
    if grad_writes == WHOLE and grad_reads[0] == "S":
        grad_reads = f"C{grad_reads[1:]}"
    if part.counts:  # where they are whole, they go in front of what they count, and with its gradient, too
        writes, reads = (COUNTS if letter == WHOLE else letter for letter in (writes, reads))
        return writes, reads, COUNTS, COUNTS
    if not part.differentiable:  # its gradient, if its reader makes one, stays where it is
        grad_writes = grad_reads = _backward(part.written, part.rows) if part.written.kind == "S" else WHOLE
    if (writes, reads) == (WHOLE, PARTIAL) or (part.differentiable and (grad_writes, grad_reads) == (WHOLE, PARTIAL)):
        raise PlanError(
            f"{part.name}: is written as {part.written} and read as {part.read}; nothing makes a partial sum of it"
        )
    return writes, reads, grad_writes, grad_reads


def _changes(part: Part) -> bool:
    """Whether there is a border between writer and reader."""
    writes, reads, grad_writes, grad_reads = _letters(part)
    return writes != reads or (part.differentiable and grad_writes != grad_reads)


@dataclass
class Piece:
    """The operators of one node, what it takes and what it gives."""

    operators: list[Divided]
    takes: list[Part]
    gives: list[Part]


def pieces_of(sharding: Sharding, rows: int) -> list[Piece]:
    """The nodes of a layer: operators by how many borders lie in front of them."""
    graph = sharding.graph
    written = {name: form.on(AXIS) for name, form in sharding.forms.items()}
    level: dict[str, int] = dict.fromkeys(graph.inputs, 0)  # of each value, that of its writer
    stored = {name for name, tensor in graph.tensors.items() if tensor.kind in ("parameter", "buffer")}
    counting = {one.operator.counts for one in sharding.operators if any(form.on(AXIS).unequal for form in one.outs)}
    parts: dict[tuple[str, str], Part] = {}
    uses: dict[tuple[str, str], int] = {}  # of each part, the last level that reads it
    levels: list[tuple[int, Divided]] = []

    def part_of(name: str, read: Placement) -> Part:
        tensor = graph.tensors[name]
        found = Part(name, written[name], read, tensor.differentiable, tensor.floating, rows, name in counting)
        if (read.kind == "P" and written[name].whole) or not _changes(found):
            found = replace(found, read=found.written)
        return parts.setdefault((name, str(found.read)), found)

    for one in sharding.operators:
        reads = [
            part_of(name, form.on(AXIS))
            for name, form in zip(one.operator.inputs, one.ins, strict=True)
            if name not in stored
        ]
        own = max((level[part.name] + _changes(part) for part in reads), default=0)
        for part in reads:
            key = part.name, str(part.read)
            uses[key] = max(uses.get(key, 0), own)
        for name in one.operator.outputs:
            level[name] = own
        levels.append((own, one))
    last = max((own for own, _ in levels), default=0)

    def as_written(name: str) -> Part:
        tensor = graph.tensors[name]
        return Part(name, written[name], written[name], tensor.differentiable, tensor.floating, rows, name in counting)

    ends = [as_written(name) for name in graph.outputs]
    for part in ends:
        key = part.name, str(part.read)
        parts.setdefault(key, part)
        uses[key] = last + 1
    found = [Piece([one for own, one in levels if own == k], [], []) for k in range(last + 1)]
    found[0].takes = [as_written(name) for name in graph.inputs]
    for k in range(last):
        across = [part for key, part in parts.items() if level[part.name] <= k < uses.get(key, -1)]
        across.sort(key=lambda part: not part.counts)  # counts go first: what they count is exchanged by them
        found[k].gives = found[k + 1].takes = across
    found[last].gives = ends
    # What is already in its new form when it comes to a border has changed at the border before.
    return found


def forms_of(pieces: Sequence[Piece], graph: Graph, sharding: Sharding) -> list[Forms]:
    """The forms in which each node takes and gives values."""
    level: dict[str, int] = dict.fromkeys(graph.inputs, 0)
    for k, piece in enumerate(pieces):
        for one in piece.operators:
            level.update(dict.fromkeys(one.operator.outputs, k))
    found: list[Forms] = []
    for k, piece in enumerate(pieces):
        takes = [_at_border(part, level[part.name] == k - 1) for part in piece.takes]
        gives = [_at_border(part, level[part.name] == k and k < len(pieces) - 1) for part in piece.gives]
        smooth_in = [own for part, own in zip(piece.takes, takes, strict=True) if part.floating or COUNTS in own[:2]]
        smooth_out = [own for part, own in zip(piece.gives, gives, strict=True) if part.floating or COUNTS in own[:2]]
        found.append(
            Forms(
                reads=text_of(tuple(letters[1] for letters in takes)),
                writes=text_of(tuple(letters[0] for letters in gives)),
                grad_reads=text_of(tuple(letters[3] for letters in smooth_out)),
                grad_writes=text_of(tuple(letters[2] for letters in smooth_in)),
            )
        )
    return found


def _at_border(part: Part, first: bool) -> tuple[str, str, str, str]:
    """The letters of a part at a border: the first one behind its writer, or another, where it is as it is read."""
    return _letters(part if first else replace(part, written=part.read))


# Rows of a batch ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A number that depends on the rows of the micro-batch: `each` for every row."""

    each: int

    def of(self, rows: int) -> int:
        """The number for so many rows."""
        return self.each * rows


def by_rows(small: Any, large: Any, rows: tuple[int, int], what: str) -> Any:
    """What is the same in two captures stays; a whole number in proportion to their rows becomes a `Size`.

    Errors: PlanError for what depends on the rows in another way.
    """
    if isinstance(small, (list, tuple)) and isinstance(large, (list, tuple)) and len(small) == len(large):
        return type(small)(by_rows(a, b, rows, what) for a, b in zip(small, large, strict=True))
    if isinstance(small, bool) or not isinstance(small, int) or small == large:
        if isinstance(small, float) and small != large:
            raise PlanError(f"{what}: computes with the number of rows of the batch; it cannot be divided by rows")
        return small
    if not isinstance(large, int) or small * rows[1] != large * rows[0] or small % rows[0]:
        raise PlanError(f"{what}: has the sizes {small} and {large} for {rows[0]} and {rows[1]} rows")
    return Size(small // rows[0])


def with_rows(given: Any, rows: int) -> Any:
    """The numbers for so many rows."""
    if isinstance(given, Size):
        return given.of(rows)
    if isinstance(given, (list, tuple)):
        return type(given)(with_rows(one, rows) for one in given)
    return given


# Nodes ----------------------------------------------------------------------------------------------------------------

Templates = tuple[dict[str, tuple[Any, ...]], dict[str, Any]]


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of a layer: its value, and of a parameter its name in the whole model."""

    value: Tensor
    name: str = ""


Line = tuple[Divided, Operator, tuple[tuple[int, ...], ...]]  # an operator as it runs, and its outputs' local shapes
Find = Callable[[str, Placement], Tensor]  # a tensor by its name, and how it is read


@dataclass(frozen=True)
class Recipe:
    """What a node computes, without parameters; equal for all ranks but for `place`.

    shapes, options   of all tensors and operators of the layer; `Size` stands for rows
    captured          the rows with which the layer was captured
    """

    piece: Piece
    shapes: Mapping[str, tuple[Any, ...]]
    options: Mapping[str, Any]
    place: local.Place
    captured: int

    def __deepcopy__(self, memo: object) -> Recipe:
        return self  # nothing of it changes, and torch's operators cannot be copied

    @cached_property
    def written(self) -> dict[str, Placement]:
        """How each value lies on the ranks that the node takes or makes."""
        found = {part.name: part.written for part in self.piece.takes}
        for one in self.piece.operators:
            found |= {n: form.on(AXIS) for n, form in zip(one.operator.outputs, one.outs, strict=True)}
        return found

    def prepared(self, rows: int) -> list[Line]:
        """The operators for a micro-batch of so many rows, with the local shapes of their outputs."""
        if rows not in self._known:
            found = []
            for one in self.piece.operators:
                operator = one.operator
                options = {name: with_rows(value, rows) for name, value in self.options[operator.name].items()}
                outputs = tuple(
                    self._local_shape(name, form.on(AXIS), rows)
                    for name, form in zip(operator.outputs, one.outs, strict=True)
                )
                found.append((one, replace(operator, options=options), outputs))
            self._known[rows] = found
        return self._known[rows]

    def _local_shape(self, name: str, placement: Placement, rows: int) -> tuple[int, ...]:
        """What this rank has of a tensor for a micro-batch of so many rows."""
        shape = with_rows(self.shapes[name], rows)
        return cut(shape, _at_rows(placement, self.captured, rows), self.place.ranks, AXIS, name)

    @cached_property
    def _known(self) -> dict[int, list[Line]]:
        return {}

    def check(self, values: Sequence[Tensor], rows: int, title: str) -> None:
        """Errors: PlanError for values of other sizes than those that the layer was captured with."""
        if rows not in self._checked:
            self._checked[rows] = [self._local_shape(part.name, part.read, rows) for part in self.piece.takes]
        for part, value, shape in zip(self.piece.takes, values, self._checked[rows], strict=True):
            known = int(part.read.unequal)  # the first dimension of an unequal part has any size
            if value.shape[known:] != shape[known:]:
                raise PlanError(
                    f"node {title}: {part.name} has the shape {tuple(value.shape)}, and {shape} in the first batch; "
                    "ranks that share layers take tensors of one shape in all steps, such as sequences of one length"
                )

    @cached_property
    def _checked(self) -> dict[int, list[tuple[int, ...]]]:
        return {}

    def rows(self, takes: Iterable[tuple[str, Placement]], values: Sequence[Tensor]) -> int:
        """How many rows the micro-batch has: from the first dimension of these values that depends on it."""
        for (name, read), value in zip(takes, values, strict=True):
            if read.unequal:
                continue
            for dim, size in enumerate(self.shapes[name]):
                if isinstance(size, Size):
                    shards = self.place.ranks if read.kind == "S" and read.dim == dim else 1
                    return value.shape[dim] * shards // size.each
        return 0

    @cached_property
    def unread(self) -> list[tuple[str, ...]]:
        """For each operator, what no later operator of the node reads, and no other node."""
        every = [one.operator for one in self.piece.operators]
        last = {name: k for k, op in enumerate(every) for name in (*op.inputs, *op.outputs)}
        mine = {name for op in every for name in op.outputs} - {part.name for part in self.piece.gives}
        return [tuple(name for name in mine if last[name] == k) for k in range(len(every))]

    def run(
        self, lines: range, rows: int, find: Find, dropouts: Mapping[str, nn.Module], made: dict[str, Tensor]
    ) -> None:
        """Run these operators on what `find` gives, and add what they make to `made`, as long as it is read.

        dropouts   the modules of some operators, by their names
        """
        every = self.prepared(rows)
        for k in lines:
            one, operator, outputs = every[k]
            inputs = [find(name, form.on(AXIS)) for name, form in zip(operator.inputs, one.ins, strict=True)]
            if operator.name in dropouts:
                module = dropouts[operator.name]
                made[operator.outputs[0]] = self._dropped(module, operator, one.outs[0].on(AXIS), inputs[0], rows)
            else:
                running = local.run(operator, one.choices, {AXIS: self.place}, inputs, outputs)
                made.update(zip(operator.outputs, _finished(running, operator), strict=True))
            del inputs
            self.forget(k, made)

    def forget(self, line: int, made: dict[str, Tensor]) -> None:
        """Let go what nobody reads after this operator."""
        for name in self.unread[line]:
            made.pop(name, None)

    def _dropped(self, module: nn.Module, operator: Operator, written: Placement, given: Tensor, rows: int) -> Tensor:
        """Dropout of this rank's part, by the mask of the whole tensor."""
        if not isinstance(module, RowDropout):  # the one of torch, where nothing but time is measured
            made: Tensor = module(given)
            return made
        lies = _at_rows(written, self.captured, rows)
        whole = with_rows(self.shapes[operator.outputs[0]], rows)
        if lies.kind != "S":
            return module.of_part(given, whole, lambda kept: kept)
        return module.of_part(given, whole, Cut(lies.dim, self.place.index, self.place.ranks, lies.pieces).of)

    def as_read(self, name: str, read: Placement, found: Tensor, stored: bool = False) -> Tensor:
        """A tensor that is whole as it is read: as it is, or as a part of a sum."""
        if read.kind == "P" and (stored or self.written[name].whole):
            part: Tensor = _AsPart.apply(found, self.place.index)
            return part
        return found


class _Core(Recomputed):
    """Operators of a node, lines `first` to `end`, that keep only what they read with checkpoint=selective.

    takes   what they read of others, as it is read; `gives`: what others read of them
    """

    def __init__(self, recipe: Recipe, lines: range, dropouts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.recipe, self.lines = recipe, lines
        every = recipe.piece.operators
        own = [every[k] for k in lines]
        made = {name for one in own for name in one.operator.outputs}
        later = [name for one in every[lines.stop :] for name in one.operator.inputs]
        later += [part.name for part in recipe.piece.gives]
        reads = [pair for one in own for pair in zip(one.operator.inputs, one.ins, strict=True)]
        found = {(name, str(form.on(AXIS))): (name, form.on(AXIS)) for name, form in reads if name not in made}
        self.takes = tuple(found.values())
        self.gives = tuple(name for name in dict.fromkeys(later) if name in made)
        self.dropouts: dict[str, str] = {}
        for one in own:
            if one.operator.name in dropouts:
                self.dropouts[one.operator.name] = f"dropout_{len(self.dropouts)}"
                self.add_module(self.dropouts[one.operator.name], dropouts[one.operator.name])

    def compute(self, *inputs: Tensor) -> Any:
        taken = {(name, str(read)): value for (name, read), value in zip(self.takes, inputs, strict=True)}
        made: dict[str, Tensor] = {}

        def find(name: str, read: Placement) -> Tensor:
            return self.recipe.as_read(name, read, made[name]) if name in made else taken[name, str(read)]

        rows = self.recipe.rows(self.takes, inputs)
        self.recipe.run(self.lines, rows, find, {name: getattr(self, own) for name, own in self.dropouts.items()}, made)
        found = tuple(made[name] for name in self.gives)
        return found[0] if len(found) == 1 else found


class CapturedNode(Node):
    """A node of captured operators. Its input is a tensor, or a tuple of them; so is what it gives."""

    def __init__(self, recipe: Recipe, forms: Forms, title: str) -> None:
        super().__init__(forms, title)
        self.recipe = recipe
        self.own: dict[str, str] = {}  # names of parameters and buffers in the graph -> those in this module
        self.dropouts: dict[str, str] = {}  # names of operators -> those of their modules here
        self.cores: list[_Core] = []  # which are modules of this one, too

    def forward(self, given: Any) -> Any:
        # What has no gradient in the whole layer gets none here either, although it comes from another node.
        values = [
            value if part.differentiable else value.detach()
            for part, value in zip(self.recipe.piece.takes, tensors(given), strict=True)
        ]
        there = {part.name: value for part, value in zip(self.recipe.piece.takes, values, strict=True)}
        keyed = {(part.name, str(part.read)): v for part, v in zip(self.recipe.piece.takes, values, strict=True)}
        made: dict[str, Tensor] = {}
        rows = self.recipe.rows([(part.name, part.read) for part in self.recipe.piece.takes], values)
        self.recipe.check(values, rows, self.title)

        def find(name: str, read: Placement) -> Tensor:
            return self._input(name, read, made, keyed, there)

        done, end = 0, len(self.recipe.piece.operators)
        dropouts = {name: getattr(self, own) for name, own in self.dropouts.items()}
        for core in self.cores:
            self.recipe.run(range(done, core.lines.start), rows, find, dropouts, made)
            made.update(zip(core.gives, tensors(core(*(find(*taken) for taken in core.takes))), strict=True))
            for line in core.lines:
                self.recipe.forget(line, made)
            done = core.lines.stop
        self.recipe.run(range(done, end), rows, find, dropouts, made)
        found = tuple(
            made[part.name] if part.name in made else keyed.get((part.name, str(part.read)), there.get(part.name))
            for part in self.recipe.piece.gives
        )
        return found[0] if len(found) == 1 else found

    def _input(
        self,
        name: str,
        read: Placement,
        made: Mapping[str, Tensor],
        keyed: Mapping[tuple[str, str], Tensor],
        there: Mapping[str, Tensor],
    ) -> Tensor:
        if name in self.own:
            found: Tensor = getattr(self, self.own[name])
            held = self.held.get(self.own[name])
            if read.kind == "S" and (held is None or held.cut is None):  # it is whole here, and read as a shard
                return Cut(read.dim, self.recipe.place.index, self.recipe.place.ranks, read.pieces).of(found)
        elif name in made:
            found = made[name]
        else:
            found = keyed[name, str(read)] if (name, str(read)) in keyed else there[name]
        return self.recipe.as_read(name, read, found, name in self.own)


class _AsPart(torch.autograd.Function):
    """What is whole as a part of a sum: the first rank has all of it, the others zeros. Every rank gets the whole
    gradient, as that of a sum is."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, index: int) -> Tensor:
        return whole.clone() if index == 0 else torch.zeros_like(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _finished(running: Any, operator: Operator) -> tuple[Tensor, ...]:
    """The outputs of an operator that needs no collective on the way."""
    try:
        axis, request = next(running)
    except StopIteration as end:
        found: tuple[Tensor, ...] = end.value
        return found
    raise PlanError(f"{operator.name} ({operator.op}): needs {request.op} on {axis} inside; nodes cannot do that yet")


@dataclass(frozen=True)
class Nodes:
    """The nodes of equal layers on one rank: of each node what it computes, and its forms."""

    recipes: tuple[Recipe, ...]
    forms: tuple[Forms, ...]


def planned(sharding: Sharding, templates: Templates, place: local.Place, rows: int) -> Nodes:
    """The nodes of all layers that have these forms.

    templates   shapes of all tensors and arguments of all operators, in which `Size` stands for rows
    rows        of the capture
    """
    pieces = pieces_of(sharding, rows)
    recipes = tuple(Recipe(piece, *templates, place, rows) for piece in pieces)
    return Nodes(recipes, tuple(forms_of(pieces, sharding.graph, sharding)))


def nodes_of(
    layer: Layer,
    sharding: Sharding,
    shared: Nodes,
    stored: Mapping[str, Stored],
    title: str,
    place: local.Place,
    known: dict[str, nn.Parameter],
    dropouts: Mapping[str, nn.Dropout],
    cores: Mapping[str, str] = MappingProxyType({}),
) -> list[Node]:
    """The nodes of one layer on one rank.

    shared      what is the same for equal layers
    stored      the layer's parameters and buffers by their names in the graph
    known       parameters that other layers hold already, by name
    dropouts    for each operator that is one, by its name in the graph
    cores       for each operator of a part that checkpoint=selective runs again, the name of that part
    """
    pieces = [recipe.piece for recipe in shared.recipes]
    held = _held(sharding, stored, place, known)
    nodes: list[Node] = []
    for k, (recipe, own) in enumerate(zip(shared.recipes, shared.forms, strict=True)):
        node = CapturedNode(recipe, own, f"{title}.{k}")
        for one in recipe.piece.operators:
            if one.operator.name in dropouts:
                node.dropouts[one.operator.name] = f"dropout_{len(node.dropouts)}"
                node.add_module(node.dropouts[one.operator.name], dropouts[one.operator.name])
            for name in one.operator.inputs:
                if name not in stored or name in node.own:
                    continue
                node.own[name] = f"stored_{len(node.own)}"
                value = stored[name].value
                if isinstance(value, nn.Parameter):
                    node.hold(node.own[name], value, held[name], known)
                else:
                    node.register_buffer(node.own[name], value, persistent=False)
        modules = {name: getattr(node, own) for name, own in node.dropouts.items()}
        for lines in _runs([cores.get(one.operator.name, "") for one in recipe.piece.operators]):
            core = _Core(node.recipe, lines, modules)
            node.add_module(f"core_{len(node.cores)}", core)
            node.cores.append(core)
        nodes.append(node)
    _check_changed(layer, pieces, stored)
    unused = [name for name in stored if isinstance(stored[name].value, nn.Parameter) and name not in _read(sharding)]
    for name in unused:  # which no operator reads: it is part of the model all the same
        nodes[0].hold(f"unused_{len(nodes[0].held)}", stored[name].value, Held(stored[name].name), known)  # type: ignore[arg-type]
    return nodes


def _runs(parts: Sequence[str]) -> list[range]:
    """Where neighbours belong to the same part; those that belong to none ("") are left out."""
    found, start = [], 0
    for part, run in groupby(parts):
        end = start + len(list(run))
        found += [range(start, end)] if part else []
        start = end
    return found


def _check_changed(layer: Layer, pieces: Sequence[Piece], stored: Mapping[str, Stored]) -> None:
    """Errors: PlanError for an operator that changes a buffer of which it reads a part, or one of another node."""
    buffers = {name: name for name in stored}  # and what is the same memory under another name
    for piece, one in ((of, divided) for of in pieces for divided in of.operators):
        schema = getattr(one.operator.call, "_schema", None)
        for argument in schema.arguments if schema is not None else ():
            slot = one.operator.options.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(slot, Slot):
                continue
            name, read = one.operator.inputs[slot.index], one.ins[slot.index].on(AXIS)
            if name in buffers:
                buffers.update(dict.fromkeys(one.operator.outputs, buffers[name]))
            if name in buffers and name in {part.name for part in piece.takes}:
                raise PlanError(
                    f"{layer.own(one.operator.name)} ({one.operator.op}): changes {layer.own(buffers[name])}, but a "
                    "collective comes between it and the operator that changed it before; possible is one change, "
                    "such as buffer.copy_(...)"
                )
            if name in buffers and not read.whole:
                raise PlanError(
                    f"{layer.own(one.operator.name)} ({one.operator.op}): changes {layer.own(buffers[name])}, of which "
                    f"each rank would have a part ({read}); possible is the annotation R of this operator"
                )


def _read(sharding: Sharding) -> set[str]:
    return {name for one in sharding.operators for name in one.operator.inputs}


def _held(
    sharding: Sharding, stored: Mapping[str, Stored], place: local.Place, known: Mapping[str, nn.Parameter]
) -> dict[str, Held]:
    """Which part of each parameter this rank has. Where operators disagree, it has all, and each takes its own part."""
    reads: dict[str, list[Placement]] = {}
    for one in sharding.operators:
        for name, form in zip(one.operator.inputs, one.ins, strict=True):
            if name in stored and isinstance(stored[name].value, nn.Parameter):
                reads.setdefault(name, []).append(form.on(AXIS))
    found: dict[str, Held] = {}
    for name, placements in reads.items():
        whole = stored[name].name
        kinds = set(map(str, placements))
        first = placements[0]
        if len(kinds) == 1 and first.kind == "S":
            found[name] = Held(whole, Cut(first.dim, place.index, place.ranks, first.pieces))
        else:
            alike, differing = kinds & {"I", "P"}, kinds - {"I", "P"}
            if alike and differing:
                raise PlanError(
                    f"{whole}: is read as {' and as '.join(sorted(kinds))}; one gradient would be whole, the other a "
                    "part of a sum; possible is one of the two"
                )
            found[name] = Held(whole, None, partial=bool(differing))
        before = getattr(known.get(whole), "minipar_held", None)
        if before is not None and before != found[name]:
            forms = f"{before.form or 'whole'} and as {found[name].form or 'whole'}"
            raise PlanError(f"{whole}: layers that share it read it as {forms}; possible is one form for all")
    return found


def templates_of(small: Graph, large: Graph, rows: tuple[int, int]) -> Templates:
    """Shapes and arguments in which `Size` stands for rows, of a layer that was captured with two numbers of rows.

    Errors: PlanError for code that does other things for other numbers of rows.
    """
    if [one.op for one in small.operators] != [one.op for one in large.operators]:
        raise PlanError("the layer computes otherwise for another number of rows; it cannot be divided by rows")
    shapes = {
        name: by_rows(tensor.shape, large.tensors[name].shape, rows, name) for name, tensor in small.tensors.items()
    }
    options = {
        a.name: {key: by_rows(value, b.options[key], rows, f"{a.name} ({a.op})") for key, value in a.options.items()}
        for a, b in zip(small.operators, large.operators, strict=True)
    }
    return shapes, options
