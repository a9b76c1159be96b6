"""From the forms of a layer's operators to nodes: a layer is cut where a value, or its gradient, changes its form.

    norm | column, gelu, row | sum         Megatron's perceptron: what follows P is another node, and so is what is in
      I  R          P        I             front of a column, whose input's gradient is a partial sum

A node is a piece of the layer's own torch code. It runs the captured operators on this rank's parts (`local.py`). What
goes from node to node is a value, or a tuple of several: the residual goes along with what is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.nodes import Cut, Held, Node
from minipar.models.randomness import RowDropout
from minipar.models.selective_checkpoint import Recomputed
from minipar.models.tensors import rebuilt, tensors
from minipar.models.unregistered import exchange
from minipar.program.forms import COUNTS, PARTIAL, WHOLE, Forms, letter_of, text_of
from minipar.sharding import local
from minipar.sharding.forms import Form, I, Placement, cut
from minipar.sharding.graph import Graph, Layer, Operator, Slot
from minipar.sharding.propagation import Divided, Sharding
from minipar.sharding.whole import LAYER, filled

AXIS = "tp"
Lies = tuple[Placement, ...]  # how a tensor lies on each axis along which ranks share layers, in the order of `SHARING`
ROWS = (17, 19)  # of the two captures that tell what depends on the rows of a batch: primes, which are seen in sizes


@dataclass(frozen=True)
class Part:
    """A tensor that goes from node to node: as it was written, and as it is read behind the first border.

    ranks    along each axis
    rows     of the micro-batch with which the layer was captured
    counts   for each axis, whether it counts unequal parts of others along it
    """

    name: str
    written: Lies
    read: Lies
    differentiable: bool
    floating: bool
    ranks: tuple[int, ...]
    rows: int
    counts: tuple[bool, ...]


def _lies(form: Form, axes: Sequence[str]) -> Lies:
    return tuple(form.on(axis) for axis in axes)


def _text(lies: Lies) -> str:
    return "/".join(map(str, lies))


def _unequal(lies: Lies) -> bool:
    """Whether ranks have parts of sizes that only the data tell."""
    return any(p.unequal for p in lies)


def _shard(placement: Placement, rows: int) -> str:
    """The letter of a shard. Pieces that depend on the rows of the batch, as in a view of rows and tokens together, are
    counted in rows."""
    if placement.pieces % rows:
        return str(placement)
    return f"S{placement.dim}:{placement.pieces // rows}r"


def _rows_left(lies: Lies, axis: int, ranks: Sequence[int], rows: int) -> int:
    """Of so many rows those that are left to an axis, where the axes that cut before it have cut the same dimension by
    rows: pieces of it that depend on the rows are then those of a part."""
    own = lies[axis]
    for before in range(axis):
        p = lies[before]
        if own.kind == p.kind == "S" and p.dim == own.dim and p.pieces == 1 and own.pieces > 1:
            rows //= ranks[before]
    return rows


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
    every = [_letters_on(part, axis) for axis in range(len(part.ranks))]
    writes, reads, grad_writes, grad_reads = (letter_of(parts) for parts in zip(*every, strict=True))
    return writes, reads, grad_writes, grad_reads


def _letters_on(part: Part, axis: int) -> tuple[str, str, str, str]:
    """The same on one axis, by its number."""
    written, read, counts = part.written[axis], part.read[axis], part.counts[axis]
    before, after = (_rows_left(lies, axis, part.ranks, part.rows) for lies in (part.written, part.read))
    writes, reads = _forward(written, before), _forward(read, after)
    grad_writes, grad_reads = _backward(read, after), _backward(written, before)
    # Shards of one dimension in other pieces: their common parts have other sizes, and so they are gathered.
    pieces = written.kind == read.kind == "S" and written.dim == read.dim and writes != reads
    if reads[0] == "S" and (writes == WHOLE or pieces):
        reads = f"C{reads[1:]}"
    if grad_reads[0] == "S" and (grad_writes == WHOLE or pieces):
        grad_reads = f"C{grad_reads[1:]}"
    if counts:  # where they are whole, they go in front of what they count, and with its gradient, too
        writes, reads = (COUNTS if letter == WHOLE else letter for letter in (writes, reads))
        return writes, reads, COUNTS, COUNTS
    if not part.differentiable:  # its gradient, if its reader makes one, stays where it is
        grad_writes = grad_reads = _backward(written, before) if written.kind == "S" else WHOLE
    if (writes, reads) == (WHOLE, PARTIAL) or (part.differentiable and (grad_writes, grad_reads) == (WHOLE, PARTIAL)):
        raise PlanError(f"{part.name}: is written as {written} and read as {read}; nothing makes a partial sum of it")
    return writes, reads, grad_writes, grad_reads


def _changes(part: Part) -> bool:
    """Whether there is a border between writer and reader."""
    writes, reads, grad_writes, grad_reads = _letters(part)
    return writes != reads or (part.differentiable and grad_writes != grad_reads)


@dataclass
class Piece:
    """The operators of one node, what it takes and what it gives.

    before, after   of a layer on a slice of sequences, what the node is given of its carry, and what it keeps of it
    carried         which tensors of the layer's carry these are
    free            what is made of no input: whoever reads a part of it, takes it
    """

    operators: list[Divided]
    takes: list[Part]
    gives: list[Part]
    before: list[Part] = field(default_factory=list)
    after: list[Part] = field(default_factory=list)
    carried: tuple[int, ...] = ()
    free: Set[str] = frozenset()


def pieces_of(sharding: Sharding, rows: int) -> list[Piece]:
    """The nodes of a layer: operators by how many borders lie in front of them."""
    graph, axes = sharding.graph, axes_of(sharding)
    ranks = tuple(sharding.mesh.length(axis) for axis in axes)
    written = {name: _lies(form, axes) for name, form in sharding.forms.items()}
    # Of each value, the level of its writer. What comes from the slice before has none: only one node may read it.
    level: dict[str, int] = dict.fromkeys((*graph.inputs, *graph.before), 0)
    stored = {name for name, tensor in graph.tensors.items() if tensor.kind in ("parameter", "buffer")}
    counting = {(o.operator.counts, axis) for o in sharding.operators for form in o.outs
                for axis in axes if form.on(axis).unequal}  # fmt: skip
    parts: dict[tuple[str, str], Part] = {}
    uses: dict[tuple[str, str], int] = {}  # of each part, the last level that reads it
    levels: list[tuple[int, Divided]] = []

    def lying(name: str, read: Lies) -> Part:
        tensor = graph.tensors[name]
        counts = tuple((name, axis) in counting for axis in axes)
        return Part(name, written[name], read, tensor.differentiable, tensor.floating, ranks, rows, counts)

    free = _free(sharding.operators) if graph.after else set()

    def part_of(name: str, read: Lies) -> Part:
        if name in free:
            read = tuple(_taken(of, to, rows) for of, to in zip(written[name], read, strict=True))
        found = lying(name, read)
        found = replace(found, read=tuple(_needed(found, axis) for axis in range(len(axes))))
        _check_order(found, axes)
        return parts.setdefault((name, _text(found.read)), found)

    def reads_of(one: Divided) -> list[Part]:
        forms = zip(one.operator.inputs, one.ins, strict=True)
        return [part_of(name, _lies(form, axes)) for name, form in forms if name not in stored]

    for one in sharding.operators:
        reads = reads_of(one)
        own = max((level[part.name] + _changes(part) for part in reads), default=0)
        for name in one.operator.outputs:
            level[name] = own
        levels.append((own, one))
    if graph.after:
        _sink(levels, level, reads_of, free)
    after = [part_of(name, _lies(sharding.carried[name], axes)) for name in graph.after]
    kept_at = [level[part.name] + _changes(part) for part in after]
    last = max([own for own, _ in levels] + kept_at, default=0)
    for part, at in zip(after, kept_at, strict=True):
        uses[part.name, _text(part.read)] = at
    for own, one in levels:
        for part in reads_of(one):
            key = part.name, _text(part.read)
            uses[key] = max(uses.get(key, 0), own)

    def as_written(name: str) -> Part:
        return lying(name, written[name])

    ends = [as_written(name) for name in graph.outputs]
    for part in ends:
        key = part.name, _text(part.read)
        parts.setdefault(key, part)
        uses[key] = last + 1
    found = [Piece([one for own, one in levels if own == k], [], [], free=free) for k in range(last + 1)]
    found[0].takes = [as_written(name) for name in graph.inputs]
    order = {name: k for k, name in enumerate(graph.tensors)}
    for k in range(last):
        across = [part for key, part in parts.items() if level[part.name] <= k < uses.get(key, -1)]
        across = [part for part in across if part.name not in graph.before]
        # Counts go first: what they count is exchanged by them. The others go in the order in which they are written,
        # which is the same in all slices of a sequence.
        across.sort(key=lambda part: (not any(part.counts), order[part.name]))
        found[k].gives = found[k + 1].takes = across
    found[last].gives = ends
    # What is already in its new form when it comes to a border has changed at the border before.
    for index, (part, at) in enumerate(zip(after, kept_at, strict=True)):
        node = found[at]
        node.after.append(part)
        node.carried = (*node.carried, index)
        if graph.before:
            read = graph.before[index]
            node.before.append(as_written(read))
            _check_carry(read, part.name, at, levels, [part for part in parts.values() if part.name == read])
    return found


def _free(operators: Iterable[Divided]) -> set[str]:
    """What depends on no input, such as a mask."""
    found: set[str] = set()
    for one in operators:
        found.update(one.operator.outputs if found.issuperset(one.operator.inputs) else ())
    return found


def _taken(written: Placement, read: Placement, rows: int) -> Placement:
    """How a value that is made of no input comes to its reader, who takes a part of what is whole."""
    return written if written.whole and read.kind == "S" and read.pieces % rows else read


def axes_of(sharding: Sharding) -> tuple[str, ...]:
    """The axes along which ranks share layers, in the order of the letters of forms: the first one cuts first."""
    return tuple(name for name, _ in sharding.mesh)


def _needed(part: Part, axis: int) -> Placement:
    """How a part must lie on one axis in front of a reader: as it was written, where nothing changes, and where the
    reader makes a part of a sum of what is whole."""
    written, read = part.written[axis], part.read[axis]
    writes, reads, grad_writes, grad_reads = _letters_on(part, axis)
    changes = writes != reads or (part.differentiable and grad_writes != grad_reads)
    return written if (read.kind == "P" and written.whole) or not changes else read


def _check_order(part: Part, axes: Sequence[str]) -> None:
    """Errors: PlanError for a part of which an axis changes what a later axis cuts further."""
    for k, (p, own) in enumerate(zip(part.written, part.read, strict=True)):
        for first in range(k):
            before, after = part.written[first], part.read[first]
            cuts = {q.dim for q in (before, after) if q.kind == "S"}
            if before != after and p == own and p.kind == "S" and p.dim in cuts:
                raise PlanError(
                    f"{part.name}: lies as {p} on {axes[k]}, and changes from {before} to {after} on {axes[first]}, "
                    f"which cuts dimension {p.dim} first; possible are annotations by which only one of the two cuts it"
                )


def _sink(
    levels: list[tuple[int, Divided]],
    level: dict[str, int],
    reads_of: Callable[[Divided], list[Part]],
    free: Set[str],
) -> None:
    """Make what depends on no input, such as a mask, in the node that reads it: only later slices have a mask, and
    nodes hand on the same values in all slices."""
    needed: dict[str, int] = {}  # of these values, the last level that is early enough for all who read it
    for k, (own, one) in reversed(list(enumerate(levels))):
        wanted = [needed[name] for name in one.operator.outputs if name in free and name in needed]
        if wanted:
            own = min(wanted)
            levels[k] = own, one
            level.update(dict.fromkeys(one.operator.outputs, own))
        for part in reads_of(one):
            if part.name in free:
                at = own - _changes(part)
                needed[part.name] = min(needed.get(part.name, at), at)


def _check_carry(
    read: str, name: str, level: int, levels: Sequence[tuple[int, Divided]], parts: Sequence[Part]
) -> None:
    """Errors: PlanError for a tensor of a carry that another node reads than the one that makes it for the next slice,
    or that is read in another form."""
    others = [one.operator for own, one in levels if read in one.operator.inputs and own != level]
    changed = [part for part in parts if _changes(part)]
    if others or changed:
        forms = [f"read as {_text(part.read)} and written as {_text(part.written)}" for part in changed]
        words = f"read by {others[0].name}" if others else forms[0]
        raise PlanError(
            f"{read}: is carried from slice to slice, but {words}, and a collective would come between it and {name}, "
            "which is carried on; possible is a schedule of rows such as 1f1b, or tp=1 and context_parallel=1"
        )


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
        smooth_in = [own for part, own in zip(piece.takes, takes, strict=True) if part.floating or _counts(own)]
        smooth_out = [own for part, own in zip(piece.gives, gives, strict=True) if part.floating or _counts(own)]
        found.append(
            Forms(
                reads=text_of(tuple(letters[1] for letters in takes)),
                writes=text_of(tuple(letters[0] for letters in gives)),
                grad_reads=text_of(tuple(letters[3] for letters in smooth_out)),
                grad_writes=text_of(tuple(letters[2] for letters in smooth_in)),
            )
        )
    return found


def _counts(border: tuple[str, str, str, str]) -> bool:
    """Whether counts of unequal parts are whole at a border, on one side of it at least."""
    return any(COUNTS in letter for letter in border[:2])


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
        return rebuilt(type(small), [by_rows(a, b, rows, what) for a, b in zip(small, large, strict=True)])
    if isinstance(small, Mapping) and isinstance(large, Mapping) and list(small) == list(large):
        parts = [by_rows(a, b, rows, what) for a, b in zip(small.values(), large.values(), strict=True)]
        return rebuilt(type(small), parts, list(small), small)
    if isinstance(small, bool) or not isinstance(small, int) or small == large:
        if isinstance(small, float) and small != large and not (math.isnan(small) and math.isnan(large)):
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
        return rebuilt(type(given), [with_rows(one, rows) for one in given])
    if isinstance(given, Mapping):
        return rebuilt(type(given), [with_rows(one, rows) for one in given.values()], list(given), given)
    return given


def _on(device: torch.device, given: Any) -> Any:
    """An argument for a node on this device: a layer is captured on the host, and names it where it makes a tensor."""
    return device if isinstance(given, torch.device) else given


# Nodes ----------------------------------------------------------------------------------------------------------------

Templates = tuple[dict[str, tuple[Any, ...]], dict[str, Any]]


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer of a layer: its value, and of a parameter its name in the whole model."""

    value: Tensor
    name: str = ""


Line = tuple[Divided, Operator, tuple[tuple[int, ...], ...]]  # an operator as it runs, and its outputs' local shapes
Find = Callable[[str, Lies], Tensor]  # a tensor by its name, and how it is read


@dataclass(frozen=True)
class Recipe:
    """What a node computes, without parameters; equal for all ranks but for `places`.

    shapes, options   of all tensors and operators of the layer; `Size` stands for rows
    places            which rank this is along each axis, in the order of the letters of forms
    captured          the rows with which the layer was captured
    """

    piece: Piece
    shapes: Mapping[str, tuple[Any, ...]]
    options: Mapping[str, Any]
    places: Mapping[str, local.Place]
    captured: int

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.places)

    def __deepcopy__(self, memo: object) -> Recipe:
        return self  # nothing of it changes, and torch's operators cannot be copied

    @cached_property
    def written(self) -> dict[str, Lies]:
        """How each value lies on the ranks that the node takes or makes."""
        found = {part.name: part.written for part in (*self.piece.takes, *self.piece.before)}
        for one in self.piece.operators:
            found |= {n: _lies(form, self.axes) for n, form in zip(one.operator.outputs, one.outs, strict=True)}
        return found

    def prepared(self, rows: int, device: torch.device) -> list[Line]:
        """The operators for a micro-batch of so many rows on a device, with the local shapes of their outputs."""
        if (rows, device) not in self._known:
            found = []
            for one in self.piece.operators:
                operator = one.operator
                given = self.options[operator.name]
                options = {name: _on(device, with_rows(value, rows)) for name, value in given.items()}
                outputs = tuple(
                    self._local_shape(name, _lies(form, self.axes), rows)
                    for name, form in zip(operator.outputs, one.outs, strict=True)
                )
                found.append((one, replace(operator, options=options), outputs))
            self._known[rows, device] = found
        return self._known[rows, device]

    def _local_shape(self, name: str, lies: Lies, rows: int) -> tuple[int, ...]:
        """What this rank has of a tensor for a micro-batch of so many rows."""
        shape: tuple[int, ...] = with_rows(self.shapes[name], rows)
        for axis, placement in self._cutting(lies, rows):
            shape = cut(shape, placement, self.places[axis].ranks, axis, name)
        return shape

    def _cutting(self, lies: Lies, rows: int) -> list[tuple[str, Placement]]:
        """How a tensor lies on each axis, for a micro-batch of so many rows."""
        ranks = [place.ranks for place in self.places.values()]
        left = [[_rows_left(lies, k, ranks, of) for of in (self.captured, rows)] for k in range(len(lies))]
        return [(axis, _at_rows(p, *left[k])) for k, (axis, p) in enumerate(zip(self.axes, lies, strict=True))]

    def own(self, whole: Tensor, lies: Lies, rows: int = 0) -> Tensor:
        """This rank's part of a tensor that is whole. `rows`: of the micro-batch, if it has some."""
        for axis, p in self._cutting(lies, rows):
            if p.kind == "S":
                place = self.places[axis]
                whole = Cut(p.dim, place.index, place.ranks, p.pieces).of(whole)
        return whole

    @cached_property
    def _known(self) -> dict[tuple[int, torch.device], list[Line]]:
        return {}

    def check(self, values: Sequence[Tensor], rows: int, title: str) -> None:
        """Errors: PlanError for values of other sizes than those that the layer was captured with."""
        if rows not in self._checked:
            self._checked[rows] = [self._local_shape(part.name, part.read, rows) for part in self.piece.takes]
        for part, value, shape in zip(self.piece.takes, values, self._checked[rows], strict=True):
            known = int(_unequal(part.read))  # the first dimension of an unequal part has any size
            if value.shape[known:] != shape[known:]:
                raise PlanError(
                    f"node {title}: {part.name} has the shape {tuple(value.shape)}, and {shape} in the first batch; "
                    "ranks that share layers take tensors of one shape in all steps, such as sequences of one length"
                )

    @cached_property
    def _checked(self) -> dict[int, list[tuple[int, ...]]]:
        return {}

    def rows(self, takes: Iterable[tuple[str, Lies]], values: Sequence[Tensor]) -> int:
        """How many rows the micro-batch has: from the first dimension of these values that depends on it."""
        for (name, read), value in zip(takes, values, strict=True):
            if _unequal(read):
                continue
            for dim, size in enumerate(self.shapes[name]):
                if isinstance(size, Size):
                    both = zip(self.places.values(), read, strict=True)
                    shards = math.prod(place.ranks for place, p in both if p.kind == "S" and p.dim == dim)
                    return value.shape[dim] * shards // size.each
        return 0

    @cached_property
    def unread(self) -> list[tuple[str, ...]]:
        """For each operator, what no later operator of the node reads, and no other node."""
        every = [one.operator for one in self.piece.operators]
        last = {name: k for k, op in enumerate(every) for name in (*op.inputs, *op.outputs)}
        mine = {name for op in every for name in op.outputs} - {part.name for part in self.piece.gives}
        mine -= {part.name for part in self.piece.after}
        return [tuple(name for name in mine if last[name] == k) for k in range(len(every))]

    def run(
        self,
        lines: range,
        rows: int,
        device: torch.device,
        find: Find,
        dropouts: Mapping[str, nn.Module],
        built: dict[str, Tensor],
    ) -> None:
        """Run these operators on what `find` gives, and add what they make to `built`, as long as it is read.

        device     where the node computes
        dropouts   the modules of some operators, by their names
        """
        every = self.prepared(rows, device)
        for k in lines:
            one, operator, outputs = every[k]
            inputs = [find(n, _lies(form, self.axes)) for n, form in zip(operator.inputs, one.ins, strict=True)]
            if operator.name in dropouts:
                module = dropouts[operator.name]
                lies = _lies(one.outs[0], self.axes)
                built[operator.outputs[0]] = self._dropped(module, operator, lies, inputs[0], rows)
            else:
                running = local.run(operator, one.choices, self.places, inputs, outputs)
                built.update(zip(operator.outputs, _finished(running, operator), strict=True))
            del inputs
            self.forget(k, built)

    def forget(self, line: int, built: dict[str, Tensor]) -> None:
        """Let go what nobody reads after this operator."""
        for name in self.unread[line]:
            built.pop(name, None)

    def _dropped(self, module: nn.Module, operator: Operator, written: Lies, given: Tensor, rows: int) -> Tensor:
        """Dropout of this rank's part, by the mask of the whole tensor."""
        if not isinstance(module, RowDropout):  # the one of torch, where nothing but time is measured
            built: Tensor = module(given)
            return built
        whole = with_rows(self.shapes[operator.outputs[0]], rows)
        return module.of_part(given, whole, lambda kept: self.own(kept, written, rows))

    def as_read(self, name: str, read: Lies, found: Tensor, stored: bool = False) -> Tensor:
        """A tensor that is whole on some axis as it is read: as it is, or as a part of a sum."""
        for k, (place, p) in enumerate(zip(self.places.values(), read, strict=True)):
            if p.kind == "P" and (stored or self.written[name][k].whole):
                found = _AsPart.apply(found, place.index)
        if name in self.piece.free:
            both = zip(self.written[name], read, strict=True)
            found = self.own(found, tuple(p if written.whole else I for written, p in both))
        return found


class _Core(Recomputed):
    """Operators of a node, lines `first` to `end`, that keep only what they read with checkpoint=selective.

    takes    what they read of others, as it is read; `gives`: what others read of them
    device   where the node computes, which it says before they run: they may read nothing
    """

    device = torch.device("cpu")

    def __init__(self, recipe: Recipe, lines: range, dropouts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.recipe, self.lines = recipe, lines
        every = recipe.piece.operators
        own = [every[k] for k in lines]
        built = {name for one in own for name in one.operator.outputs}
        later = [name for one in every[lines.stop :] for name in one.operator.inputs]
        later += [part.name for part in (*recipe.piece.gives, *recipe.piece.after)]
        reads = [pair for one in own for pair in zip(one.operator.inputs, one.ins, strict=True)]
        lies = [(name, _lies(form, recipe.axes)) for name, form in reads if name not in built]
        self.takes = tuple({(name, _text(read)): (name, read) for name, read in lies}.values())
        self.gives = tuple(name for name in dict.fromkeys(later) if name in built)
        self.dropouts: dict[str, str] = {}
        for one in own:
            if one.operator.name in dropouts:
                self.dropouts[one.operator.name] = f"dropout_{len(self.dropouts)}"
                self.add_module(self.dropouts[one.operator.name], dropouts[one.operator.name])

    def compute(self, *inputs: Tensor) -> Any:
        taken = {(name, _text(read)): value for (name, read), value in zip(self.takes, inputs, strict=True)}
        built: dict[str, Tensor] = {}

        def find(name: str, read: Lies) -> Tensor:
            return self.recipe.as_read(name, read, built[name]) if name in built else taken[name, _text(read)]

        rows = self.recipe.rows(self.takes, inputs)
        dropouts = {name: getattr(self, own) for name, own in self.dropouts.items()}
        self.recipe.run(self.lines, rows, self.device, find, dropouts, built)
        found = tuple(built[name] for name in self.gives)
        return found[0] if len(found) == 1 else found


class CapturedNode(Node):
    """A node of captured operators. Its input is a tensor, or a tuple of them; so is what it gives."""

    def __init__(self, recipe: Recipe, forms: Forms, title: str) -> None:
        super().__init__(forms, title)
        self.recipe, self.carried = recipe, recipe.piece.carried
        self.own: dict[str, str] = {}  # names of parameters and buffers in the graph -> those in this module
        self.dropouts: dict[str, str] = {}  # names of operators -> those of their modules here
        self.cores: list[_Core] = []  # which are modules of this one, too

    def forward(self, given: Any) -> Any:
        return self.on_slice(given, ())[0]

    def on_slice(self, given: Any, carry: Any) -> tuple[Any, Any]:
        # What has no gradient in the whole layer gets none here either, although it comes from another node.
        values = [
            value if part.differentiable else value.detach()
            for part, value in zip(self.recipe.piece.takes, tensors(given), strict=True)
        ]
        there = {part.name: value for part, value in zip(self.recipe.piece.takes, values, strict=True)}
        there |= {part.name: value for part, value in zip(self.recipe.piece.before, tensors(carry), strict=True)}
        keyed = {(part.name, _text(part.read)): v for part, v in zip(self.recipe.piece.takes, values, strict=True)}
        built: dict[str, Tensor] = {}
        rows = self.recipe.rows([(part.name, part.read) for part in self.recipe.piece.takes], values)
        self.recipe.check(values, rows, self.title)

        def find(name: str, read: Lies) -> Tensor:
            return self._input(name, read, built, keyed, there)

        done, end, device = 0, len(self.recipe.piece.operators), values[0].device
        dropouts = {name: getattr(self, own) for name, own in self.dropouts.items()}
        for core in self.cores:
            self.recipe.run(range(done, core.lines.start), rows, device, find, dropouts, built)
            core.device = device
            built.update(zip(core.gives, tensors(core(*(find(*taken) for taken in core.takes))), strict=True))
            for line in core.lines:
                self.recipe.forget(line, built)
            done = core.lines.stop
        self.recipe.run(range(done, end), rows, device, find, dropouts, built)
        found, after = (
            tuple(
                built[part.name]
                if part.name in built
                else keyed.get((part.name, _text(part.read)), there.get(part.name))
                for part in parts
            )
            for parts in (self.recipe.piece.gives, self.recipe.piece.after)
        )
        return found[0] if len(found) == 1 else found, after or None

    def _input(
        self,
        name: str,
        read: Lies,
        built: Mapping[str, Tensor],
        keyed: Mapping[tuple[str, str], Tensor],
        there: Mapping[str, Tensor],
    ) -> Tensor:
        if name in self.own:
            found: Tensor = getattr(self, self.own[name])
            held = self.held.get(self.own[name])
            cut_on = held.form.split("/") if held is not None else ()
            lies = tuple(I if k < len(cut_on) and cut_on[k] == "S" else p for k, p in enumerate(read))
            if any(p.kind == "S" for p in lies):  # it is whole here on this axis, and read as a shard
                found = self.recipe.own(found, lies)
        elif name in built:
            found = built[name]
        else:
            found = keyed[name, _text(read)] if (name, _text(read)) in keyed else there[name]
        return self.recipe.as_read(name, read, found, name in self.own)


class WholeNode(CapturedNode):
    """A node that calls a layer whole (`whole.py`). Its parameters are the layer's own, with their hooks.

    drawn_as   the layer's number in the model, by which its draws are seeded
    """

    def __init__(
        self, recipe: Recipe, forms: Forms, title: str, layer: nn.Module, stored: Mapping[str, Stored],
        held: Mapping[str, Held], known: dict[str, nn.Parameter], number: int,
    ) -> None:  # fmt: skip
        super().__init__(recipe, forms, title)
        self.drawn_as = number
        (self.operator,) = [one.operator for one in recipe.piece.operators]
        others: dict[int, nn.Parameter] = {}
        for path, module in layer.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                own = f"{path}.{name}" if path else name
                one = held.get(own, Held(stored[own].name))
                if one.name not in known:
                    known[one.name] = parameter
                    parameter.minipar_form, parameter.minipar_held = one.form, one
                module._parameters[name] = known[one.name]
                self.held[f"layer.{own}"] = one
                if known[one.name] is not parameter:
                    others[id(parameter)] = known[one.name]
        exchange(layer, others)
        self.layer = layer

    def on_slice(self, given: Any, carry: Any) -> tuple[Any, Any]:
        takes = self.recipe.piece.takes
        values = [v if part.differentiable else v.detach() for part, v in zip(takes, tensors(given), strict=True)]
        there = {part.name: value for part, value in zip(takes, values, strict=True)}
        rows = self.recipe.rows([(part.name, part.read) for part in takes], values)
        self.recipe.check(values, rows, self.title)
        form = with_rows(self.recipe.options[self.operator.name]["given"], rows)
        found = tensors(self.layer(filled(form, [there[name] for name in self.operator.inputs if name in there])))
        if len(found) != len(self.operator.outputs):
            raise PlanError(
                f"node {self.title}: gives {len(found)} tensors, and gave {len(self.operator.outputs)} in the first "
                "batch; ranks that share layers take what has one structure in all steps"
            )
        there |= dict(zip(self.operator.outputs, found, strict=True))
        gives = tuple(there[part.name] for part in self.recipe.piece.gives)
        return gives[0] if len(gives) == 1 else gives, None


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
        axis, _ = next(running)
    except StopIteration as end:
        found: tuple[Tensor, ...] = end.value
        return found
    raise PlanError(f"{operator.name} ({operator.op}): needs a sum over {axis} inside; nodes cannot do that yet")


@dataclass(frozen=True)
class Nodes:
    """The nodes of equal layers on one rank: of each node what it computes, and its forms."""

    recipes: tuple[Recipe, ...]
    forms: tuple[Forms, ...]


def planned(sharding: Sharding, templates: Templates, places: Mapping[str, local.Place], rows: int) -> Nodes:
    """The nodes of all layers that have these forms.

    templates   shapes of all tensors and arguments of all operators, in which `Size` stands for rows
    rows        of the capture
    """
    pieces = pieces_of(sharding, rows)
    recipes = tuple(Recipe(piece, *templates, places, rows) for piece in pieces)
    return Nodes(recipes, tuple(forms_of(pieces, sharding.graph, sharding)))


def nodes_of(
    layer: Layer,
    sharding: Sharding,
    shared: Nodes,
    stored: Mapping[str, Stored],
    title: str,
    places: Mapping[str, local.Place],
    known: dict[str, nn.Parameter],
    dropouts: Mapping[str, nn.Dropout],
    cores: Mapping[str, str] = MappingProxyType({}),
    module: nn.Module | None = None,
    number: int = 0,
) -> list[Node]:
    """The nodes of one layer on one rank.

    shared      what is the same for equal layers
    stored      the layer's parameters and buffers by their names in the graph
    known       parameters that other layers hold already, by name
    dropouts    for each operator that is one, by its name in the graph
    cores       for each operator of a part that checkpoint=selective runs again, the name of that part
    module      the layer itself, for one that is computed whole, and its number in the model
    """
    pieces = [recipe.piece for recipe in shared.recipes]
    held = _held(sharding, stored, places, known)
    nodes: list[Node] = []
    for k, (recipe, own) in enumerate(zip(shared.recipes, shared.forms, strict=True)):
        if any(one.operator.op == LAYER for one in recipe.piece.operators):
            assert module is not None
            nodes.append(WholeNode(recipe, own, f"{title}.{k}", module, stored, held, known, number))
            continue
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
            name, read = one.operator.inputs[slot.index], one.ins[slot.index]
            if name in buffers:
                buffers.update(dict.fromkeys(one.operator.outputs, buffers[name]))
            if name in buffers and name in {part.name for part in piece.takes}:
                raise PlanError(
                    f"{layer.own(one.operator.name)} ({one.operator.op}): changes {layer.own(buffers[name])}, but a "
                    "collective comes between it and the operator that changed it before; possible is one change, "
                    "such as buffer.copy_(...)"
                )
            if name in buffers and not all(p.whole for p in read.placements):
                raise PlanError(
                    f"{layer.own(one.operator.name)} ({one.operator.op}): changes {layer.own(buffers[name])}, of which "
                    f"each rank would have a part ({read}); possible is the annotation R of this operator"
                )


def _read(sharding: Sharding) -> set[str]:
    return {name for one in sharding.operators for name in one.operator.inputs}


def _held(
    sharding: Sharding,
    stored: Mapping[str, Stored],
    places: Mapping[str, local.Place],
    known: Mapping[str, nn.Parameter],
) -> dict[str, Held]:
    """Which part of each parameter this rank has. Where operators disagree, it has all, and each takes its own part."""
    reads: dict[str, list[Lies]] = {}
    for one in sharding.operators:
        for name, form in zip(one.operator.inputs, one.ins, strict=True):
            if name in stored and isinstance(stored[name].value, nn.Parameter):
                reads.setdefault(name, []).append(_lies(form, tuple(places)))
    found: dict[str, Held] = {}
    for name, every in reads.items():
        whole, cuts, letters = stored[name].name, [], []
        for place, placements in zip(places.values(), zip(*every, strict=True), strict=True):
            part = _held_on(whole, place, placements)
            cuts += [part] if isinstance(part, Cut) else []
            letters.append("S" if isinstance(part, Cut) else part)
        if len(cuts) > 1:
            raise PlanError(
                f"{whole}: would be cut along {' and '.join(places)}; possible are annotations by which one of them "
                "has all of it"
            )
        found[name] = Held(whole, cuts[0] if cuts else None, letter_of(letters, ""))
        before = getattr(known.get(whole), "minipar_held", None)
        if before is not None and before != found[name]:
            forms = f"{before.form or 'whole'} and as {found[name].form or 'whole'}"
            error = PlanError(f"{whole}: layers that share it read it as {forms}; possible is one form for all")
            error.shared = whole
            raise error
    return found


def _held_on(whole: str, place: local.Place, placements: Sequence[Placement]) -> Cut | str:
    """Along one axis: the rank's part of a parameter, or "P" if it has all of it, and makes a part of the gradient."""
    kinds, first = set(map(str, placements)), placements[0]
    if len(kinds) == 1 and first.kind == "S":
        return Cut(first.dim, place.index, place.ranks, first.pieces)
    alike, differing = kinds & {"I", "P"}, kinds - {"I", "P"}
    if alike and differing:
        raise PlanError(
            f"{whole}: is read as {' and as '.join(sorted(kinds))}; one gradient would be whole, the other a part of a "
            "sum; possible is one of the two"
        )
    return "P" if differing else ""


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
