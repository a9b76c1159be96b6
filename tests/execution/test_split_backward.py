"""The two halves of a backward together give the whole backward's gradients; the first half changes no parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from minipar import models
from minipar.execution.memory.storages import Storages
from minipar.execution.split_backward import input_half, left, noting_hooks, weight_half
from tests.toys import Fork, Tied

LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "deep": lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 6), nn.ReLU()),
    "without parameters": lambda: nn.GELU(),
    "frozen": lambda: nn.Linear(6, 6).requires_grad_(False),
    "block": lambda: models.build("gpt-tiny", width=6, heads=2)[1],
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("first", [False, True], ids=["inner layer", "first layer"])
def test_halves_are_the_whole(name, first):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(2, 5, 6, requires_grad=not first)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    end = layer(x)
    if not end.requires_grad:
        with pytest.raises(RuntimeError):
            end.sum().backward()
        return
    gradient = torch.randn_like(end)
    end.backward(gradient)
    expected, expected_input = [p.grad for p in parameters], x.grad
    for p in parameters:
        p.grad = None
    x.grad = None

    found, arrived = input_half([get_gradient_edge(layer(x))], [gradient], [] if first else [x], parameters)
    assert all(p.grad is None for p in parameters), "the input half leaves the parameters alone"
    weight_half(arrived)
    if not first:
        assert torch.equal(found[0], expected_input)
    for p, whole in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad, whole)


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


def test_outputs_that_are_tuples_and_inputs_that_are_not_used():
    layer = Fork(6)
    x, unused = (torch.randn(3, 6, requires_grad=True) for _ in range(2))
    out, (skip, _) = layer(x)
    ends = [get_gradient_edge(end) for end in (out, skip * 1.0)]
    found, arrived = input_half(ends, [torch.ones_like(out)] * 2, [x, unused], list(layer.parameters()))
    weight_half(arrived)
    assert found[1] is None
    out, (skip, _) = layer(x)
    expected = torch.autograd.grad(out.sum() + skip.sum(), [x, layer.linear.weight])
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(layer.linear.weight.grad, expected[1])


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


@pytest.mark.parametrize("transposed", [False, True])
def test_where_two_operations_share_a_parameter_the_input_half_does_it_all(transposed):
    shared = nn.Linear(6, 6)
    layer = nn.Sequential(shared, nn.GELU(), Tied(shared, transposed), nn.Linear(6, 6))
    x = torch.randn(4, 6, requires_grad=True)
    parameters = list(layer.parameters())
    end = layer(x)
    expected = torch.autograd.grad(end, [x, *parameters], torch.ones_like(end))
    end = layer(x)
    found, arrived = input_half([get_gradient_edge(end)], [torch.ones_like(end)], [x], parameters)
    assert all(p.grad is None for p in parameters)
    for _ in range(2):
        weight_half(arrived)  # (nothing is computed: once more adds the same again)
    assert torch.equal(found[0], expected[0])
    for p, gradient in zip(parameters, expected[1:], strict=True):
        torch.testing.assert_close(p.grad, 2 * gradient)


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


def test_what_waits_beside_the_way_to_the_input():
    """An output without a way to the input is left to the weight half, and so is the rest, split as always."""
    layer, beside = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), nn.Parameter(torch.ones(4, 6))
    x = torch.randn(4, 6, requires_grad=True)
    parameters = [*layer.parameters(), beside]
    ends = [get_gradient_edge(end) for end in (layer(x), beside.exp(), beside)]
    found, arrived = input_half(ends, [torch.ones(4, 6)] * 3, [x], parameters)
    assert [len(each.edges) for each in arrived] == [2, 1, 1]
    assert all(p.grad is None for p in parameters)
    weight_half(arrived)
    torch.testing.assert_close(beside.grad, 1 + beside.detach().exp())
    expected = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    for gradient, whole in zip([found[0], *(p.grad for p in layer.parameters())], expected, strict=True):
        torch.testing.assert_close(gradient, whole)


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
