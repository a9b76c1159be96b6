"""A model whose layers are cut into nodes: one rank's shards of it, as the engine runs them.

    layer 0                     layer 1                         the model's own layers
    0.0 | 0.1 | 0.2             1.0 | 1.1 | 1.2                 nodes: cut where forms change, forward or backward
        R   P   R                   R   P   R                   what goes from node to node (`program/forms.py`)

To the engine a node is a layer. It takes what the node before it gave, in the form that its `Forms` say, and computes
on this rank's shards of parameters. Autograd makes its backward; collectives between nodes are instructions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minipar.models.sliced import Sliced
from minipar.program.forms import Forms


@dataclass(frozen=True)
class Cut:
    """Which part of a parameter a rank has: part `index` of `count` equal parts of a dimension.

    pieces   the dimension is made of so many pieces, such as queries, keys and values: the part is of each of them
    """

    dim: int
    index: int
    count: int
    pieces: int = 1

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor, a copy."""
        parts = [piece.chunk(self.count, self.dim)[self.index] for piece in whole.chunk(self.pieces, self.dim)]
        return torch.cat(parts, self.dim)

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return (*local[: self.dim], local[self.dim] * self.count, *local[self.dim + 1 :])

    def local_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of one rank's part."""
        return (*whole[: self.dim], whole[self.dim] // self.count, *whole[self.dim + 1 :])

    def runs(self, whole: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Where elements `begin` to `end` of this rank's part are in the whole tensor, in memory order: for each run of
        neighbours its place in the whole, its place in the part, and its length."""
        inner = math.prod(whole[self.dim + 1 :])
        piece = whole[self.dim] // self.pieces * inner  # elements of a piece, for one index of the dimensions before
        mine = piece // self.count
        at = begin
        while at < end:
            number, offset = divmod(at, mine)
            length = min(end - at, mine - offset)
            yield number * piece + self.index * mine + offset, at, length
            at += length

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of the parts of all ranks, in their order."""
        cut = [part.chunk(self.pieces, self.dim) for part in parts]
        return torch.cat([own[piece] for piece in range(self.pieces) for own in cut], self.dim)


_ALL_WHOLE = Forms()


@dataclass(frozen=True)
class Held:
    """A parameter of a node: its name in the whole model, and which part of it this rank has (None: all of it).

    letters   the form of its parameter group (`program.Group`), such as "P" where the rank has all of it, and its
              backward makes a part of the gradient; "": nothing but the cut
    """

    name: str
    cut: Cut | None = None
    letters: str = ""

    @property
    def form(self) -> str:
        """The form of its parameter group (`program.Group`)."""
        return self.letters or ("S" if self.cut is not None else "")


class Node(nn.Module):
    """One node: what it computes, in which forms, and what its parameters are parts of.

    carried   of a slice of sequences, which tensors of the layer's carry the node takes and keeps

    Subclasses define `forward(value)`, and register their parameters with `hold`.
    """

    def __init__(self, forms: Forms = _ALL_WHOLE, title: str = "") -> None:
        super().__init__()
        self.forms, self.title = forms, title
        self.held: dict[str, Held] = {}
        self.carried: tuple[int, ...] = ()
        self.state: dict[str, Tensor] = {}  # buffers of the layer that belong to the model's state, by their names

    def hold(self, own: str, whole: nn.Parameter, held: Held, known: dict[str, nn.Parameter]) -> nn.Parameter:
        """Register this rank's part of a parameter as `own`. `known`: parts by name, which tied nodes share."""
        if held.name not in known:
            part = whole.detach().clone() if held.cut is None else held.cut.of(whole.detach())
            known[held.name] = nn.Parameter(part, requires_grad=whole.requires_grad)
            known[held.name].__class__ = type(whole)  # (an optimizer may group by class and attributes)
            vars(known[held.name]).update(vars(whole))
            known[held.name].minipar_form = held.form  # type: ignore[attr-defined]  # (parameter_groups asks for it)
            known[held.name].minipar_held = held  # type: ignore[attr-defined]
        self.register_parameter(own, known[held.name])
        self.held[own] = held
        return known[held.name]

    def on_slice(self, given: Any, carry: Any) -> tuple[Any, Any]:
        """The output for a slice of sequences, and the carry for the next slice. `carry`: that of the slice before."""
        return self(given), None


class SlicedNode(Node, Sliced):
    """A node that takes sequences slice by slice. Slices differ in their lengths and in what came before them, so that
    for each there is a node of its own; all of them have the same parameters.

    each     the nodes, in the order of the slices
    starts   the first token of each slice
    carries  whether the node keeps something for later slices
    """

    def __init__(self, each: Sequence[Node], starts: Sequence[int], carries: bool) -> None:
        first = each[0]
        super().__init__(first.forms, first.title)
        self.each, self.starts, self.carries = nn.ModuleList(each), tuple(starts), carries
        self.held = {f"each.{k}.{own}": held for k, node in enumerate(each) for own, held in node.held.items()}
        self.state = first.state

    def forward_slice(self, x: Any, start: int, carry: Any) -> tuple[Any, Any]:
        node = self.each[self.starts.index(start)]
        assert isinstance(node, Node)
        return node.on_slice(x, carry)


class ShardedModel(nn.Sequential):
    """One rank's nodes of a model, in order. Parameters have the names that they have in the whole model.

    forms   of each node
    nodes   of each of the model's own layers, into how many nodes it is cut
    cuts    which part of each parameter, by its name, this rank has; of those that it has whole nothing
    counts  how many ranks share them along each axis
    inputs  the form in which they have rows and targets (`Program.inputs`)
    whole   the layers that every rank computes whole, and why
    names   of the parameters, in the whole model's order, which is this one's, too
    """

    whole: Mapping[str, str] = {}
    names: Sequence[str] = ()

    def __init__(self, layers: Sequence[Sequence[Node]], counts: Sequence[int], inputs: str = "") -> None:
        super().__init__(*(node for nodes in layers for node in nodes))
        self.nodes, self.counts, self.inputs = tuple(map(len, layers)), tuple(counts), inputs
        found: list[Node] = [node for nodes in layers for node in nodes]
        self.forms = tuple(node.forms for node in found)
        self.titles = tuple(
            node.title or f"{layer}.{k}" for layer, nodes in enumerate(layers) for k, node in enumerate(nodes)
        )
        self.cuts = {held.name: held.cut for node in found for held in node.held.values() if held.cut is not None}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`, with the names and the order of the whole model."""
        found = [
            (node.held[own].name, p) for node in self if isinstance(node, Node) for own, p in node.named_parameters()
        ]
        places = {name: k for k, name in enumerate(self.names)}
        found.sort(key=lambda one: places.get(one[0], 0))
        seen: set[int] = set()
        for name, parameter in found:
            if id(parameter) not in seen or not remove_duplicate:
                seen.add(id(parameter))
                yield (f"{prefix}." if prefix else "") + name, parameter
