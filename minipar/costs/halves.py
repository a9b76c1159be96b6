"""The two halves of a backward: first the gradient of the input, later those of the weights.

    out <-- N2 <-- gelu <-- N1 <-- x        input half: the whole chain; what arrives at N2 and N1 is noted
             \\                \\
              w2               w1           weight half: from N2 to w2 and from N1 to w1, nothing in between again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class Arrived(NamedTuple):
    """An operation at which the weight half begins: the gradients that came to it, and the parameters behind it."""

    node: Node
    gradients: list[Tensor | None]
    parameters: list[Tensor]


def input_half(
    ends: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Arrived]]:
    """Gradients of `inputs` (None where `ends` do not depend on one), and what the weight half needs.

    The graph is kept for it. Without inputs there is nothing to do but to note the ends themselves.
    """
    if not inputs:
        edges = [get_gradient_edge(end) for end in ends]
        found = [
            Arrived(edge.node, _at(edge, g, end), list(parameters)) for edge, end, g in _zip(edges, ends, gradients)
        ]
        return [], found
    starts = _starts(ends, inputs, parameters)
    arrived: list[Arrived] = []

    def note(node: Node, below: list[Tensor]) -> Any:
        return node.register_prehook(lambda grads: arrived.append(Arrived(node, list(grads), below)))

    hooks = [note(node, below) for node, below in starts]
    try:
        found_inputs = torch.autograd.grad(ends, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return list(found_inputs), arrived


def weight_half(arrived: Sequence[Arrived]) -> None:
    """Add the gradients of the parameters, from where the input half left off."""
    for node, gradients, parameters in arrived:
        given = [(GradientEdge(node, k), g) for k, g in enumerate(gradients) if g is not None]
        if given and parameters:
            edges, values = zip(*given, strict=True)
            torch.autograd.backward(edges, values, inputs=parameters, retain_graph=True)


def _zip(edges: Sequence[GradientEdge], ends: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Any:
    return zip(edges, ends, gradients, strict=True)


def _at(edge: GradientEdge, gradient: Tensor | None, end: Tensor) -> list[Tensor | None]:
    return [None] * edge.output_nr + [torch.ones_like(end) if gradient is None else gradient]


def _starts(
    ends: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[tuple[Node, list[Tensor]]]:
    """The operations that lie on a way to an input and have parameters behind them off that way."""
    leads = {get_gradient_edge(x).node: False for x in parameters} | {get_gradient_edge(x).node: True for x in inputs}
    owner = {get_gradient_edge(p).node: p for p in parameters}
    order: list[Node] = []  # every operation after those behind it
    seen = set(leads)
    stack = [(get_gradient_edge(end).node, False) for end in ends]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    behind: dict[Node, list[Tensor]] = {
        node: [p] for node, p in owner.items()
    }  # reached without passing an input's way
    found = []
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        leads[node] = any(leads.get(child, False) for child in children)
        mine = list(
            {id(p): p for child in children if not leads.get(child, False) for p in behind.get(child, ())}.values()
        )
        if not leads[node]:
            behind[node] = mine
        elif mine:
            found.append((node, mine))
    return found
