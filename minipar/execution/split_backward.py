"""The two halves of a backward: first the gradient of the input, later those of the weights. The graph is walked once.

    out <-- N2 <-- gelu <-- N1 <-- x        input half: the whole chain; what arrives at N2 and N1 is kept, and
             \\                \\                         what gelu saved is let go
              w2               w1           weight half: from N2 to w2 and from N1 to w1, nothing in between again

A part of the graph that leads to parameters but to no input (a bias as an output, a product with a detached input) is
left whole for the weight half. A piece without inputs (the first layer that is trained) has an empty input half.

An operation at which the weight half begins (N2, N1) runs twice, each time for some of its gradients. Where that is not
sound, the input half does all of it, and the weight half only adds the gradients that were found:

- two operations share a parameter, so that the way from one to it may lead through the other
- the operation has hooks, which must run once
- the operation cannot be run for its parameters alone (torch's GroupNorm with channels last)
- it is a custom `torch.autograd.Function`, whose backward may do anything
- somewhere in the graph such a function runs a backward of its own, as a reentrant checkpoint does
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from minipar.execution import autograd_entry
from minipar.execution.saved_tensors import Note
from minipar.models.tensors import storages

_HOOKED = "minipar: its output has a hook"  # a key of a node's metadata


class Arrived(NamedTuple):
    """Where the weight half begins: edges of the graph, the gradients that came there, the parameters behind them.

    Without edges the gradients are those of the parameters, one each, which the input half has found. Where the graph
    is `whole`, all leaves behind the edges are parameters.
    """

    edges: list[GradientEdge]
    gradients: list[Tensor | None]
    parameters: list[Tensor]
    whole: bool = False


class _Ways(NamedTuple):
    """The operations of a graph that is split.

    starts    operations on a way to an input from which other ways lead to parameters; with these parameters
    between   the other operations on a way to an input
    aside     ends from which no way leads to an input, by number, with the parameters behind them
    """

    starts: list[tuple[Node, list[Tensor]]]
    between: list[Node]
    aside: list[tuple[int, list[Tensor]]]


@contextmanager
def noting_hooks() -> Iterator[None]:
    """While entered, note in the graph which tensors get a hook: the graph itself does not show hooks on tensors.

    A forward whose backward is split runs inside of it.
    """
    kind: Any = torch.Tensor
    register, retain = kind.register_hook, kind.retain_grad

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        _note_hook(tensor)
        return register(tensor, hook)

    def retain_grad(tensor: Tensor) -> None:
        _note_hook(tensor)
        retain(tensor)

    kind.register_hook, kind.retain_grad = register_hook, retain_grad
    try:
        yield
    finally:
        kind.register_hook, kind.retain_grad = register, retain


def _note_hook(tensor: Any) -> None:
    if tensor.grad_fn is not None:
        tensor.grad_fn.metadata[_HOOKED] = True


def input_half(
    ends: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Arrived]]:
    """Gradients of `inputs` (None where `ends` do not depend on one), and what the weight half needs.

    What autograd saved for this half alone is freed. A graph made in `noting_hooks` may have hooks.
    """
    if not inputs or not ends:
        return [None for _ in inputs], [Arrived(list(ends), list(gradients), list(parameters), True)] if ends else []
    ways = _ways(ends, inputs, parameters)
    if ways is None:
        return _all_at_once(ends, gradients, inputs, parameters)
    arrived = []

    def note(node: Node, mine: list[Tensor]) -> Callable[[Sequence[Tensor | None]], None]:
        def keep(grads: Sequence[Tensor | None]) -> None:
            given = [(GradientEdge(node, k), g) for k, g in enumerate(grads) if g is not None]
            if given:
                arrived.append(Arrived([edge for edge, _ in given], [g for _, g in given], mine))

        return keep

    if ways.aside:
        places = [k for k, _ in ways.aside]
        behind = {id(p): p for _, mine in ways.aside for p in mine}
        arrived.append(Arrived([ends[k] for k in places], [gradients[k] for k in places], list(behind.values())))
    hooks = [node.register_prehook(note(node, mine)) for node, mine in ways.starts]
    try:
        wanted = autograd_entry.gradients_of(inputs, ends, gradients)
    finally:
        for hook in hooks:
            hook.remove()
    for node in ways.between:
        _let_go(node)
    return list(wanted), arrived


def _all_at_once(
    ends: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor | None], list[Arrived]]:
    """Do both halves in the first one: the weight half then only adds the gradients of the parameters."""
    found = autograd_entry.added([*inputs, *parameters], lambda: autograd_entry.backward(ends, gradients))
    pairs = zip(parameters, found[len(inputs) :], strict=True)
    return found[: len(inputs)], [Arrived([], [g], [p]) for p, g in pairs if g is not None]


def weight_half(arrived: Sequence[Arrived]) -> None:
    """Add the gradients of the parameters, from where the input half left off."""
    for edges, gradients, parameters, whole in arrived:
        if not edges:
            autograd_entry.add(parameters, gradients)
        elif parameters:
            autograd_entry.backward(edges, gradients, () if whole else parameters, autograd_entry.hooked(parameters))


def left(arrived: Iterable[Arrived], known: Iterable[Tensor] = ()) -> list[int]:
    """Bytes that each of these keeps from one half to the other: gradients, and what its operation saved.

    known   tensors that exist in any case, such as parameters. A storage counts once.
    """
    seen = set(storages(known))
    sizes = []
    for edges, gradients, *_ in arrived:
        nodes = {edge.node for edge in edges}
        kept = [g for g in gradients if g is not None] + [t for node in nodes for t in _saved(node)]
        mine = {key: size for key, size in storages(kept).items() if key not in seen}
        seen.update(mine)
        sizes.append(sum(mine.values()))
    return sizes


def _ways(ends: Sequence[GradientEdge], inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> _Ways | None:
    """Which operations are on the ways to the inputs; None if the halves cannot be separated."""
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
            if _is_custom(node) and _runs_backward(type(node)):
                return None
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
    off = [(k, end.node) for k, end in enumerate(ends) if not leads[end.node] and behind.get(end.node)]
    aside = [(k, list(behind[node].values())) for k, node in off]
    of_aside = {id(p) for _, mine in aside for p in mine}
    reached = [*of_aside, *(id(p) for _, mine in starts for p in mine)]
    if len(set(reached)) < len(reached) or autograd_entry.hooked(inputs) or any(_runs_once(node) for node, _ in starts):
        return None
    return _Ways(starts, between, aside)


def _runs_once(node: Any) -> bool:
    """Whether an operation must not run a second time, for its parameters alone."""
    if _is_custom(node) or _HOOKED in node.metadata or _needs_input(node):
        return True
    for register in (node.register_prehook, node.register_hook):
        hook = register(_nothing)
        others = len(hook.hooks_dict_ref()) > 1
        hook.remove()
        if others:
            return True
    return False


def _needs_input(node: Any) -> bool:
    """Whether an operation ends the process where the gradient of its input is not wanted: torch 2.13's GroupNorm, on
    CPUs and with channels last, writes that gradient nevertheless."""
    return node.name() == "NativeGroupNormBackward0" and not node._saved_input.is_contiguous()


def _is_custom(node: Any) -> bool:
    """Whether an operation is a `torch.autograd.Function` in Python."""
    return isinstance(node, BackwardCFunction)


@cache
def _runs_backward(kind: Any) -> bool:
    """Whether the backward of a custom function runs another one, which may add to the gradients of parameters.

    A reentrant checkpoint asks first whether all of the graph is run, and raises where it is not.
    """
    code = getattr(getattr(kind._forward_cls, "backward", None), "__code__", None)
    return code is None or not {"backward", "_is_checkpoint_valid"}.isdisjoint(code.co_names)


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
        # (an error: nothing was saved here, or it is kept by hooks of the layer's own, or as a note)
        with suppress(RuntimeError, AttributeError):
            note = getattr(raw, "data", None)  # (raises where nothing was saved)
            if isinstance(note, Note):
                note.let_go()
                continue
            raw.register_hooks(_nothing, _nothing)


def _nothing(*_: Any) -> None:
    return None


def _saved(node: Node) -> list[Tensor]:
    kept = []
    for name in _names(type(node)):
        found = getattr(node, name.replace("_raw", "", 1), None)
        kept += [t for t in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(t, Tensor)]
    return kept
