"""Shapes of the presets, from their numbers alone. No torch here.

Tests compare them with `minipar.models.shape_of(models.build(name))`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from minipar.models import table
from minipar.models.table import (
    GPT,
    MLP,
    Branchy,
    Mixture,
    check_branchy,
    check_gpt,
    check_mixture,
    check_mlp,
    convolutions,
    edges_of_blocks,
    title,
)
from minipar.program import Group
from minipar.program.edges import numbered
from minipar.program.shape import Shape


def shape(name: str, *, element_size: int = 4, **overrides: Any) -> Shape:
    """Layers and parameter groups of a preset or a published model; `element_size` is bytes per number (float32: 4).

    Errors: `PlanError` for an unknown preset or number.
    """
    chosen = table.numbers(name, **overrides)
    if isinstance(chosen, Branchy):
        return _branchy(chosen, element_size, title(name, chosen, overrides))
    if isinstance(chosen, Mixture):
        groups = _mixture(chosen, element_size)
        reason = table.of_whole_rows(chosen.capacity, chosen.balance)
        whole = f"1 (MixtureBlock: {reason})" if reason else ""
        carries = () if reason else tuple(range(1, len(groups) - 1))
        return Shape(len(groups), groups, title(name, chosen, overrides), carries=carries, whole=whole)
    groups = _gpt(chosen, element_size) if isinstance(chosen, GPT) else _mlp(chosen, element_size)
    layers = chosen.layers + 2 if isinstance(chosen, GPT) else len(chosen.widths) - 1
    if isinstance(chosen, GPT):
        return Shape(layers, groups, title(name, chosen, overrides), carries=tuple(range(1, layers - 1)))
    return Shape(layers, groups, title(name, chosen, overrides), whole="0 (Sequential)")


def _gpt(numbers: GPT, element_size: int) -> tuple[Group, ...]:
    check_gpt(numbers)
    width = numbers.width
    token = numbers.vocab * width * element_size
    position = numbers.context * width * element_size
    norm = (width * element_size, width * element_size)

    def linear(inputs: int, outputs: int) -> tuple[int, int]:
        return inputs * outputs * element_size, outputs * element_size

    block = (
        *norm,
        *linear(width, 3 * width),
        *linear(width, width),
        *norm,
        *linear(width, 4 * width),
        *linear(4 * width, width),
    )
    last = numbers.layers + 1
    middle = [Group((layer,), block) for layer in range(1, last)]
    if numbers.tied:
        return (Group((0,), (position,)), *middle, Group((last,), norm), Group((0, last), (token,)))
    return (Group((0,), (token, position)), *middle, Group((last,), (*norm, token)))


def _mixture(numbers: Mixture, element_size: int) -> tuple[Group, ...]:
    check_mixture(numbers)
    width, experts = numbers.width, numbers.experts
    norm = (width, width)
    attention = (3 * width * width, 3 * width, width * width, width)
    block = (*norm, *attention, *norm, experts * width, 4 * experts * width * width, 4 * experts * width * width)
    sizes = [
        (numbers.vocab * width, numbers.context * width),
        *[block] * numbers.layers,
        (*norm, numbers.vocab * width),
    ]
    return tuple(Group((l,), tuple(n * element_size for n in found)) for l, found in enumerate(sizes))


def _mlp(numbers: MLP, element_size: int) -> tuple[Group, ...]:
    check_mlp(numbers)
    return tuple(
        Group((l,), (a * b * element_size, b * element_size)) for l, (a, b) in enumerate(pairwise(numbers.widths))
    )


def _branchy(numbers: Branchy, element_size: int, name: str) -> Shape:
    check_branchy(numbers)
    sizes = [(out * given * side**2, out) if out else () for given, out, side in convolutions(numbers)]
    groups = tuple(Group((l,), tuple(n * element_size for n in found)) for l, found in enumerate(sizes))
    edges = numbered(edges_of_blocks(numbers.blocks), len(groups))
    return Shape(len(groups), groups, name, whole="0 (Stem)", edges=edges)
