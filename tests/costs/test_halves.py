"""The halves of a backward give together what the whole one gives, and the first one touches no parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minipar import models
from minipar.costs.halves import input_half, weight_half
from tests.toys import Fork

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

    found, arrived = input_half([layer(x)], [gradient], [] if first else [x], parameters)
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
    _, arrived = input_half([end], [torch.ones_like(end)], [x], list(layer.parameters()))
    assert calls == ["gelu"]
    weight_half(arrived)
    assert calls == ["gelu"]
    assert len(arrived) == 2, "it begins at each of the two products"


def test_outputs_that_are_tuples_and_inputs_that_are_not_used():
    layer = Fork(6)
    x, unused = (torch.randn(3, 6, requires_grad=True) for _ in range(2))
    out, (skip, _) = layer(x)
    found, arrived = input_half([out, skip * 1.0], [torch.ones_like(out)] * 2, [x, unused], list(layer.parameters()))
    weight_half(arrived)
    assert found[1] is None
    out, (skip, _) = layer(x)
    expected = torch.autograd.grad(out.sum() + skip.sum(), [x, layer.linear.weight])
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(layer.linear.weight.grad, expected[1])
