"""Losses that reach parameters are refused before the run; penalties in their documented places are right."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, PlanError, train
from minipar.models import losses
from tests.plain_loop import assert_equals_plain_torch, rows

pytestmark = pytest.mark.many(3)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

cross_entropy = nn.functional.cross_entropy
PLANS = ["", "dp=2 microbatches=2", "pp=2 microbatches=4", "dp=2 pp=2 schedule=zb-h1 microbatches=2", "dp=2 zero=1",
         "dp=4 zero=3 microbatches=2", "tp=2", "dp=2 sync=ps", "offload=optimizer", "dp=2 overlap=priority",
         "pp=2 checkpoint=sqrt microbatches=2", "dp=2 accumulate=2"]  # fmt: skip


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


# what is refused ------------------------------------------------------------------------------------------------------

NET = model()
HELPERS = types.ModuleType("helpers")
HELPERS.net = NET  # type: ignore[attr-defined]


def penalty() -> Any:
    return 0.1 * sum(p.square().sum() for p in NET.parameters())


def by_global(output: Any, y: Any) -> Any:
    return cross_entropy(output, y) + 0.1 * NET[0].weight.square().sum()


def by_helper(output: Any, y: Any) -> Any:
    return cross_entropy(output, y) + penalty()


def by_module(output: Any, y: Any) -> Any:
    return cross_entropy(output, y) + HELPERS.net[0].weight.square().sum()


def by_inner(output: Any, y: Any) -> Any:
    return cross_entropy(output, y) + sum(p.square().sum() for p in NET.parameters())


def by_argument(output: Any, y: Any, net: Any = None) -> Any:
    return cross_entropy(output, y) + net[0].weight.square().sum()


def by_default(output: Any, y: Any, net: Any = NET) -> Any:
    return by_argument(output, y, net)


def by_closure(held: Any) -> Any:
    return lambda output, y: cross_entropy(output, y) + 0 * len(str(held))


@dataclass
class Held:
    one: Any = None
    several: dict[str, list[Any]] = field(default_factory=dict)

    def loss(self, output: Any, y: Any) -> Any:
        return cross_entropy(output, y)


class ByMethod:
    def __call__(self, output: Any, y: Any) -> Any:
        return cross_entropy(output, y) + self.more()

    def more(self) -> Any:
        return penalty()


class Module(nn.Module):
    """Holds a network in a plain list, where torch does not find it, or in the usual way."""

    def __init__(self, hidden: bool, net: nn.Module) -> None:
        super().__init__()
        self.net = [net] if hidden else net

    def forward(self, output: Any, y: Any) -> Any:
        return cross_entropy(output, y)


REACHING = {
    "global": by_global, "helper": by_helper, "module": by_module, "inner": by_inner, "default": by_default,
    "partial": partial(by_argument, net=NET), "partial of a list": partial(by_argument, net=[NET]),
    "closure": by_closure(NET), "parameter": by_closure(NET[0].weight), "tuple of dicts": by_closure(({"a": [NET]},)),
    "dataclass": by_closure(Held(NET)), "nested": Held(None, {"a": [NET[2]]}).loss, "bound": Held(NET[0].bias).loss,
    "method": ByMethod(), "module attribute": Module(False, NET), "hidden": Module(True, NET),
    "weighted": losses.weighted(by_global, count=len),
    "not a leaf": by_closure(NET[0].weight * 2),
    "own": by_closure(torch.zeros(2, requires_grad=True)),
}  # fmt: skip


@pytest.mark.parametrize("plan", ["", "pp=2", "dp=2 zero=3"])
@pytest.mark.parametrize("way", REACHING)
def test_a_loss_that_reaches_parameters_is_refused_with_the_way_out(clusters, way, plan):
    with pytest.raises(PlanError, match="^loss: reaches .* needs a gradient; .* docs/own_model.md"):
        train(model, rows(), plan, cluster=clusters(Plan.parse(plan).ranks), loss=REACHING[way], progress=False)


def test_it_says_where():
    for way, path in (("nested", r"loss\.several\['a'\]\[0\]\.weight"), ("partial", r"loss\(net=...\)\.0\.weight"),
                      ("global", r"NET\.0\.weight"), ("hidden", r"loss\.net\[0\]\.0\.weight")):  # fmt: skip
        with pytest.raises(PlanError, match=f"reaches {path}, of shape"):
            losses.check_loss(REACHING[way])


def test_a_frozen_network_and_library_functions_are_accepted():
    frozen = model().requires_grad_(False)
    for loss in (by_closure(frozen), Module(True, frozen), nn.CrossEntropyLoss(torch.ones(3)), torch.nn.MSELoss(),
                 by_closure(model), by_closure(torch.ones(3))):  # fmt: skip
        losses.check_loss(loss)


# where a penalty belongs ----------------------------------------------------------------------------------------------


def lasso(optimizer: torch.optim.Optimizer, given: Any, named: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.add_(p.detach().sign(), alpha=0.01)


def with_lasso(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lasso)
    return optimizer


@pytest.mark.parametrize("plan", PLANS)
def test_a_penalty_in_a_hook_of_the_optimizer_is_that_of_plain_torch(clusters, plan):
    assert_equals_plain_torch(clusters, plan, model, rows(), cross_entropy, with_lasso)


@pytest.mark.parametrize("plan", PLANS)
def test_weight_decay_is_the_square_as_a_penalty(clusters, plan):
    decay = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.2)
    assert_equals_plain_torch(clusters, plan, model, rows(), cross_entropy, decay)


class Noting(nn.Module):
    """Hands on a number a row beside its output: how large its activations are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Any) -> tuple[Tensor, Tensor]:
        x, size = x if isinstance(x, tuple) else (x, torch.zeros(len(x), dtype=x.dtype))
        y = torch.tanh(self.layer(x))
        return y, size + y.square().sum(1)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.layer(x[0]), x[1]


def noting() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Noting(), Noting(), Head())


def with_activity(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return cross_entropy(output[0], y) + 0.1 * output[1].mean()


@pytest.mark.parametrize("plan", PLANS)
def test_a_penalty_on_activations_in_the_output_is_right(clusters, plan):
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert_equals_plain_torch(clusters, plan, noting, rows(), with_activity, sgd)
