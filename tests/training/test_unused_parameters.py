"""A parameter that nothing uses has no gradient, however gradients are summed: weight decay leaves it as it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minipar import Plan, train
from minipar.comm import missing
from minipar.training.evaluation import state_of
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
