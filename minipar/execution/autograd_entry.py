"""Start autograd's engine where a program needs it: at edges of the graph, with gradients that have arrived.

torch.autograd.backward first compares all shapes in Python, with its code for symbolic shapes. That takes some 50 us a
call, as long as a small layer, and the engine checks the shapes again. So this module calls the engine by the function
that torch.autograd itself calls next. Where a version of torch has no such function, it calls torch.autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_enter: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def backward(
    ends: Sequence[GradientEdge],
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor] = (),
    separate: Sequence[Tensor] = (),
) -> None:
    """Add gradients to `.grad` of all leaves behind some edges, or of `parameters` only if there are any.

    gradients   one for each edge; None stands for 1, the gradient of a scalar
    separate    leaves whose `.grad` has only the gradient of this backward while it runs: see `hooked`

    RuntimeError if a gradient has another shape than its tensor.
    """
    if separate:
        add(separate, added(separate, lambda: backward(ends, gradients, parameters)))
    elif _enter is None:
        torch.autograd.backward(ends, gradients, inputs=parameters or None)
    else:
        given = tuple(ends), _complete(ends, gradients), False, False, tuple(parameters)
        _enter(*given, allow_unreachable=True, accumulate_grad=True)


def hooked(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The leaves with hooks that run after their gradient was accumulated, and may change it.

    Such a hook must see the gradient of one micro-batch at a time: then a hook that halves the gradient of a whole
    batch also halves the sum over its micro-batches.
    """
    return [leaf for leaf in leaves if leaf._post_accumulate_grad_hooks]


def added(leaves: Sequence[Tensor], run: Callable[[], None]) -> list[Tensor | None]:
    """What `run` adds to `.grad` of some leaves (None for nothing). `.grad` itself stays as it was."""
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        run()
        return [leaf.grad for leaf in leaves]
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


def add(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to `.grad`, in place where there is one, without any hook."""
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            leaf.grad.add_(gradient)


def gradients_of(
    inputs: Sequence[Tensor], ends: Sequence[GradientEdge], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of some inputs, None where the edges do not depend on one. The graph stays."""
    if _enter is None:
        return torch.autograd.grad(ends, inputs, gradients, retain_graph=True, allow_unused=True)
    given = tuple(ends), _complete(ends, gradients), True, False, tuple(inputs)
    found: tuple[Tensor | None, ...] = _enter(*given, allow_unreachable=True, accumulate_grad=False)
    return found


def _complete(ends: Sequence[GradientEdge], gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The gradients, with a 1 for None."""
    return tuple([_one(end) if found is None else found for end, found in zip(ends, gradients, strict=True)])


def _one(end: GradientEdge) -> Tensor:
    """The gradient of a scalar with respect to itself."""
    about = end.node._input_metadata[end.output_nr]
    if about.shape:
        raise RuntimeError(f"a gradient of None is 1, of a scalar; here it is of a tensor of shape {list(about.shape)}")
    return torch.ones((), dtype=about.dtype, device=about.device)
