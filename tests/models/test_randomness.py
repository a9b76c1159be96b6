"""Dropout as a function of (seed, step, row, layer name)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minipar import data, models
from minipar.models import randomness
from minipar.models.randomness import RowDropout, at, replace_dropout, row_dropouts, split_sensitive
from tests import outside


def mask(seed=0, name="a", step=0, first_row=0, rows=8, width=64, p=0.5):
    dropout = RowDropout(p, seed, name)
    at([dropout], step, first_row)
    return dropout(torch.ones(rows, width))


def test_any_split_of_the_rows_sees_the_same_mask():
    whole = mask(rows=8)
    assert torch.equal(whole, torch.cat([mask(rows=3), mask(first_row=3, rows=1), mask(first_row=4, rows=4)]))


@pytest.mark.parametrize("other", [{"seed": 1}, {"name": "b"}, {"step": 1}, {"first_row": 8}])
def test_everything_in_the_key_matters(other):
    differing = (mask() != mask(**other)).float().mean()
    assert 0.4 < differing < 0.6


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_drops_with_probability_p_and_keeps_the_mean(p):
    kept = mask(rows=200, width=500, p=p)
    assert (kept == 0).float().mean().item() == pytest.approx(p, abs=0.01)
    assert kept.mean().item() == pytest.approx(1.0, abs=0.03)


def test_rows_and_columns_are_not_alike():
    drawn = (mask(rows=100, width=100) == 0).double()
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.5
    assert torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max() < 0.5


def test_more_dimensions_no_rows_evaluation_and_extremes():
    dropout = RowDropout(0.5, 0, "a")
    assert dropout(torch.ones(2, 3, 4)).shape == (2, 3, 4)
    assert dropout(torch.ones(0, 3)).shape == (0, 3)
    assert dropout(torch.ones(5)).shape == (5,)
    assert torch.equal(dropout.eval()(torch.ones(4, 4)), torch.ones(4, 4))
    assert mask(p=1.0).abs().sum() == 0
    assert torch.equal(mask(p=0.0), torch.ones(8, 64))


def test_replaces_every_dropout_of_a_model_and_names_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.3), nn.Sequential(nn.Dropout(0.2))))
    replace_dropout(model, seed=7)
    found = row_dropouts(model)
    assert [(d.p, d.name, d.seed) for d in found] == [(0.3, "1.0", 7), (0.2, "1.1.0", 7)]
    assert not any(type(module) is nn.Dropout for module in model.modules())


def test_modules_that_feel_the_split_are_named():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Dropout1d(0.1), nn.Dropout2d(0.0))
    found = split_sensitive(model)
    assert [text.split()[0] for text in found] == ["0", "2"]
    assert "BatchNorm1d" in found[0]


def test_rows_of_which_only_the_shape_is_handed_on_are_fewer_in_a_trial():
    """The first output of the second layer is a mean over rows; its other one is none."""
    model = outside.VQVAE()
    layers = models.from_torch(model, torch.randn(6, outside.WIDTH))
    assert "its forward runs in each layer" in str(layers.report)
    assert split_sensitive(layers, torch.randn(6, outside.WIDTH)) == [
        "decoder (Whole: rows of a micro-batch change each other's results)"
    ]


def _clamped(model: nn.Module) -> None:
    model[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))


def _doubled(model: nn.Module) -> None:
    model[0].weight.register_hook(lambda g: g * 2)
    model[0].bias.register_hook(lambda g: g * torch.tensor([1.0, 0, 1, 0]))


def _of_unit_length(model: nn.Module) -> None:
    def change(p: nn.Parameter) -> None:
        p.grad /= p.grad.norm()

    model[0].bias.register_post_accumulate_grad_hook(change)


@pytest.mark.parametrize(("hook", "named"), [(_clamped, "0.weight"), (_doubled, ""), (_of_unit_length, "0.bias")])
def test_hooks_that_feel_a_part_of_a_gradient_are_named(hook, named):
    """Those that only scale it, or leave some of it out, are not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    hook(model)
    model[0].weight.grad = torch.ones(4, 4)
    found = split_sensitive(model, torch.randn(6, 4))
    assert found == ([f"{named} (its hook is given the gradient of a micro-batch)"] if named else [])
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[0].bias.grad is None


@pytest.mark.parametrize("name", models.presets())
def test_layers_of_its_own_models_treat_rows_one_by_one(name: str) -> None:
    """So `split_sensitive` does not run them."""
    model, (x, _) = models.build(name), data.for_model(name).batch(0, 6)
    assert randomness._seen(model, x, False) == []
    assert split_sensitive(model, x) == []
