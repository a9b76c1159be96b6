"""Layers that draw from Python's or NumPy's generators, count in plain attributes, or write into what another tensor of
the same cut shares: equal to plain torch where they run again, or named before the run."""

from __future__ import annotations

import random
import sys
import warnings
from functools import partial

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, train
from tests.plain_loop import assert_equals_plain_torch, rows

pytestmark = pytest.mark.many(2)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
cross_entropy = nn.functional.cross_entropy


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


@pytest.mark.parametrize("plan", ["checkpoint=1", "checkpoint=sqrt", "pp=2 microbatches=1 checkpoint=1", "tp=2"])
@pytest.mark.parametrize("how", ["own", "generator", "count"])
@pytest.mark.filterwarnings("ignore:.*computed whole")
def test_own_generators_and_counters_run_again_as_they_ran(clusters, how, plan):
    assert_equals_plain_torch(clusters, plan, partial(model, how), rows(), cross_entropy, SGD)


@pytest.mark.parametrize("plan", ["", "checkpoint=1", "pp=2 microbatches=1 checkpoint=1"])
@pytest.mark.parametrize("how", ["random", "numpy", "helper"])
def test_global_generators_are_seeded_for_each_layer(clusters, how, plan):
    """As they are in the process of plain torch. What the user's process draws next is not changed."""
    found = train(partial(model, how), rows(), plan, cluster=clusters(Plan.parse(plan).ranks), steps=3, check=True,
                  loss=cross_entropy, optimizer=SGD, dtype=torch.float64, progress=False)  # fmt: skip
    assert found.max_error() <= 1e-12
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
