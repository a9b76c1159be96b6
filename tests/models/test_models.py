"""The models: sizes, ties, causality, and initial values that depend on nothing but seed and name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from minipar import models
from minipar.errors import PlanError
from minipar.models.parameter_groups import shape_of


@pytest.mark.parametrize("name", models.presets())
def test_shape_of_numbers_is_shape_of_model(name):
    assert models.shape(name) == shape_of(models.build(name))
    assert models.shape(name, element_size=8).groups == shape_of(models.build(name).double()).groups


def test_shape_follows_overrides():
    changes = {"layers": 3, "width": 24, "heads": 2, "context": 10, "vocab": 31, "tied": True}
    assert models.shape("gpt-tiny", **changes) == shape_of(models.build("gpt-tiny", **changes))
    assert models.shape("mlp-tiny", widths=[3, 4, 5]) == shape_of(models.build("mlp-tiny", widths=(3, 4, 5)))
    assert models.shape("gpt-tiny").name == "gpt-tiny"
    assert models.shape("gpt-tiny", layers=3).name == "gpt-tiny layers=3"


def test_gpt_output_goes_straight_into_cross_entropy():
    model = models.gpt(layers=2, width=16, heads=2, context=12, vocab=32)
    assert isinstance(model, nn.Sequential)
    assert len(model) == 4
    x, y = torch.randint(32, (5, 7)), torch.randint(32, (5, 7))
    output = model(x)
    assert output.shape == (5, 32, 7)
    whole = cross_entropy(output, y)
    parts = sum(cross_entropy(model(x[rows]), y[rows]) * len(x[rows]) / 5 for rows in (slice(0, 2), slice(2, 5)))
    torch.testing.assert_close(parts, whole)


def test_gpt_sees_the_past_and_not_the_future():
    model = models.build("gpt-tiny", layers=2).double()
    x = torch.randint(256, (1, 20))
    changed = x.clone()
    changed[0, 10] = (x[0, 10] + 1) % 256
    difference = (model(x) - model(changed)).abs().amax(dim=(0, 1))
    assert difference[:10].max() == 0
    assert (difference[10:] > 0).all()


def test_tied_weight_is_one_parameter_and_gets_both_gradients():
    model = models.build("gpt-tiny-tied")
    assert model[-1].logits.weight is model[0].token.weight
    assert model.double()[-1].logits.weight is model[0].token.weight
    assert models.build("gpt-tiny")[-1].logits.weight is not models.build("gpt-tiny")[0].token.weight
    x = torch.zeros(2, 8, dtype=torch.long)  # token 0 only: every other row's gradient comes from the head
    cross_entropy(model(x), x).backward()
    gradient = model[0].token.weight.grad
    assert (gradient[1:].abs().sum(dim=1) > 0).all()


def test_dropout_is_made_of_modules_only():
    model = models.build("gpt-tiny-dropout", layers=3)
    found = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert len(found) == 1 + 2 * 3
    assert all(module.p == 0.1 for module in found)
    assert not any(isinstance(module, nn.Dropout) for module in models.build("gpt-tiny").modules())
    x = torch.randint(256, (2, 8))
    assert not torch.equal(model(x), model(x))
    model.eval()
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)


def test_mlp_layers():
    model = models.mlp((3, 4, 5), activation=nn.ReLU)
    assert [[type(module) for module in layer] for layer in model] == [[nn.Linear, nn.ReLU], [nn.Linear]]
    assert model(torch.randn(6, 3)).shape == (6, 5)


def test_gradients_of_a_deep_mlp_reach_its_first_layer():
    model = models.build("mlp-wide")
    cross_entropy(model(torch.randn(8, 512)), torch.randint(512, (8,))).backward()
    first, last = (model[l][0].weight.grad.abs().max().item() for l in (0, -1))
    assert first > 1e-3 * last  # else a comparison of gradients relative to the largest would not see the first layers


# ---------------------------------------------------------------- initial values


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_initial_values_are_a_function_of_seed_and_name():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = values(models.build("gpt-tiny"))
    assert torch.equal(torch.get_rng_state(), before), "building a model must not use up random numbers"
    torch.randn(100)
    assert equal(values(models.build("gpt-tiny")), first)
    torch.manual_seed(2)
    assert not equal(values(models.build("gpt-tiny")), first)


def test_initial_values_do_not_depend_on_the_order_of_building():
    torch.manual_seed(1)
    model = models.build("gpt-tiny")
    first = values(model)
    for l in reversed(range(len(model))):
        layer = copy.deepcopy(model[l])
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 9.0)
        models.initialise(layer, prefix=f"{l}.")
        assert all(torch.equal(p, first[f"{l}.{name}"]) for name, p in layer.named_parameters())
    deeper = values(models.build("gpt-tiny", layers=6))
    assert all(torch.equal(deeper[name], first[name]) for name in first if name.startswith(("0.", "1.", "4.")))


def test_initial_values_are_gpt2s_and_the_same_in_float64():
    torch.manual_seed(3)
    model = models.build("gpt-demo", layers=1)
    assert model[1].mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(model[1].norm1.weight, torch.zeros(192))
    assert torch.equal(model[1].norm1.weight, torch.ones(192))
    assert torch.equal(model[1].attention.qkv.bias, torch.zeros(3 * 192))
    names = values(model)
    flat = [w.flatten()[:100] for w in names.values() if w.dim() == 2]
    assert not any(torch.equal(a, b) for k, a in enumerate(flat) for b in flat[:k]), "each name has its own numbers"
    twin = copy.deepcopy(model).double()
    models.initialise(twin)
    assert all(torch.equal(p, names[name].double()) for name, p in twin.named_parameters())


def test_builds_on_the_meta_device():
    with torch.device("meta"):
        model = models.build("gpt-tiny-tied")
    assert all(p.is_meta for p in model.parameters())
    assert shape_of(model) == models.shape("gpt-tiny-tied")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.build("gpt-huge"), "'gpt-huge'.*gpt-tiny, gpt-tiny-tied"),
        (lambda: models.shape("gpt-huge"), "'gpt-huge'.*gpt-tiny, gpt-tiny-tied"),
        (lambda: models.build("gpt-tiny", depth=3), "depth=3.*layers, width"),
        (lambda: models.shape("gpt-tiny", heads=5), "heads=5.*width=64"),
        (lambda: models.gpt(heads=5), "heads=5.*width=64"),
        (lambda: models.gpt(layers=0), "layers=0.*at least 1"),
        (lambda: models.gpt(dropout=1.0), "dropout=1.0"),
        (lambda: models.mlp((3,)), "widths=.*2 or more"),
        (lambda: models.shape("mlp-tiny", widths=(3, 0)), "widths=.*2 or more"),
        (lambda: models.build("gpt-tiny")(torch.zeros(1, 65, dtype=torch.long)), "65 tokens.*context is 64"),
    ],
)
def test_refusals_name_the_value_and_what_is_possible(call, message):
    with pytest.raises(PlanError, match=message):
        call()
