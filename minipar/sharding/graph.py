"""A layer as operators: what capture gives, and what propagation reads. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a graph.

    kind             "parameter", "buffer", "input", or "value": what an operator writes
    itemsize         bytes of an element
    differentiable   whether a gradient flows through it; what has none costs nothing backward
    floating         whether its numbers have fractions, so that it could have a gradient
    """

    name: str
    shape: Shape
    itemsize: int = 4
    kind: str = "value"
    differentiable: bool = True
    floating: bool = True

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Slot:
    """The place of an input among the arguments of an operator."""

    index: int


@dataclass(frozen=True)
class Operator:
    """One call of an operator.

    name      where it stands: "mlp.0" is the last operator of the module mlp.0, "mlp.0.view" another one in it
    op        "aten::linear"; of a user's own library "mylib::op"
    inputs    names of the tensors that it reads, in the order of its arguments
    outputs   names of those that it writes
    options   all its arguments by name; a Slot in place of each tensor, also in lists
    call      what runs it: torch's operator
    node      the name of its node in the captured graph
    detached  whether it stands in code without gradients (torch.no_grad)
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    call: Any = None
    node: str = ""
    detached: bool = False

    @property
    def counts(self) -> str:
        """The tensor that counts what is unequal among the others, for operators with an argument of this name."""
        found = self.options.get("counts")
        return self.inputs[found.index] if isinstance(found, Slot) else ""

    def option(self, name: str, default: Any = None) -> Any:
        """An argument that is no tensor; `default` where the operator has none of that name."""
        found = self.options.get(name, default)
        return default if found is None else found


@dataclass(frozen=True)
class Graph:
    """A layer: operators in the order in which they run.

    inputs, outputs   names of the tensors that it is given and hands on
    before, after     of a layer on a slice of sequences, names of the tensors of its carry (`models/sliced.py`): what
                      it is given of the slice before, and what it keeps for the next one
    """

    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.kind == "parameter")

    def writer(self, name: str) -> Operator | None:
        """The operator that writes a tensor; None of what the graph is given."""
        return next((op for op in self.operators if name in op.outputs), None)


@dataclass(frozen=True)
class Layer:
    """A layer of a model: a graph, which equal layers share, and what its tensors and operators are called here.

    names   of each name in the graph the own one; names that are not in it are the same
    """

    graph: Graph
    names: Mapping[str, str] = field(default_factory=dict)

    def own(self, name: str) -> str:
        """The name in this layer."""
        return self.names.get(name, name)
