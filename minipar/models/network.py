"""A model whose layers branch: an `nn.Sequential` that has edges between its layers and need not be a chain.

    net = Network([stem, left, right, join], [(0, 1), (0, 2), (1, 3), (2, 3)])       join is given (left's, right's)

Plain torch runs it layer by layer (`forward` below). Every plan must give the same result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from minipar.models.tensors import map_tensors
from minipar.program import edges as graphs


class Network(nn.Sequential):
    """Layers and the edges (from, to) between their numbers. A layer comes after all layers that it reads.

    Layer 0 is given the rows, and the last layer's output goes into the loss. A layer with one edge to it is given one
    output. A layer with several edges is given a tuple of outputs, in the order of the layers that made them. All
    readers of an output get it unchanged, even if one of them changes its input in place.

    Errors: PlanError for edges that make no such model (see `minipar.program.edges.numbered`).
    """

    edges: graphs.Edges

    def __init__(self, layers: Iterable[nn.Module], edges: Iterable[tuple[int, int]]) -> None:
        super().__init__(*layers)
        self.edges = graphs.numbered(edges, len(self))

    def forward(self, x: Any) -> Any:
        """The last layer's output for rows x."""
        inputs, _, out, _ = graphs.wiring(self.edges, len(self))
        outputs: list[Any] = []
        for layer, read in zip(self, inputs, strict=True):
            given = [map_tensors(outputs[a], torch.clone) if len(out[a]) > 1 else outputs[a] for a in read]
            outputs.append(layer(x if not read else given[0] if len(read) == 1 else tuple(given)))
        return outputs[-1]


def edges_of(model: object) -> graphs.Edges:
    """The edges of a model; () for a chain."""
    return model.edges if isinstance(model, Network) else ()


def is_only_layers(model: nn.Module) -> bool:
    """Whether a model does nothing but call its layers: it has no forward, hooks, parameters or buffers of its own."""
    kind, own = type(model), vars(model)
    plain = kind.forward in (nn.Sequential.forward, Network.forward) and kind.__call__ is nn.Module.__call__
    held = [own["_parameters"], own["_buffers"], *(some for name, some in own.items() if name.endswith("hooks"))]
    return plain and "forward" not in own and not any(held)
