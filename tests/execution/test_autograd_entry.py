"""Direct calls of the autograd engine give what torch.autograd gives, and refuse what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from minipar.execution import autograd_entry


@pytest.fixture(params=["direct", "by torch.autograd"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: the second is for a torch that has no such function."""
    if request.param == "direct":
        assert autograd_entry._enter is not None
    else:
        monkeypatch.setattr(autograd_entry, "_enter", None)


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return x, w, torch.randn(3, 3, dtype=torch.float64)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("one", [None, torch.tensor(1.0, dtype=torch.float64)])
def test_gradients_are_added_to_all_leaves_or_to_some(chosen: bool, one: Tensor | None) -> None:
    x, w, g = leaves()
    x.grad = torch.ones_like(x)
    y, z = x @ w, (x * w).sum()  # z is a scalar: its gradient of None is 1
    autograd_entry.backward([get_gradient_edge(y), get_gradient_edge(z)], [g, one], [w] if chosen else [])
    assert w.grad is not None
    assert torch.allclose(w.grad, x.detach().T @ g + x.detach(), rtol=1e-12)
    expected = torch.ones_like(x) if chosen else 1 + g @ w.detach().T + w.detach()
    assert torch.allclose(x.grad, expected, rtol=1e-12)


@pytest.mark.usefixtures("way")
def test_a_graph_is_let_go_by_backward_and_stays_where_gradients_are_asked_for() -> None:
    x, w, g = leaves()
    edge = get_gradient_edge((x @ w).relu())
    first, none = autograd_entry.gradients_of([x, torch.ones(2, requires_grad=True)], [edge], [g])
    assert none is None
    assert first is not None
    autograd_entry.backward([edge], [g])
    assert x.grad is not None
    assert torch.equal(x.grad, first)
    with pytest.raises(RuntimeError, match="second time"):
        autograd_entry.backward([edge], [g])


@pytest.mark.usefixtures("way")
def test_a_gradient_of_another_shape_is_refused() -> None:
    x, w, _ = leaves()
    with pytest.raises(RuntimeError, match="shape"):
        autograd_entry.backward([get_gradient_edge(x @ w)], [torch.ones(2, 2, dtype=torch.float64)])


@pytest.mark.usefixtures("way")
def test_of_more_than_a_scalar_a_gradient_has_to_be_given() -> None:
    x, w, _ = leaves()
    with pytest.raises(RuntimeError, match="scalar"):
        autograd_entry.backward([get_gradient_edge(x @ w)], [None])
