"""The shape of a model: what a plan must know about the model, without any tensor.

`plan.compile(layers=12)` makes a uniform shape; `models.shape("gpt-tiny")` computes one from a preset, and
`minipar.models.shape_of(model)` computes one from real layers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

from minipar.errors import PlanError
from minipar.program import Group
from minipar.program.edges import Edges
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
    whole    the name of the first layer that cannot take a sequence slice by slice; "": all layers can
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

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise PlanError(f"layers={self.layers}: a model has at least 1 layer")


def uniform(layers: int, bytes_per_layer: int = 4) -> Shape:
    """`layers` equal layers, each with one trainable parameter tensor."""
    if isinstance(layers, bool) or not hasattr(layers, "__index__") or operator.index(layers) < 1:
        raise PlanError(f"layers={layers!r}: must be a whole number of at least 1")
    layers = operator.index(layers)
    if layers > 1_000_000:
        raise PlanError(f"layers={layers}: too many; possible are up to 1000000")
    groups = tuple(Group((layer,), (bytes_per_layer,)) for layer in range(layers))
    return Shape(layers, groups, several(layers, "layer"), carries=tuple(range(layers)))


def frozen(shape: Shape) -> Shape:
    """The same model without trainable parameters: its programs only run forward, and save nothing."""
    groups = tuple(Group(group.layers, (), sum(group.tensors) + group.frozen) for group in shape.groups)
    return replace(shape, groups=groups, dims=())
