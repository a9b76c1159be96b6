"""Weights that layers share through lists, closures, objects and global names, which torch does not see; compared with
plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from minipar import PlanError, RankError, train
from minipar.models import unregistered
from tests.plain_loop import assert_equals_plain_torch


class Holder:
    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight


HELD = Holder(nn.Parameter(torch.ones(6, 6)))


class Applies(nn.Module):
    """Uses a weight that it keeps as it is told to."""

    def __init__(self, weight: nn.Parameter, how: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        if how == "list":
            self.kept = [weight]
        elif how == "nested":
            self.kept = {"all": ([weight],)}
        elif how == "closure":
            self.kept = lambda x: functional.linear(x, weight)
        elif how == "partial":
            self.kept = partial(functional.linear, weight=weight)
        elif how == "object":
            self.kept = Holder(weight)
        elif how == "global":
            HELD.weight = weight
        else:
            self.__dict__["kept"] = weight
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("closure", "partial"):
            return self.kept(x) * self.scale
        if self.how in ("object", "global"):
            return functional.linear(x, (HELD if self.how == "global" else self.kept).weight) * self.scale
        weight = (
            self.kept if self.how == "attribute" else self.kept[0] if self.how == "list" else self.kept["all"][0][0]
        )
        return functional.linear(x, weight) * self.scale


def make(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(6, 6)
    return nn.Sequential(first, nn.Tanh(), Applies(first.weight, how), nn.Linear(6, 3))


@pytest.mark.parametrize("how", ["list", "nested", "closure", "partial", "attribute", "object", "global"])
def test_such_a_weight_is_a_tie(how):
    model = make(how)
    names = [name for name, _ in model.named_parameters()]
    unregistered.register(model)
    assert any(p is model[0].weight for p in model[2].parameters())
    assert [name for name, _ in model.named_parameters()] == names  # it has its own name


@pytest.mark.many(4)
@pytest.mark.parametrize(
    "words",
    ["pp=2", "schedule=zb-h1", "dp=2 zero=3", "offload=parameters", "pp=2 schedule=zb-v microbatches=4", "tp=2",
     "sync=ps dp=2"],
)  # fmt: skip
@pytest.mark.parametrize("how", ["list", "closure", "global"])
def test_it_trains_as_in_plain_torch(clusters, words, how):
    torch.manual_seed(1)
    data = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert_equals_plain_torch(clusters, words, partial(make, how), data, functional.cross_entropy, sgd)


def test_what_holds_the_layer_itself_is_no_tie():
    model = make("list")
    model[2].kept = [model]
    model[1].kept = [nn.Parameter(torch.ones(2))]  # and nobody else's parameter is nobody else's
    unregistered.register(model)
    assert len(list(model[2].parameters())) == 1
    assert not list(model[1].parameters())


def test_a_weight_of_a_later_layer_is_refused():
    model = nn.Sequential(nn.Tanh(), nn.Linear(6, 6))
    model[0].kept = [model[1].weight]
    with pytest.raises(PlanError, match=r"layer 0 \(Tanh\) keeps a parameter of layer 1 in kept\[0\], .* = other"):
        unregistered.register(model)


class Growing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(6))
        return x * self.scale


@pytest.mark.parametrize("words", ["dp=2", "pp=2 checkpoint=1"])
def test_a_parameter_that_a_forward_registers_is_named_before_training(clusters, words):
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), Growing(), nn.Linear(6, 3))

    data = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with pytest.raises(RankError, match=r"a layer \(Growing\) registered its parameter scale in its forward"):
        train(build, data, words, cluster=clusters(2), steps=2, progress=False)
