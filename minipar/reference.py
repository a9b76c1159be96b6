"""The reference that every strategy must equal: plain torch, the whole batch at once, one process, no executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar import randomness


class Reference(NamedTuple):
    """Per step the loss, and the gradient of every trainable parameter by name (empty if not kept)."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def train_plainly(
    model: nn.Module,
    batches: Callable[[int], tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int,
    seed: int = 0,
    keep_gradients: bool = True,
    report: Callable[[int], None] = lambda step: None,
) -> Reference:
    """Train `model` for `steps` steps, as anyone would without minipar. The model is changed in place."""
    randomness.replace_dropout(model, seed)
    model.train()
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    update = optimizer(list(names.values())) if names else None
    result = Reference([], [])
    for step in range(steps):
        x, y = batches(step)
        randomness.at(randomness.row_dropouts(model), step, 0)
        value = loss(model(x), y)
        if names:
            value.backward()
        result.losses.append(value.item())
        if keep_gradients:
            result.gradients.append(
                {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in names.items()}
            )
        if update:
            update.step()
            update.zero_grad()
        report(step)
    return result


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """max |g - g1| over all elements / max |g1| over all parameters: 0 is perfect; a missing gradient is infinite."""
    if found.keys() != expected.keys():
        return float("inf")
    largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=0.0)
    worst = max(
        ((found[name].cpu() - g.cpu()).abs().max().item() for name, g in expected.items() if g.numel()), default=0.0
    )
    return worst / largest if largest else worst
