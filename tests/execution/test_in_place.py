"""Any layer may write into its input in any way: gradients stay correct, and the user's data do not change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minipar import Plan, RankError
from minipar.cluster import worker
from minipar.models.network import Network
from tests.comparing import check
from tests.toys import rows

pytestmark = pytest.mark.many(3)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WIDTH = 6


class Of(nn.Module):
    """A layer that is a function of its input."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def assigned(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def past_autograd(x: Tensor) -> Tensor:
    x.data.mul_(0.5)
    return x * 2


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": partial(F.elu, inplace=True),
    "add": lambda x: x.add_(1),
    "assigned": assigned,
    "data": past_autograd,
}


def first(way: str) -> nn.Sequential:
    """Overwrites the user's rows, and later what a layer handed on as it was."""
    overwrite = Of(WAYS[way])
    layers = [nn.Flatten(), overwrite, nn.Linear(WIDTH, WIDTH), nn.Identity(), Of(WAYS[way]), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Dropout(0.0), nn.Flatten(), Of(WAYS["elu"]),
                         nn.Linear(WIDTH, WIDTH))  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("text", ["checkpoint=1", "pp=4 schedule=gpipe checkpoint=2", "dp=1 pp=1"])
def test_first_and_behind_what_hands_its_input_on(clusters, text, way):
    data = rows(9)
    before = data[0].clone()
    check(clusters, Plan.parse(f"{text} microbatches=1"), partial(first, way), data, steps=3)
    assert torch.equal(data[0], before)


def parted(way: str) -> nn.Sequential:
    return nn.Sequential(Of(WAYS[way]), *(layer for layer in first(way) if not isinstance(layer, nn.BatchNorm1d)))


@pytest.mark.parametrize(
    "text",
    ["pp=2 microbatches=4 schedule=zb-h1 checkpoint=1", "offload=optimizer checkpoint=sqrt", "dp=2 zero=3"],
)
def test_a_batch_in_parts(clusters, text):
    check(clusters, Plan.parse(text), partial(parted, "add"), rows(9), steps=3)


def branches() -> Network:
    """Two readers of one output, the first of which writes into it, behind a layer that hands it on."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.Identity(), Of(WAYS["add"]), nn.Linear(WIDTH, WIDTH), Of(sum)]
    return Network(layers, [(0, 1), (1, 2), (0, 3), (2, 4), (3, 4)])


def test_branches(clusters):
    check(clusters, Plan.parse("pp=2 microbatches=2"), branches, rows(8), steps=2)


def spoiling(output: Tensor, y: Tensor) -> Tensor:
    """A loss that writes into its targets."""
    return (output - y.mul_(0.5)).square().mean()


def test_a_loss_that_writes_into_its_targets(clusters):
    data = rows(8)
    before = data[1].clone()
    check(clusters, Plan.parse("microbatches=2 checkpoint=1"), partial(parted, "elu"), data, loss=spoiling, steps=3)
    assert torch.equal(data[1], before)


class Unlucky(nn.Module):
    """Raises at its first call on a rank, and never again."""

    called = False

    def forward(self, x: Tensor) -> Tensor:
        if worker.in_rank() and not self.called:
            self.called = True
            raise OSError("no luck")
        return x * 2


def test_an_error_that_has_nothing_to_do_with_writes_is_told(clusters):
    """The first run of a layer is tried again only if it wrote into its input."""
    with pytest.raises(RankError, match="OSError: no luck"):
        check(clusters, Plan.parse("microbatches=2"), lambda: nn.Sequential(nn.Flatten(), Unlucky()), rows(8))
