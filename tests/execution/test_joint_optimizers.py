"""Optimizers that look at all parameters of the model: equal to plain torch, or refused before anything is trained."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from minipar import Plan, PlanError, train
from tests.plain_loop import assert_equals_plain_torch, rows

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.many(3)

cross_entropy = nn.functional.cross_entropy
WHOLE = ["", "microbatches=2", "dp=2", "dp=4 microbatches=2"]
PARTS = ["pp=2", "dp=2 pp=2 microbatches=2", "pp=2 schedule=zb-h1 microbatches=2", "offload=optimizer",
         "dp=2 overlap=priority", "dp=2 zero=1", "dp=4 zero=3", "tp=2", "dp=2 sync=ps"]  # fmt: skip


class Norm(torch.optim.SGD):
    """Gradients of the whole model have the norm 1."""

    def step(self, closure: Any = None) -> Any:
        found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        whole = torch.stack([g.norm() for g in found]).norm()
        for g in found:
            g.div_(whole)
        return super().step(closure)


class Lamb(torch.optim.Optimizer):
    """Steps as long as each parameter; gradients are cut where those of the whole model are too long."""

    def __init__(self, parameters: Any, longest: float) -> None:
        super().__init__(parameters, {"lr": 0.1, "longest": longest})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = max(1.0, float(sum(p.grad.square().sum() for p in found)) ** 0.5 / self.param_groups[0]["longest"])
        for p in found:
            g = p.grad / scale + 0.1 * p
            p -= self.param_groups[0]["lr"] * p.norm() / g.norm() * g


class Attribute(torch.optim.SGD):
    """A number about all groups that steps leave behind in the optimizer for the next one."""

    seen = 0.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / (1.0 + self.seen)
        self.seen = sum(float(p.detach().abs().sum()) for group in self.param_groups for p in group["params"])
        return super().step(closure)


class OwnList(torch.optim.SGD):
    """Updates the parameters that it was made of, and not those in its groups."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.own = list(parameters)
        super().__init__(self.own, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.own:
            if p.grad is not None:
                p -= 0.1 * p.grad


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    half = len(parameters) // 2
    return Attribute([{"params": parameters[:half], "lr": 0.3}, {"params": parameters[half:]}], lr=0.1)


class Late(Norm):
    """From its fifth step on."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        return torch.optim.SGD.step(self, closure) if self.done < 5 else super().step(closure)


class Noisy(torch.optim.SGD):
    """Langevin dynamics."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p), alpha=0.01)
        return super().step(closure)


JOINT = {
    "norm": partial(Norm, lr=0.1), "lamb": partial(Lamb, longest=0.01), "attribute": two_groups,
    "late": partial(Late, lr=0.1),
}  # fmt: skip


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("plan", WHOLE)
@pytest.mark.parametrize("kind", JOINT)
def test_where_each_rank_has_all_parameters_they_are_right(clusters, plan, kind):
    assert_equals_plain_torch(clusters, plan, model, rows(), cross_entropy, JOINT[kind])


@pytest.mark.parametrize("plan", PARTS)
@pytest.mark.parametrize("kind", JOINT)
def test_where_a_step_has_fewer_parameters_they_are_refused_by_name(clusters, plan, kind):
    go = partial(train, model, rows(), plan, cluster=clusters(Plan.parse(plan).ranks), progress=False)
    with pytest.raises(
        PlanError, match="optimizer (Norm|Lamb|Attribute|Late): (updates|cannot update) .*; p(lan|rogram) '"
    ):
        go(optimizer=JOINT[kind])


@pytest.mark.parametrize("plan", ["pp=2", "dp=2 pp=2 microbatches=2", "dp=2 overlap=priority"])
def test_an_optimizer_that_looks_at_one_parameter_at_a_time_is_right(clusters, plan):
    """However long the whole gradient is: the step of a parameter depends on its own norm alone."""
    own = partial(Lamb, longest=1e9)
    assert_equals_plain_torch(clusters, plan, model, rows(), cross_entropy, own)


@pytest.mark.parametrize("plan", ["", "pp=2", "dp=2 zero=1"])
def test_an_optimizer_with_a_list_of_its_own_is_refused(clusters, plan):
    with pytest.raises(PlanError, match="optimizer OwnList: does not update 0.weight by .* param_groups"):
        train(model, rows(), plan, cluster=clusters(Plan.parse(plan).ranks), optimizer=partial(OwnList, lr=0.1))


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_an_optimizer_that_draws_is_refused(clusters, plan):
    with pytest.raises(PlanError, match="optimizer Noisy: draws random numbers in step.*torch.Generator of its own"):
        train(model, rows(), plan, cluster=clusters(Plan.parse(plan).ranks), optimizer=partial(Noisy, lr=0.1))


@pytest.mark.parametrize("plan", ["", "dp=2", "pp=2", "dp=2 zero=1", "dp=2 sync=ps"])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name(clusters, plan):
    with pytest.raises(PlanError, match="optimizer LBFGS: its step.. needs a closure .*such as SGD, Adam"):
        train(model, rows(), plan, cluster=clusters(Plan.parse(plan).ranks), optimizer=torch.optim.LBFGS)
