"""Models as numbers: parameters of published models to the last one, and torch models counted on meta tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minipar import models
from minipar.errors import PlanError
from minipar.models.counting import chain_of
from minipar.models.sizes import MODELS, Chain, Transformer, names, sizes


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
