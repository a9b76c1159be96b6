"""Whether an optimizer treats every element of a parameter alike, so that a slice of it can be updated alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.execution.updating import Update

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def check_update(update: Update, why: str) -> None:
    """Call `check_elementwise` for every group of a whole model's optimizer."""
    for k in range(len(update.whole.param_groups)):
        check_elementwise(update.of_group(k), why, update.name)


def check_elementwise(factory: Factory, why: str, name: str = "") -> None:
    """Try an optimizer on a small model, whole and in two flat halves; PlanError if the updates differ.

    `why` says in the error who needs it; `name` what the optimizer is called there.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = [torch.randn(6, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
        gradients = [[torch.randn_like(values) for values in start] for _ in range(3)]
    made = getattr(factory, "func", factory)  # (of a partial)
    name = name or getattr(made, "__name__", type(made).__name__)
    try:
        whole = _update(factory, start, gradients)
        halves = [_update(factory, [_half(v, k) for v in start], [[_half(v, k) for v in g] for g in gradients])
                  for k in (0, 1)]  # fmt: skip
    except Exception as error:
        raise PlanError(f"optimizer {name}: cannot update slices of parameters ({error}); {why}") from error
    for k, values in enumerate(whole):
        found = torch.cat([halves[0][k], halves[1][k]])
        if not torch.allclose(found, values.reshape(-1), rtol=1e-9, atol=1e-12):
            raise PlanError(
                f"optimizer {name}: updates a slice of a parameter otherwise than the whole one; {why}, which needs "
                "an optimizer that works element by element, such as SGD, Adam or AdamW"
            )


def _half(values: Tensor, k: int) -> Tensor:
    return values.reshape(-1).chunk(2)[k].clone()


def _update(factory: Factory, start: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    parameters = [nn.Parameter(values.clone()) for values in start]
    optimizer = factory(parameters)
    for found in gradients:
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]
