"""A loop of plain torch over whole batches, and a run compared with it: losses, gradients and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, train
from minipar.execution.saving.keeping import model_of
from minipar.training.training import Run

BOUND = 1e-10


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.arange(8) % 3


def assert_equals_plain_torch(
    clusters: Callable[[int], Any],
    plan: str,
    make: Callable[[], nn.Module],
    data: Any,
    loss: Any,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int = 3,
    plain_loss: Any = None,
    call: Callable[[nn.Module, Any], Any] = lambda model, x: model(x),
    pairs: Any = None,
    batch: int = 8,
    bound: float = BOUND,
) -> Run:
    """Train in float64 both ways. plain_loss: of a plain loop, where its penalty stands in the loss itself. call: the
    plain model, with rows x. pairs: of the plain loop, what `data` are read as: a pair, or one for each step."""
    pairs = data if pairs is None else pairs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
        if any(map(nn.parameter.is_lazy, model.parameters())):
            call(model, pairs[0])
    for p in model.parameters():
        p.data = p.data.to(torch.complex128 if p.is_complex() else torch.float64)
    for module in model.modules():
        for key, buffer in [*module._buffers.items()]:
            if buffer.is_floating_point():
                module._buffers[key] = buffer.double()
    own, losses, gradients = optimizer(list(model.parameters())), [], []
    for step in range(steps):
        found = pairs[step] if isinstance(pairs, list) else pairs if isinstance(pairs, tuple) else pairs.batch(step, 8)
        x, y = _double(found)
        own.zero_grad()
        value = (loss if plain_loss is None else plain_loss)(call(model, x), y)
        value.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        losses.append(value.item())
        own.step()
    run = train(make, data, plan, cluster=clusters(Plan.parse(plan).ranks), steps=steps, batch=batch, loss=loss,
                optimizer=optimizer, dtype=torch.float64, check=True, progress=False)  # fmt: skip
    assert run.losses == pytest.approx(losses, rel=bound)
    for found, expected in zip(run.gradients, gradients, strict=True):
        _same({n: found[n] for n in expected}, expected, bound)
    _same(model_of(run.shares, "test"), dict(model.named_parameters()), bound)
    return run


def _same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    for name, values in expected.items():
        assert torch.allclose(found[name], values, bound, bound), name


def _double(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _double(part) for key, part in value.items()}
    return type(value)(map(_double, value)) if isinstance(value, (tuple, list)) else value
