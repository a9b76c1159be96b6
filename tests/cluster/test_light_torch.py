"""Optimizers and the counter of FLOPs in ranks: no compiler is imported for them, and they do what torch's own do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from minipar.cluster import Cluster

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NAMES = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "LBFGS"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(1, device="cpu", start="fork") as made:
        yield made


def trained(names: list[str]) -> dict[str, torch.Tensor]:
    """Parameters after some steps of each optimizer, with all that one does with them."""
    found = {}
    for name in names:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4))
        optimizer: Any = getattr(torch.optim, name)([parameter], lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

        def closure(optimizer: Any = optimizer, parameter: Any = parameter) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (parameter**2).sum()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
            assert torch.is_grad_enabled()
            scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
        if name != "LBFGS":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        found[name] = parameter.detach()
    return found


def test_optimizers_need_no_compiler_and_do_the_same(cluster: Cluster) -> None:
    expected = trained(NAMES)

    def f() -> tuple[dict[str, torch.Tensor], bool, dict[str, torch.Tensor], bool, torch.Tensor]:
        import torch

        first = trained(NAMES), "torch._dynamo" in sys.modules
        doubled = torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
        return *first, trained(NAMES), "torch._dynamo" in sys.modules, doubled

    [(before, imported_before, after, imported_after, doubled)] = cluster.run(f)
    assert not imported_before or "torch.export._trace" in sys.modules  # (an earlier test has captured a model)
    assert imported_after
    assert doubled.tolist() == [2.0, 2.0]
    for name in NAMES:
        assert torch.equal(before[name], expected[name]), name
        assert torch.equal(after[name], expected[name]), name


def test_gradients_through_a_step_and_other_peoples_optimizers(cluster: Cluster) -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter -= parameter.grad

    def f() -> tuple[float, float, bool]:
        start = torch.tensor(2.0, requires_grad=True)
        weight = start.clone()
        weight.grad = weight.detach() * 3
        torch.optim.SGD([weight], lr=0.5, differentiable=True).step()
        weight.backward()
        assert start.grad is not None
        parameter = torch.nn.Parameter(torch.tensor(5.0))
        parameter.grad = torch.tensor(2.0)
        Own([parameter]).step()
        return float(start.grad), float(parameter), "torch._dynamo" in sys.modules

    [(gradient, stepped, imported)] = cluster.run(f)
    assert (gradient, stepped) == (1.0, 3.0)
    assert not imported or "torch.export._trace" in sys.modules


def counted() -> tuple[int, int]:
    """FLOPs of a product's forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(3, 4, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = (x @ torch.ones(4, 5)).sum()
    with FlopCounterMode(display=False) as backward:
        y.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_the_counter_of_flops_needs_no_compiler_and_counts_the_same(cluster: Cluster) -> None:
    def f() -> tuple[Any, ...]:
        first = counted(), "torch._dynamo" in sys.modules
        import torch._dynamo

        return *first, counted(), bool(torch._dynamo)

    [(before, imported_before, after, imported_after)] = cluster.run(f)
    assert before == after == (120, 120)
    assert not imported_before or "torch.export._trace" in sys.modules
    assert imported_after
