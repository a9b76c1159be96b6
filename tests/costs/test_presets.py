"""Models by name: published parameter counts to the printed digit, shapes that compile, and no torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minipar import models
from minipar.costs import analytic
from minipar.errors import PlanError
from minipar.models import shapes, table
from minipar.models.sizes import Transformer, sizes
from minipar.strategies.plan import Plan

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


def test_numbers_can_be_edited() -> None:
    half = replace(table.numbers("gpt3-175b"), layers=48)
    whole, less = sizes("gpt3-175b"), sizes(half)
    assert isinstance(less, Transformer)
    assert whole.parameters - less.parameters == 48 * less.block_parameters
    assert table.numbers("gpt3-175b", layers=48) == half
    assert shapes.shape("gpt3-175b", layers=48).layers == 50


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
