"""Learning rates for stale gradients: where they are late, small steps first.

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
from minipar.program import Program
from minipar.staleness import delay

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


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

    def late_by(self, updates: int) -> Factory:
        """The factory for gradients that are so many updates old."""

        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = self.make(parameters)
            rates = [group["lr"] for group in optimizer.param_groups]
            done = 0

            def scale(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                nonlocal done
                for group, lr in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = lr / max(1, updates) ** (1 - min(done / self.steps, 1))
                done += 1

            optimizer.register_step_pre_hook(scale)
            return optimizer

        return make


def for_delay(factory: Factory, updates: int) -> Factory:
    """The factory of a rank whose gradients are so many updates old."""
    return factory.late_by(updates) if isinstance(factory, ByStaleness) else factory


def of_rank(factory: Factory, program: Program, rank: int) -> Factory:
    """The same for a rank of a program."""
    return for_delay(factory, delay(program, rank)) if isinstance(factory, ByStaleness) else factory
