"""Layers that draw from Python's or NumPy's generators, count in plain attributes, or write into what another tensor of
the same cut shares: equal to plain torch where they run again, or named before the run."""

from __future__ import annotations

import random
import sys
import warnings
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, train
from tests.plain_loop import assert_equals_plain_torch

pytestmark = pytest.mark.many(2)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
cross_entropy = nn.functional.cross_entropy


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64), torch.arange(8) % 3


class Drawing(nn.Module):
    """Scaled by numbers from somewhere; the scale multiplies a weight, so that a second draw gives another gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(6))
        self.own, self.numbers, self.calls = random.Random(3), np.random.default_rng(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = {
            "random": lambda: random.random(), "numpy": lambda: float(np.random.rand()), "own": self.own.random,
            "generator": self.numbers.random, "count": lambda: 1 / self.calls, "helper": drawn,
        }[self.how]()  # fmt: skip
        return torch.sin(scale * self.weight * x)


def drawn() -> float:
    return random.gauss(0.0, 1.0)


def model(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Drawing(how), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("plan", ["checkpoint=1", "checkpoint=sqrt", "pp=2 microbatches=1 checkpoint=1"])
@pytest.mark.parametrize("how", ["own", "generator", "count"])
def test_own_generators_and_counters_run_again_as_they_ran(clusters, how, plan):
    assert_equals_plain_torch(clusters, plan, partial(model, how), rows(), cross_entropy, SGD)


@pytest.mark.parametrize("plan", ["", "checkpoint=1", "pp=2 microbatches=1 checkpoint=1"])
@pytest.mark.parametrize("how", ["random", "numpy", "helper"])
def test_global_generators_are_seeded_for_each_layer(clusters, how, plan):
    """As they are in the process of plain torch. What the user's process draws next is not changed."""
    found = train(partial(model, how), rows(), plan, cluster=clusters(Plan.parse(plan).ranks), steps=3, check=True,
                  loss=cross_entropy, optimizer=SGD, dtype=torch.float64, progress=False)  # fmt: skip
    assert found.max_gradient_error() <= 1e-12
    assert found.max_parameter_error() <= 1e-12
    assert len(set(found.losses)) == 3


@pytest.mark.parametrize("how", ["random", "numpy", "own", "helper"])
def test_a_split_batch_is_warned_of(clusters, how):
    with pytest.warns(UserWarning, match="1 .Drawing: may draw from Python's or NumPy's generators"):
        train(partial(model, how), rows(), "dp=2", cluster=clusters(2), steps=1, loss=cross_entropy, progress=False)


def test_others_are_not(clusters):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calm = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        train(calm, rows(), "dp=2", cluster=clusters(2), steps=1, loss=cross_entropy, progress=False)


# tensors that share memory --------------------------------------------------------------------------------------------


class Viewing(nn.Module):
    """Hands on a tensor and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y[:, :3]


class Writing(nn.Module):
    """Changes one of two tensors, in place or in a copy, and reads both."""

    def __init__(self, place: int, copy: bool) -> None:
        super().__init__()
        self.place, self.copy = place, copy

    def forward(self, x: Any) -> Tensor:
        found = [t.clone() for t in x] if self.copy else list(x)
        found[self.place].mul_(2.0)
        return found[0][:, :3] + found[1]


def writing(place: int, copy: bool, between: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Viewing(), *(nn.Identity() for _ in range(between)), Writing(place, copy), nn.Linear(3, 3))


CUTS = ["", "dp=2", "pp=2", "pp=2 microbatches=2 checkpoint=1", "dp=2 zero=3", "pp=2 schedule=zb-h1 microbatches=2",
        "offload=activations"]  # fmt: skip


@pytest.mark.parametrize("plan", CUTS)
def test_a_write_into_a_copy_is_right(clusters, plan):
    assert_equals_plain_torch(clusters, plan, partial(writing, 0, True), rows(), cross_entropy, SGD)
