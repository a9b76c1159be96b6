"""Models as numbers: parameters of published models to the last one, and torch models counted on meta tensors.
Models by name: shapes that compile.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minipar import models
from minipar.costs import analytic
from minipar.errors import PlanError
from minipar.models import shapes, table
from minipar.models.counting import chain_of
from minipar.models.sizes import MODELS, Chain, Transformer, names, sizes
from minipar.strategies.plan import Plan


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("resnet-50", 25_557_032),
    ],
)
def test_published_parameters(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_resnet_has_its_operations() -> None:
    """4.09 10^9 multiplications and additions for an image of 224 x 224 pixels, as torchvision counts them."""
    model = MODELS["resnet-50"]
    assert isinstance(model, Chain)
    assert sum(layer.flops for layer in model.chain) / 2 == pytest.approx(4.09e9, rel=0.005)


def test_all_names_are_known() -> None:
    assert all(isinstance(sizes(name), (Transformer, Chain)) for name in names())


def test_a_torch_model_is_counted_without_computing() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    chain = chain_of(model, torch.zeros(8, 64), "mine")
    assert [layer.flops for layer in chain.chain] == [2 * 64 * 256, 0, 2 * 256 * 10]
    assert chain.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert [layer.output for layer in chain.chain] == [256, 256, 10]
    assert [layer.saved for layer in chain.chain] == [64, 256, 256]
    whole = chain_of(models.build("gpt-tiny"), torch.zeros(2, 64, dtype=torch.long))
    assert whole.flops == pytest.approx(sizes("gpt-tiny").flops, rel=0.05)


class Looks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_model_that_looks_into_its_numbers_is_refused() -> None:
    with pytest.raises(PlanError, match="Looks does not run on meta tensors"):
        chain_of(Looks(), torch.zeros(2, 3))
    with pytest.raises(PlanError, match="has no tensor"):
        chain_of(nn.Linear(2, 2), 3)


# Presets --------------------------------------------------------------------------------------------------------------

# Narayanan et al. 2021, table 1: parameters in units of 10^9
MEGATRON = {"1.7b": "1.7", "3.6b": "3.6", "7.5b": "7.5", "18b": "18.4", "39b": "39.1", "76b": "76.1", "145b": "145.6",
            "310b": "310.1", "530b": "529.6", "1t": "1008.0"}  # fmt: skip
GPT2 = {"small": 124_439_808, "medium": 354_823_168, "large": 774_030_080, "xl": 1_557_611_200}


@pytest.mark.parametrize("size", MEGATRON)
def test_megatron_counts_to_the_printed_digit(size: str) -> None:
    assert f"{sizes(f'megatron-{size}').parameters / 1e9:.1f}" == MEGATRON[size]


@pytest.mark.parametrize("size", GPT2)
def test_gpt2_counts_exactly(size: str) -> None:
    assert sizes(f"gpt2-{size}").parameters == GPT2[size]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-175b", "174.6"),
        ("korthikanti-22b", "22.1"),
        ("korthikanti-175b", "174.6"),
        ("korthikanti-530b", "529.6"),
        ("korthikanti-1t", "1008.0"),
    ],
)
def test_other_counts(name: str, billions: str) -> None:
    assert f"{sizes(name).parameters / 1e9:.1f}" == billions


@pytest.mark.parametrize("name", table.names())
def test_the_formula_counts_what_the_shape_holds(name: str) -> None:
    shape = shapes.shape(name, element_size=1)
    assert sum(sum(group.tensors) for group in shape.groups) == sizes(name).parameters
    assert shape == models.shape(name, element_size=1)
    assert len(analytic.layer_costs(name, rows=1).forward) == shape.layers


def test_published_shapes_compile() -> None:
    program = Plan(pp=4, microbatches=2).compile(shapes.shape("gpt3-175b"))
    assert (program.layers, len(program.ranks)) == (98, 4)
    assert program.groups[-1].layers == (0, 97)  # the tied embedding


def test_unknown_names_and_numbers_are_refused_with_what_there_is() -> None:
    with pytest.raises(PlanError, match="model 'gpt5': no such preset; there are gpt-tiny.*gpt3-175b"):
        shapes.shape("gpt5")
    with pytest.raises(PlanError, match="gpt2-small has no such number; it has layers, width"):
        table.numbers("gpt2-small", depth=3)
    with pytest.raises(PlanError, match="heads=25: must divide width=1601"):
        shapes.shape("gpt2-xl", width=1601)


def test_published_models_are_not_built() -> None:
    assert "gpt3-175b" not in models.presets()
    with pytest.raises(PlanError, match="only its numbers are known here; models to build are gpt-tiny"):
        models.build("gpt3-175b")
