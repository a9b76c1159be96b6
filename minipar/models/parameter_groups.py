"""The shape of a model in torch, which a plan must know: its layers, and its parameters in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from minipar.models.network import edges_of
from minipar.models.sliced import describe
from minipar.program import Group
from minipar.program.shape import Shape


def shape_of(model: Iterable[nn.Module]) -> Shape:
    """The layers and parameter groups of a model, an `nn.Sequential` or any list of layers.

    The first groups are one per layer, with the parameters that no other layer holds. Then comes one group per set of
    layers that hold the same Parameter objects (tied weights). Sizes are in bytes. Errors: `PlanError` for a model
    without layers.
    """
    layers = list(model)
    groups = tuple(
        Group(holders, tuple(map(_bytes, trainable)), sum(map(_bytes, frozen)))
        for holders, trainable, frozen in groups_of(layers)
    )
    name = getattr(model, "name", "")
    trained = [trainable for _, trainable, _ in groups_of(layers)]
    itemsize = next((p.element_size() for found in trained for p in found), 4)
    dims = tuple(tuple(tuple(p.shape) for p in found) for found in trained)
    carries, whole = describe(layers)
    title = name if isinstance(name, str) else ""
    edges = edges_of(model)
    return Shape(len(layers), groups, title, itemsize=itemsize, dims=dims, carries=carries, whole=whole, edges=edges)


def parameters_of(model: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """For each group of `shape_of(model)`, in the same order, its trainable Parameter objects."""
    return [trainable for _, trainable, _ in groups_of(list(model))]


class Held(NamedTuple):
    """The parameters that exactly these layers hold."""

    layers: tuple[int, ...]
    trainable: list[nn.Parameter]
    frozen: list[nn.Parameter]


def groups_of(layers: Sequence[nn.Module]) -> list[Held]:
    """The parameter groups of `shape_of(layers)`, in the same order, as Parameter objects."""
    holders: dict[nn.Parameter, list[int]] = {}  # a Parameter hashes by identity
    for l, layer in enumerate(layers):
        for parameter in layer.parameters():
            holders.setdefault(parameter, []).append(l)
    groups = {(l,): Held((l,), [], []) for l in range(len(layers))}
    for parameter, found in holders.items():
        group = groups.setdefault(tuple(found), Held(tuple(found), [], []))  # type: ignore[arg-type]
        (group.trainable if parameter.requires_grad else group.frozen).append(parameter)
    return list(groups.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
