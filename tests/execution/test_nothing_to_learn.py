"""A loss that depends on no parameter: plain torch raises in its backward, and a run before its first update."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, RankError, train
from tests.toys import rows

pytestmark = pytest.mark.many(4)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

mse = nn.functional.mse_loss


class Off(nn.Module):
    """Leaves the output without a graph."""

    def __init__(self, every: bool = True) -> None:
        super().__init__()
        self.weight, self.every = nn.Parameter(torch.ones(6)), every

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * self.weight
        return y if self.every else y + x * self.weight


def model(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), *more)


def detached(output: Tensor, y: Tensor) -> Tensor:
    return mse(output, y).detach()


PLANS = ["microbatches=1", "dp=2 zero=1", "pp=2 microbatches=2 checkpoint=1", "pp=2 schedule=zb-h1 microbatches=2",
         "pp=2 schedule=pipedream microbatches=2", "dp=2 sync=ps"]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("by", ["loss", "layer"])
def test_it_is_refused(clusters, plan, by):
    make, loss = (model, detached) if by == "loss" else (partial(model, Off()), mse)
    with pytest.raises(RankError, match="the loss of step 0 depends on no parameter"):
        train(make, rows(8), plan, cluster=clusters(Plan.parse(plan).ranks), steps=2, loss=loss, dtype=torch.float64,
              progress=False)  # fmt: skip


def test_a_part_without_a_graph_is_no_error(clusters):
    run = train(partial(model, Off(every=False)), rows(8), "pp=2 microbatches=2", cluster=clusters(2), steps=3,
                loss=mse, dtype=torch.float64, progress=False, check=True)  # fmt: skip
    assert run.max_error() <= 1e-12
    assert run.losses[-1] < run.losses[0]
