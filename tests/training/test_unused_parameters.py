"""A parameter that nothing uses has no gradient, however gradients are summed: weight decay leaves it as it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minipar import Plan, train
from minipar.comm import missing
from minipar.training.evaluation import state_of
from tests.plain_loop import assert_equals_plain_torch
from tests.toys import toy

mse = torch.nn.functional.mse_loss


class Rare(torch.nn.Linear):
    """Uses `extra` for few rows: none of most micro-batches, and of some steps."""

    def __init__(self):
        super().__init__(6, 6)
        self.extra = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        hot = x[:, :1] > 1.0
        found = super().forward(x)
        return found + hot * self.extra if hot.any() else found


class Data:
    """Rows of which the first layer's input is hot in one row of step 1."""

    def batch(self, step, size):
        x, y = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        x = x.clamp(-1, 0.9)
        if step == 1:
            x[7, 0] = 2.0
        return x, y


def model():
    return torch.nn.Sequential(Rare(), *toy(("linear", "unused", "linear")))


@pytest.mark.many(2)
@pytest.mark.parametrize(
    "words",
    [
        "dp=2 overlap=priority bucket=0.0001",
        "dp=2 algorithm=ring overlap=none",
        "dp=2 offload=optimizer",
        "dp=2 sync=ps servers=2 microbatches=2",
    ],
)
def test_weight_decay_leaves_what_nothing_uses(clusters, words):
    plan = Plan.parse(words)
    decaying = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    found = train(model, Data(), plan, cluster=clusters(plan.ranks), steps=3, batch=12, loss=mse, dtype=torch.float64,
                  optimizer=decaying, check=True, progress=False)  # fmt: skip
    assert found.max_error() <= 1e-10
    made, expected = state_of(found), found.reference.parameters
    for name, value in expected.items():
        assert (made[name] - value).abs().max() <= 1e-10, name


def test_a_sum_says_whether_all_its_terms_were_missing():
    one, other = missing.like(torch.ones(3)), missing.like(torch.ones(3))
    assert missing.is_missing((one + other) * 0.5)
    assert missing.is_missing(one.to(torch.bfloat16))
    assert missing.is_missing(missing.like(torch.ones(2, dtype=torch.complex64)))
    assert not missing.is_missing(one + torch.tensor([0.0, -0.0, -0.0]))
    assert not missing.is_missing(torch.tensor([-0.0, 1.0]))
    assert not missing.is_missing(torch.ones(0))


class Beside(torch.nn.Module):
    """Hands on what the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(4, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.table * 2


class OnFirst(torch.nn.Linear):
    def forward(self, given):
        return super().forward(given[0]), given[1]


@pytest.mark.parametrize("words", ["host_layers=1", "host_layers=2", "pp=2", "schedule=zb-h1"])
def test_a_gradient_that_is_missing_stays_so_where_it_is_copied(clusters, words):
    def make():
        return torch.nn.Sequential(torch.nn.Linear(6, 6), Beside(), OnFirst(6, 6), OnFirst(6, 6))

    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    decay = partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    assert_equals_plain_torch(
        clusters, words, make, (x, x.flip(0)), lambda output, y: (output[0] - y).square().mean(), decay
    )
