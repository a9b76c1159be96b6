"""Tensors that autograd saves for a layer can be moved out and back, and no other tensors move with them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from minipar.errors import RankError
from minipar.execution.saved_tensors import SavedTensors


def forward(layer, x: Tensor) -> tuple[Tensor, SavedTensors]:
    kept = SavedTensors([x, *(layer.parameters() if isinstance(layer, nn.Module) else ())])
    with kept.saving():
        y = layer(x)
    kept.settle([y])
    return y, kept


def test_its_memory_is_free_while_it_is_away():
    x = torch.randn(5, 4, requires_grad=True)
    refs: list[weakref.ref] = []

    def layer(x):
        inner = torch.exp(x)
        refs.append(weakref.ref(inner.untyped_storage()))
        return torch.sin(inner)

    gc.disable()
    try:
        y, kept = forward(layer, x)
        assert refs[0]() is not None
        kept.let_go()
        assert refs[0]() is None
    finally:
        gc.enable()
    assert y.grad_fn is not None


def test_views_of_a_storage_go_together_and_once():
    def layer(x):
        q, k, v = torch.cat([x, x, x], 1).chunk(3, 1)
        return (q * k) @ v.T

    x = torch.randn(4, 4, requires_grad=True)
    _, kept = forward(layer, x)
    assert sorted(slot.nbytes for slot in kept.slots) == [4 * 16, 4 * 48]
    assert kept.nbytes == 4 * 64


def test_input_output_and_parameters_stay():
    x = torch.randn(5, 4, requires_grad=True)
    for layer in (nn.Tanh(), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())):
        y, kept = forward(layer, x)
        assert kept.slots == []
        y.sum().backward()


def test_a_tensor_that_was_changed_in_place_is_refused_as_autograd_would():
    holder: list[Tensor] = []

    def layer(x):
        holder.append(x * 2)
        return torch.sin(holder[0])

    x = torch.randn(3, requires_grad=True)
    y, kept = forward(layer, x)
    with torch.no_grad():
        holder[0].add_(1)
    with pytest.raises(RankError, match="changed in place"):
        kept.slots[0].check()
    with pytest.raises(RankError, match="changed in place"):
        y.sum().backward()
