"""Layers that every rank computes whole: what cannot be captured as operators, or is not what was captured.

A captured graph has the forward of a layer, and autograd makes the backward of that. What a layer says of its backward
is not in it: an autograd.Function with a backward of its own, hooks, a checkpoint. So each captured layer is run beside
the layer itself on the example, forward and backward. A layer that differs, or has hooks, is one operator of a graph,
`minipar::layer`, that has no rule: all ranks that share layers read its inputs whole, and call the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minipar.models.cutting import undisturbed
from minipar.models.randomness import numbers_of
from minipar.models.tensors import differentiable, items_of, map_tensors, rebuilt, tensors
from minipar.sharding.graph import Graph, Operator, Slot
from minipar.sharding.graph import Tensor as GraphTensor

LAYER = "minipar::layer"
_SCALES = (1.0, 1000.0)  # of the gradients that a layer is tried with: a backward may clip large ones
_CLOSE = {torch.float64: 1e-9, torch.complex128: 1e-9}  # relative to the largest number; other types: 1e-4
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip


def hooks_of(layer: nn.Module) -> str:
    """A hook of a layer, its modules or parameters, in words; "": there is none."""
    every = [*layer.named_modules(remove_duplicate=False), *layer.named_parameters(remove_duplicate=False)]
    for name, one in every:
        for kind in _HOOKS:
            if getattr(one, kind, None):
                return f"{name or type(one).__name__} has hooks ({kind.strip('_').replace('_', ' ')})"
    for name, one in layer.named_modules():
        if getattr(one, "sparse", False) is True:
            return f"{name or type(one).__name__} makes sparse gradients"
    tensors_of = [*layer.named_parameters(), *layer.named_buffers()]
    found = next((name for name, one in tensors_of if one.is_complex()), "")
    return f"{found} has complex numbers" if found else ""


def recurrent_in(layer: nn.Module) -> str:
    """A recurrent module of a layer, in words. No rule divides its operators, and capturing its steps takes long."""
    recurrent = (name or type(one).__name__ for name, one in layer.named_modules() if isinstance(one, nn.RNNBase))
    return next((f"{name} is recurrent" for name in recurrent), "")


def difference(
    layer: nn.Module, captured: Callable[..., Any], given: Any, flows: bool, slice_of: tuple[Any, ...] = ()
) -> str:
    """Why a captured layer is not the layer on an example, in words; "": it is.

    flows      its inputs have gradients
    slice_of   of a slice of sequences its first token, and the carry of the slice before
    """
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    before = numbers_of(layer)
    with undisturbed(layer):  # (the second run finds what the first one has left)
        for scale in _SCALES:
            try:
                wanted, own = _run(layer, given, flows, [layer.get_parameter(name) for name in names], scale, slice_of)
                if own:
                    return f"{own} has a backward of its own"
                found, _ = _run(captured, given, flows, _parameters(captured, names), scale, slice_of)
            except Exception as error:  # such as a checkpoint that autograd.grad cannot go through
                return f"its backward cannot be compared ({type(error).__name__})"
            if len(_flat(wanted)) != len(_flat(found)):
                return "other tensors have gradients in the captured one"
            words = [f"output {k}" for k in range(len(tensors(wanted[0])))]
            words += [f"the gradient of {name}" for name in (["its input"] * len(wanted[1]) + names[: len(wanted[2])])]
            for what, a, b in zip(words, _flat(wanted), _flat(found), strict=True):
                if not _equal(a, b):
                    return f"{what} differs from the captured one"
        key = next((key for key, number in numbers_of(layer).items() if before.get(key) != number), "")
    return f"each forward changes its {key}" if key else ""


def _parameters(captured: Any, names: Sequence[str]) -> list[Tensor]:
    held = dict(captured.named_parameters(remove_duplicate=False))
    return [held[name] for name in names]


def _flat(found: tuple[Any, Sequence[Any], Sequence[Any]]) -> list[Tensor | None]:
    return [*tensors(found[0]), *found[1], *found[2]]


def _run(
    layer: Callable[..., Any],
    given: Any,
    flows: bool,
    parameters: Sequence[Tensor],
    scale: float,
    more: tuple[Any, ...],
) -> tuple[tuple[Any, Sequence[Any], Sequence[Any]], str]:
    """A layer's output, the gradients of its inputs and parameters, and the class of a backward that torch has not."""
    state = undisturbed(layer, True) if isinstance(layer, nn.Module) else torch.random.fork_rng(devices=[])
    with state, torch.enable_grad():
        torch.manual_seed(0)
        taken = map_tensors(given, lambda t: t.detach().clone().requires_grad_(flows and t.is_floating_point()))
        inputs = [t for t in tensors(taken) if t.requires_grad]
        output = layer(map_tensors(taken, torch.clone), *more)  # (a layer may work in place)
        ends = [t for t in differentiable(output) if t.requires_grad]
        if not ends or not (inputs or parameters):
            return (map_tensors(output, torch.Tensor.detach), [], []), ""
        own = _own_backward(ends)
        cotangents = [(scale * torch.linspace(-1, 1, t.numel())).view(t.shape).to(t) for t in ends]
        found = torch.autograd.grad(ends, [*inputs, *parameters], cotangents, allow_unused=True)
        whole = map_tensors(output, torch.Tensor.detach)
        return (whole, found[: len(inputs)], found[len(inputs) :]), own


def _own_backward(ends: Sequence[Tensor]) -> str:
    """The name of a torch.autograd.Function in the graph of some tensors; operators of a library have rules."""
    seen: set[Any] = set()
    left: list[Any] = [t.grad_fn for t in ends]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not kind.startswith("GeneratedBackwardFor"):
            return kind.removesuffix("Backward")
        left += [following for following, _ in node.next_functions]
    return ""


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        some = a if b is None else b
        return some is None or not bool(some.any())
    if a.shape != b.shape:
        return False
    a, b = (t.to_dense() if t.is_sparse else t for t in (a, b))
    if not (a.is_floating_point() or a.is_complex()):
        return bool((a == b).all())
    largest = a.abs().nan_to_num(0, 0, 0).max().item() if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=_CLOSE.get(a.dtype, 1e-4) * max(largest, 1e-30), equal_nan=True)


def output_of(layer: nn.Module, given: Any) -> Any:
    """What a layer gives for an example."""
    with undisturbed(layer), torch.no_grad():
        return map_tensors(layer(map_tensors(given, torch.clone)), torch.Tensor.detach)


# as a graph -----------------------------------------------------------------------------------------------------------


def graph_of(layer: nn.Module, given: Any, why: str, flows: bool) -> tuple[Graph, Any]:
    """A layer as one operator, which says why; and what it gives for the example."""
    with undisturbed(layer), torch.set_grad_enabled(True):
        taken = map_tensors(given, lambda t: t.detach().requires_grad_(flows and t.is_floating_point()))
        output = layer(map_tensors(taken, torch.clone))
    found: dict[str, GraphTensor] = {}
    inputs = [_add(found, f"given.{k}", t, "input", flows and _smooth(t)) for k, t in enumerate(tensors(given))]
    stored = [
        _add(found, name, p, "parameter", p.requires_grad) for name, p in layer.named_parameters(remove_duplicate=False)
    ]
    outputs = [_add(found, f"found.{k}", t, "value", t.requires_grad) for k, t in enumerate(tensors(output))]
    options = {"given": form_of(given), "found": form_of(output), "why": why}
    operator = Operator("layer", LAYER, (*inputs, *stored), tuple(outputs), options)
    return Graph((operator,), found, tuple(inputs), tuple(outputs)), map_tensors(output, torch.Tensor.detach)


def _smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _add(found: dict[str, GraphTensor], name: str, tensor: Tensor, kind: str, differentiable: bool) -> str:
    shape = tuple(tensor.shape)
    found[name] = GraphTensor(name, shape, tensor.dtype.itemsize, kind, differentiable, _smooth(tensor))
    return name


def form_of(value: Any) -> Any:
    """A value with a Slot in place of each tensor."""
    numbers = iter(range(len(tensors(value))))
    return map_tensors(value, lambda _: Slot(next(numbers)))


def filled(form: Any, given: Sequence[Tensor]) -> Any:
    """The value of a form, with these tensors."""
    if isinstance(form, Slot):
        return given[form.index]
    if isinstance(form, (list, tuple)):
        return rebuilt(type(form), [filled(part, given) for part in form])
    if items := items_of(form):
        return rebuilt(type(form), [filled(part, given) for part in items.values()], list(items), form)
    return form
