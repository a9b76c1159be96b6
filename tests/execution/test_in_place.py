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

from minipar import Plan, PlanError, RankError, train
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


def _with_view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x[:, :2]


def _in_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :3] * 1, (x * 2)[:, 3:]


def _side_by_side(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :3], x[:, 3:]


@pytest.mark.parametrize("words", ["", "pp=2"])
def test_a_change_that_a_view_would_show_is_refused(clusters, words):
    """In plain torch the view changes, too; between layers each tensor is by itself."""
    model = partial(_ended, _with_view)
    with pytest.raises(PlanError, match=r"layer 2 \(Of\): changes a tensor of its input in place, .* clone\(\) before"):
        train(
            model, rows(8), words, cluster=clusters(Plan.parse(words).ranks), loss=F.mse_loss, progress=False, steps=1
        )


@pytest.mark.parametrize("fork", [_in_halves, _side_by_side])
def test_a_change_beside_another_tensor_is_not(clusters, fork):
    run = train(partial(_ended, fork), rows(8), "pp=2", cluster=clusters(2), loss=F.mse_loss, progress=False, steps=2,
                check=True)  # fmt: skip
    assert run.max_error() < 1e-6


def _ended(fork: Callable[[Tensor], tuple[Tensor, Tensor]]) -> nn.Sequential:
    """The first layer's output in two, of which the third changes one in place."""
    torch.manual_seed(0)
    changed = Of(lambda parts: torch.cat([parts[0].mul_(1.5), parts[1]], 1))
    width = WIDTH + 2 if fork is _with_view else WIDTH
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Of(fork), changed, nn.Linear(width, WIDTH))
