"""Parameters that get no gradient: never, in some steps, or on some replicas. Plain torch leaves them alone."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, train
from tests.toys import rows

pytestmark = pytest.mark.many(4)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

mse = nn.functional.mse_loss
ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


class Routed(nn.Module):
    """Rows whose first number is positive go through one weight, the others through another; a third is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.bias = nn.Linear(6, 6), nn.Parameter(torch.ones(3))
        self.left, self.right = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.common(x)
        parts = [(self.left, x[:, 0] > 0), (self.right, x[:, 0] <= 0)]
        for layer, chosen in parts:
            if chosen.any():
                y = y + layer(x) * chosen[:, None]
        return y


class ByStep:
    """Steps 0 and 1 have rows of both kinds, in different halves of the batch; step 2 of the first kind only."""

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        x, y = rows(size)
        x, sign = x.clone(), torch.ones(size)
        sign[size // 2 :] = -1 if step < 2 else 1
        x[:, 0] = x[:, 0].abs().clamp_min(0.1) * sign
        return x, y


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Routed(), nn.Tanh(), Routed())


def run(clusters, words, optimizer, **more):
    ranks = clusters(Plan.parse(words).ranks)
    return train(model, ByStep(), words, cluster=ranks, batch=8, optimizer=optimizer, loss=mse, dtype=torch.float64,
                 progress=False, **{"steps": 5, "check": True, **more})  # fmt: skip


@pytest.mark.parametrize("optimizer", [ADAMW, MOMENTUM])
@pytest.mark.parametrize(
    "words",
    [
        "dp=2 bucket=flat",
        "dp=2 zero=1",
        "dp=2 zero=2 microbatches=2",
        "dp=2 zero=3 microbatches=2 reduce=step",
        "dp=4 zero=1 overlap=none clip=0.5",
        "dp=2 zero=1 offload=optimizer offload_to=disk",
        "dp=2 pp=2 zero=3 offload=optimizer,parameters",
    ],
)
def test_they_are_left_alone(clusters, words, optimizer):
    found = run(clusters, words, optimizer)
    assert found.max_error() <= 1e-12


def test_states_of_different_ages_are_saved_and_taken_up_by_slices(clusters, tmp_path):
    """Saved by one plan after a step that one weight had no part in; taken up by others."""
    whole = run(clusters, "dp=2", ADAMW)
    for k, (one, other) in enumerate(
        [("dp=2 zero=1", "dp=2 zero=3"), ("dp=1", "dp=4 zero=2"), ("dp=2 zero=3", "pp=2")]
    ):
        folder = tmp_path / str(k)
        run(clusters, one, ADAMW, steps=3, check=False, save=folder)
        rest = run(clusters, other, ADAMW, steps=2, check=False, resume=folder)
        assert rest.losses == pytest.approx(whole.losses[3:], rel=1e-9)
