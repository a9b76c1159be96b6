"""A plain multi-layer perceptron, as a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from minipar.models.initial import initialise
from minipar.models.table import MLP, check_mlp


def mlp(
    widths: Sequence[int] = (32, 64, 64, 256), activation: Callable[[], nn.Module] = nn.GELU, bias: bool = True
) -> nn.Sequential:
    """`len(widths) - 1` layers: each has a Linear and an activation, but the last one has only a Linear.

    Layer l maps (rows, widths[l]) to (rows, widths[l + 1]). Initial values come from `torch.initial_seed()` and the
    parameters' names. Errors: `PlanError` for widths that make no model.
    """
    widths = tuple(widths)
    check_mlp(MLP(widths))
    last = len(widths) - 2
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):  # torch first draws values of its own, which are not used
        for l, (inputs, outputs) in enumerate(pairwise(widths)):
            linear = nn.Linear(inputs, outputs, bias=bias)
            layers.append(nn.Sequential(linear) if l == last else nn.Sequential(linear, activation()))
    model = nn.Sequential(*layers)
    initialise(model, std=None)
    return model
