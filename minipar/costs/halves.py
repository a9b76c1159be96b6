"""The two halves of a backward: first the gradient of the input, later those of the weights. The graph is walked once.

    out <-- N2 <-- gelu <-- N1 <-- x        input half: the whole chain; what arrives at N2 and N1 is kept, and
             \\                \\                         what gelu saved is let go
              w2               w1           weight half: from N2 to w2 and from N1 to w1, nothing in between again

Two cases are not split. A piece of the graph without inputs (the first layer that is trained) has nothing to do in the
input half. Where two operations use the same parameter, the way from one to it may lead through the other: then the
input half finds the gradients of the parameters, too, and the weight half only adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from minipar import engine
from minipar.tensors import storages


class Arrived(NamedTuple):
    """Where the weight half begins: edges of the graph, the gradients that came there, the parameters behind them."""

    edges: list[GradientEdge]
    gradients: list[Tensor | None]
    parameters: list[Tensor]


def input_half(
    ends: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Arrived]]:
    """Gradients of `inputs` (None where `ends` do not depend on one), and what the weight half needs.

    What autograd saved for this half alone is freed.
    """
    if not inputs or not ends:
        return [None for _ in inputs], [Arrived(list(ends), list(gradients), list(parameters))] if ends else []
    starts, between = _ways(ends, inputs, parameters)
    behind = [id(p) for _, mine in starts for p in mine]
    if len(set(behind)) < len(behind):
        found = torch.autograd.grad(ends, [*inputs, *parameters], gradients, allow_unused=True)
        weights = zip(parameters, found[len(inputs) :], strict=True)
        arrived = [Arrived([get_gradient_edge(p)], [g], [p]) for p, g in weights if g is not None]
        return list(found[: len(inputs)]), arrived
    arrived = []

    def note(node: Node, mine: list[Tensor]) -> Callable[[Sequence[Tensor | None]], None]:
        def keep(grads: Sequence[Tensor | None]) -> None:
            given = [(GradientEdge(node, k), g) for k, g in enumerate(grads) if g is not None]
            arrived.append(Arrived([edge for edge, _ in given], [g for _, g in given], mine))

        return keep

    hooks = [node.register_prehook(note(node, mine)) for node, mine in starts]
    try:
        wanted = engine.gradients_of(inputs, ends, gradients)
    finally:
        for hook in hooks:
            hook.remove()
    for node in between:
        _let_go(node)
    return list(wanted), arrived


def weight_half(arrived: Sequence[Arrived]) -> None:
    """Add the gradients of the parameters, from where the input half left off."""
    for edges, gradients, parameters in arrived:
        if edges and parameters:
            engine.backward(edges, gradients, parameters)


def left(arrived: Iterable[Arrived], known: Iterable[Tensor] = ()) -> list[int]:
    """Bytes that each of these keeps from one half to the other: gradients, and what its operation saved.

    known   tensors that are there anyway, such as parameters. A storage counts once.
    """
    seen = set(storages(known))
    sizes = []
    for edges, gradients, _ in arrived:
        nodes = {edge.node for edge in edges}
        kept = [g for g in gradients if g is not None] + [t for node in nodes for t in _saved(node)]
        mine = {key: size for key, size in storages(kept).items() if key not in seen}
        seen.update(mine)
        sizes.append(sum(mine.values()))
    return sizes


def _ways(
    ends: Sequence[GradientEdge], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[list[tuple[Node, list[Tensor]]], list[Node]]:
    """The operations on the ways to the inputs: those with parameters behind them off these ways, and the others."""
    goals = {get_gradient_edge(x).node for x in inputs}
    owner = {get_gradient_edge(p).node: p for p in parameters}
    leads = dict.fromkeys(owner, False) | dict.fromkeys(goals, True)
    behind: dict[Node, dict[int, Tensor]] = {node: {id(p): p} for node, p in owner.items()}
    children: dict[Node, list[Node]] = {}
    starts, between = [], []
    stack = [end.node for end in ends]
    while stack:
        node = stack[-1]
        if node in leads:
            stack.pop()
        elif node not in children:  # first those behind it
            children[node] = [child for child, _ in node.next_functions if child is not None]
            stack += children[node]
        else:
            stack.pop()
            mine: dict[int, Tensor] = {}
            leads[node] = False
            for child in children[node]:
                if leads[child]:
                    leads[node] = True
                elif child in behind:
                    mine |= behind[child]
            if not leads[node]:
                behind[node] = mine
            elif mine:
                starts.append((node, list(mine.values())))
            else:
                between.append(node)
    return starts, between


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _raw(node: Node) -> Iterator[Any]:
    """What an operation saved, as autograd keeps it. (One in Python has no list before it saved anything.)"""
    for name in _names(type(node)):
        found = getattr(node, name, None)
        yield from found if isinstance(found, (tuple, list)) else (found,)


def _let_go(node: Node) -> None:
    """Free what an operation saved; it will not run again."""
    for raw in _raw(node):
        # (an error: nothing was saved here, or it is kept by hooks of the layer's own)
        with suppress(RuntimeError, AttributeError):
            raw.register_hooks(_nothing, _nothing)


def _nothing(_: Any) -> None:
    return None


def _saved(node: Node) -> list[Tensor]:
    kept = []
    for name in _names(type(node)):
        found = getattr(node, name.replace("_raw", "", 1), None)
        kept += [t for t in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(t, Tensor)]
    return kept
