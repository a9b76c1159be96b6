"""Learning rates for stale gradients: the later they are, the smaller are the first steps.

    lr of update k on a rank whose gradients are tau updates old:    lr / tau ** (1 - min(k / steps, 1))

Source: Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", MLSys 2021, technique 1: an update that is
tau steps late is stable for a step size of about 1 / tau; after `steps` updates it is what was asked for.

    train(..., "pp=4 schedule=pipedream", optimizer=ByStaleness(partial(torch.optim.SGD, lr=0.1), steps=100))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from minipar.errors import PlanError

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # (or of (name, parameter) pairs)


@dataclass(frozen=True)
class ByStaleness:
    """An optimizer factory whose learning rate begins lower on ranks with staler gradients.

    make    makes the optimizer, of a list of parameters
    steps   updates of a rank until it has the learning rate that `make` gives; counted from the beginning of the run
    """

    make: Factory
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise PlanError(f"ByStaleness(steps={self.steps}): must be at least 1")

    def __call__(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self.make(parameters)

    def slow(self, optimizer: torch.optim.Optimizer, updates: int) -> None:
        """Let an optimizer whose gradients are `updates` updates old begin with lower learning rates."""
        done, rates = 0, list[Any]()

        def scale(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            rates[:] = [group["lr"] for group in optimizer.param_groups]
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr / max(1, updates) ** (1 - min(done / self.steps, 1))

        def put_back(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            nonlocal done
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr  # (so that a scheduler finds its own)
            done += 1

        optimizer.register_step_pre_hook(scale)
        optimizer.register_step_post_hook(put_back)
