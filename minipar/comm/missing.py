"""A gradient that is missing, among numbers that are summed: a parameter that nothing used gets -0.0 everywhere.

    rank 0    -0.0 -0.0     -0.0  -0.0        A sum is -0.0 only if all its terms are: so it says that no rank has used
    rank 1    -0.0 -0.0      0.5   0.0        the parameter, and costs no byte more. Then the optimizer gets None, as in
    sum       -0.0 -0.0      0.5   0.0        plain torch: no decay, and no state.

16-bit numbers have a -0.0, too, and every factor above 0 keeps it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fill(places: Tensor) -> Tensor:
    """Write a gradient that is missing."""
    real(places).fill_(-0.0)
    return places


def like(parameter: Tensor) -> Tensor:
    """A gradient of this parameter that is missing."""
    return fill(torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False))


def real(numbers: Tensor) -> Tensor:
    """Complex numbers as the pairs that they are. (Their own sums and products lose a -0.0.)"""
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers


def is_missing(gradient: Tensor) -> bool:
    """Whether a sum says that all its terms were missing."""
    flat = real(gradient.resolve_conj()).reshape(-1)
    if not flat.numel() or flat[0] != 0 or not torch.signbit(flat[0]):
        return False
    return bool((torch.signbit(flat) & (flat == 0)).all())
