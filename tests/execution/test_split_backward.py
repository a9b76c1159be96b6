"""The two halves of a backward: what each computes and keeps. (Their gradients: tests/execution/test_gradients.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minipar.execution.memory.storages import Storages
from minipar.execution.split_backward import input_half, left, noting_hooks, weight_half


def test_the_weight_half_does_not_compute_the_chain_again():
    layer = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    x = torch.randn(4, 6, requires_grad=True)
    end = layer(x)
    calls = []
    end.grad_fn.next_functions[1][0].register_prehook(lambda grads: calls.append("gelu"))
    _, arrived = input_half([get_gradient_edge(end)], [torch.ones_like(end)], [x], list(layer.parameters()))
    assert calls == ["gelu"]
    weight_half(arrived)
    assert calls == ["gelu"]
    assert len(arrived) == 2, "it begins at each of the two products"


def test_what_the_input_half_alone_needed_is_free_after_it():
    """Measured, storage by storage: of saved and gradients the inputs of products and what arrived there stay."""
    layer = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    unit = 32 * 64 * 4
    x = torch.randn(32, 64, requires_grad=True)
    with Storages() as watch:
        edges = [get_gradient_edge(layer(x))]
        watch.settle()
        assert watch.live == 3 * unit  # a product, two activations; the last output is gone
        gradient = torch.randn(32, 64)
        found, arrived = input_half(edges, [gradient], [x], list(layer.parameters()))
        del edges, gradient
        watch.settle()
        assert watch.live == (2 + 3 + 1) * unit  # inputs of the last two products, three gradients; and that of x
        assert sum(left(arrived, [*layer.parameters(), x])) == 5 * unit
        del found
        weight_half(arrived)
        del arrived
        watch.settle()
        assert watch.live == sum(p.numel() * 4 for p in layer.parameters())  # their gradients


def test_every_hook_runs_once():
    """Also of an operation at which the weight half would begin: then it does not begin there."""
    calls = []

    def hook(name):
        return lambda *_: calls.append(name)

    torch.manual_seed(0)
    for hooked in ("tensor", "operation", "before operation", "parameter", "accumulated", "retained", "module"):
        first, last = nn.Linear(6, 6), nn.Linear(6, 6)
        parameters = [*first.parameters(), *last.parameters()]
        x = torch.randn(4, 6, requires_grad=True)
        calls.clear()
        if hooked == "parameter":
            first.weight.register_hook(hook(hooked))
        elif hooked == "accumulated":
            first.weight.register_post_accumulate_grad_hook(hook(hooked))
        elif hooked == "module":
            first.register_full_backward_hook(hook(hooked))
        with noting_hooks():
            inner = first(x)
            if hooked == "tensor":
                inner.register_hook(hook(hooked))
            elif hooked == "operation":
                inner.grad_fn.register_hook(hook(hooked))
            elif hooked == "before operation":
                inner.grad_fn.register_prehook(hook(hooked))
            elif hooked == "retained":
                inner.retain_grad()
            end = last(inner.tanh())
        found, arrived = input_half([get_gradient_edge(end)], [torch.ones_like(end)], [x], parameters)
        assert all(p.grad is None for p in parameters)
        weight_half(arrived)
        assert calls == ([] if hooked == "retained" else [hooked])
        again = first(x.detach().requires_grad_())
        expected = torch.autograd.grad(last(again.tanh()).sum(), [again, *parameters])
        if hooked == "retained":
            torch.testing.assert_close(inner.grad, expected[0])
        for p, gradient in zip(parameters, expected[1:], strict=True):
            torch.testing.assert_close(p.grad, gradient)
        assert found[0] is not None


def test_a_failure_leaves_gradients_as_they_were():
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(lambda grad: 1 / 0)
    x, before = torch.randn(4, 6, requires_grad=True), torch.ones(6, 6)
    layer.weight.grad = before
    end = layer(layer(x))
    with pytest.raises(ZeroDivisionError):
        input_half([get_gradient_edge(end)], [torch.ones_like(end)], [x], list(layer.parameters()))
    assert layer.weight.grad is before
    assert layer.bias.grad is None
