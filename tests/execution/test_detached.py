"""Layers in front of a `detach` have no backward, as in plain torch: no backward with zeros is computed for them."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from minipar import Plan
from tests.comparing import check
from tests.toys import rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Root(nn.Module):
    """Its derivative at 0, which it always meets, is infinite: 0 times it would be no number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x - x.detach()) + x.detach()


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def cut_off(width: int = 6) -> nn.Sequential:
    front = [nn.Linear(width, width), Root(), nn.Linear(width, width), Cut()]
    return nn.Sequential(*front, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


@pytest.mark.parametrize(
    "text",
    [
        "microbatches=3",
        "dp=2 zero=3",
        "pp=2 microbatches=3 split=5,2 schedule=zb-h1",
        "pp=3 microbatches=2 split=2,1,4 schedule=zb-h1",
        "pp=2 dp=2 microbatches=2 split=3,4 zero=1 checkpoint=1",
    ],
)
def test_no_gradient_passes_a_detach(clusters, text):
    """Within a rank, whatever cuts the layers apart, and from rank to rank."""
    check(clusters, Plan.parse(text), partial(cut_off), rows(11), steps=3)
