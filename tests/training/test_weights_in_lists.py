"""Weights that layers share through lists, closures, objects and global names, which torch does not see; compared with
plain torch."""

from __future__ import annotations

import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from minipar import PlanError, RankError, train
from minipar.models import unregistered
from tests.plain_loop import assert_equals_plain_torch, rows

SGD = partial(torch.optim.SGD, lr=0.1)


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


def _of_one_memory(how: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    if how == "transposed":
        model[2].weight.data = model[0].weight.data.t()
    elif how == "buffer":
        model[2].register_buffer("old", model[0].weight.data[:2])
    else:  # neighbours, as those of torch's recurrent layers are on a GPU
        model[0].weight.data, model[2].weight.data = torch.ones(12, 6).chunk(2)
    return model


@pytest.mark.parametrize("how", ["transposed", "buffer"])
def test_two_tensors_of_one_memory_are_refused(how):
    with pytest.raises(PlanError, match=r"0\.weight and 2\.(weight|old)|2\.(weight|old) and 0\.weight"):
        unregistered.check_memory(_of_one_memory(how))
    unregistered.check_memory(_of_one_memory("neighbours"))


class Clamped(nn.Linear):
    """Its forward writes into its weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def bounded(frozen: bool) -> nn.Sequential:
    clamped = Clamped(6, 6)
    clamped.weight.requires_grad_(not frozen)
    return nn.Sequential(nn.Linear(6, 6), clamped, nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize(("words", "frozen"), [("dp=2 zero=3", False), ("tp=2", False), ("checkpoint=1", True)])
def test_a_forward_that_writes_into_parameters_is_refused(clusters, words, frozen):
    with pytest.raises(PlanError, match=r"layer 1 \(Clamped\): its forward writes into its parameter weight"):
        train(partial(bounded, frozen), rows(), words, cluster=clusters(2 if "2" in words else 1), progress=False)


@pytest.mark.parametrize(("words", "frozen"), [("pp=2", False), ("dp=2 zero=3", True)])
def test_where_it_stays_it_is_plain_torch_s(clusters, words, frozen):
    assert_equals_plain_torch(clusters, words, partial(bounded, frozen), rows(), functional.cross_entropy, SGD)


def drawn(how: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    numbers = {"numpy": lambda: np.random.randn(6, 6), "python": lambda: random.random(), "system": os.getpid}[how]()
    with torch.no_grad():
        model[0].weight.mul_(torch.as_tensor(numbers))
    return model


@pytest.mark.parametrize("how", ["numpy", "python"])
def test_ranks_make_the_same_model_of_any_generator(clusters, how):
    options = {"dtype": torch.float64, "cluster": clusters(2), "progress": False, "check": True, "steps": 2}
    assert train(partial(drawn, how), rows(), "dp=2", **options).max_error() < 1e-12


def test_models_that_differ_from_rank_to_rank_are_refused(clusters):
    with pytest.raises(PlanError, match="its function makes other numbers on each rank"):
        train(partial(drawn, "system"), rows(), "dp=2", cluster=clusters(2), progress=False)
