"""Autograd's engine, entered where a program enters it: at edges of the graph, with gradients that have arrived.

torch.autograd.backward first compares all shapes in Python, with what it has for symbolic ones. That takes some 50 us a
call, as long as a small layer, and the engine checks them again. So they are handed straight to it, by the function
that torch.autograd itself calls next; where a version of torch has no such function, by torch.autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_enter: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def backward(
    ends: Sequence[GradientEdge], gradients: Sequence[Tensor | None], parameters: Sequence[Tensor] = ()
) -> None:
    """Add to `.grad` of all leaves behind some edges, or of some of these; a gradient of None is 1, of a scalar.

    RuntimeError if a gradient has another shape than what it is of.
    """
    if _enter is None:
        torch.autograd.backward(ends, gradients, inputs=parameters or None)
    else:
        given = tuple(ends), _complete(ends, gradients), False, False, tuple(parameters)
        _enter(*given, allow_unreachable=True, accumulate_grad=True)


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
