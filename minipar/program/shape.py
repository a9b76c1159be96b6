"""The shape of a model: what a plan must know about the model, without any tensor.

`plan.compile(layers=12)` makes a uniform shape; `models.shape("gpt-tiny")` computes one from a preset, and
`minipar.models.shape_of(model)` computes one from real layers.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate

from minipar.errors import PlanError
from minipar.program import Group
from minipar.program.edges import Edges
from minipar.program.forms import PARTIAL, WHOLE, Forms, letter_of, on_axes, parts_of
from minipar.wording import several


@dataclass(frozen=True)
class Shape:
    """Layers and parameter groups of a model.

    groups   first one `Group` per layer (its own, untied parameters), then one per tied set
    name     the model's name in messages and pictures
    names    the names of the layers, where they are known
    itemsize bytes of one number
    dims     for each group the shapes of its trainable tensors, where they are known
    carries  the layers that keep something of a sequence for its later slices, such as keys and values
    whole    the first layer that cannot take a sequence slice by slice; "": all of them can
    forms    with tensor parallelism, of each node the forms in which it takes and gives values: `layers` then counts
             nodes. The sizes in `groups` and `dims` are those of one rank's shards
    inputs   with tensor parallelism, the form in which sharing ranks have rows and targets (`Program.inputs`)
    nodes    of each of the model's own layers, into how many nodes it is cut; (): into one
    edges    (from, to) between layers, as `minipar.program.edges.numbered` gives them; (): a chain
    """

    layers: int
    groups: tuple[Group, ...]
    name: str = ""
    names: tuple[str, ...] = field(default=(), compare=False)
    itemsize: int = field(default=4, compare=False)
    dims: tuple[tuple[tuple[int, ...], ...], ...] = field(default=(), compare=False)
    carries: tuple[int, ...] = field(default=(), compare=False)
    whole: str = field(default="", compare=False)
    edges: Edges = ()
    forms: tuple[Forms, ...] = ()
    nodes: tuple[int, ...] = ()
    inputs: str = ""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise PlanError(f"layers={self.layers}: a model has at least 1 layer")

    @property
    def own_layers(self) -> int:
        """How many layers the model itself has."""
        return len(self.nodes) or self.layers

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first node of each of the model's own layers, and the number of all nodes."""
        return tuple(accumulate(self.nodes or (1,) * self.layers, initial=0))

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the model's own layers, where they are known: that of a node is "layer.node"."""
        if not self.nodes or not self.names:
            return self.names
        return tuple(self.names[first].rpartition(".")[0] for first in self.firsts[:-1])

    def own_layer(self, node: int) -> int:
        """The model's own layer that a node is a piece of."""
        return bisect_right(self.firsts, node) - 1 if self.nodes else node


def uniform(layers: int, bytes_per_layer: int = 4) -> Shape:
    """`layers` equal layers, each with one trainable parameter tensor."""
    if isinstance(layers, bool) or not hasattr(layers, "__index__") or operator.index(layers) < 1:
        raise PlanError(f"layers={layers!r}: must be a whole number of at least 1")
    layers = operator.index(layers)
    if layers > 1_000_000:
        raise PlanError(f"layers={layers}: too many; possible are up to 1000000")
    groups = tuple(Group((layer,), (bytes_per_layer,)) for layer in range(layers))
    return Shape(layers, groups, several(layers, "layer"), carries=tuple(range(layers)))


def divided(shape: Shape, ranks: int, sequence: bool = False) -> Shape:
    """A uniform shape whose layers are shared by `ranks` ranks each, as a transformer's block is by Megatron's.

    A layer becomes five nodes: norm, attention, norm, perceptron, sum. The second and the fourth are sharded: they read
    what is whole, and write partial sums. What a layer carries from slice to slice is its attention's. With `sequence`
    each rank has a part of the tokens in the other nodes, and a last node takes the output whole.
    """
    token = "S1" if sequence else ""
    sharded = Forms(writes=PARTIAL, grad_writes=PARTIAL)
    forms = [sharded if k % 5 in (1, 3) else Forms(token, token, token, token) for k in range(5 * shape.layers)]
    titles = [f"{k // 5}.{('norm', 'attention', 'norm', 'perceptron', 'sum')[k % 5]}" for k in range(5 * shape.layers)]
    kinds = ["S" if k % 5 in (1, 3) else "P" if sequence else "" for k in range(5 * shape.layers)]
    sizes = [
        tuple(-(-size // (2 * ranks)) for size in shape.groups[k // 5].tensors) if kind == "S" else (shape.itemsize,)
        for k, kind in enumerate(kinds)
    ]
    if sequence:
        forms[0] = forms[0]._replace(reads="C1")  # rows of the batch are whole, and so is the gradient of the output
        forms[-1] = forms[-1]._replace(grad_reads="C1")
        forms, titles, sizes, kinds = [*forms, Forms()], [*titles, "output"], [*sizes, ()], [*kinds, ""]
    groups = tuple(Group((k,), held, form=kinds[k]) for k, held in enumerate(sizes))
    return replace(
        shape, layers=len(forms), groups=groups, name=f"{shape.name}, each on {several(ranks, 'rank')}",
        names=tuple(titles), dims=(), carries=tuple(5 * layer + 1 for layer in shape.carries), forms=tuple(forms),
        nodes=(*(5,) * (shape.layers - 1), 5 + sequence),
    )  # fmt: skip


def in_parts(shape: Shape, inputs: str, axes: int) -> Shape:
    """A uniform shape of which every rank computes all layers, each on a part of the rows or tokens: gradients are sums
    over the ranks. `inputs` says along which of the `axes`; along the last one layers may be divided (`divided`)."""
    parts = [PARTIAL if part != WHOLE else "" for part in parts_of(inputs, axes)]
    before = [""] * (axes - 1)
    groups = tuple(group._replace(form=letter_of([*parts[:-1], group.form or parts[-1]], "")) for group in shape.groups)
    nodes = shape.nodes or (1,) * shape.layers
    plain = shape.forms or (Forms(),) * shape.layers
    forms = tuple(Forms(*(on_axes([*before, form]) for form in own)) for own in plain)
    return replace(shape, groups=groups, forms=forms, nodes=nodes, inputs=inputs, dims=())


def frozen(shape: Shape) -> Shape:
    """The same model without trainable parameters: its programs only run forward, and save nothing."""
    groups = tuple(group._replace(tensors=(), frozen=sum(group.tensors) + group.frozen) for group in shape.groups)
    return replace(shape, groups=groups, dims=())
