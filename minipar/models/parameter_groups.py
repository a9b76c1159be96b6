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
    held = groups_of(layers)
    groups = tuple(
        Group(one.layers, tuple(map(_bytes, one.trainable)), sum(map(_bytes, one.frozen)), one.form) for one in held
    )
    name = getattr(model, "name", "")
    trained = [one.trainable for one in held]
    itemsize = next((p.element_size() for found in trained for p in found), 4)
    dims = tuple(tuple(tuple(p.shape) for p in found) for found in trained)
    carries, whole = describe(layers)
    title = name if isinstance(name, str) else ""
    edges = edges_of(model)
    forms, nodes, titles = getattr(model, "forms", ()), getattr(model, "nodes", ()), getattr(model, "titles", ())
    return Shape(
        len(layers), groups, title, names=titles, itemsize=itemsize, dims=dims, carries=carries, whole=whole,
        edges=edges, forms=forms, nodes=nodes, inputs=getattr(model, "inputs", ""),
    )  # fmt: skip


def parameters_of(model: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """For each group of `shape_of(model)`, in the same order, its trainable Parameter objects."""
    return [held.trainable for held in groups_of(list(model))]


class Held(NamedTuple):
    """The parameters that exactly these layers hold; with tensor parallelism those of one form (`program.Group`)."""

    layers: tuple[int, ...]
    trainable: list[nn.Parameter]
    frozen: list[nn.Parameter]
    form: str = ""


def groups_of(layers: Sequence[nn.Module]) -> list[Held]:
    """The parameter groups of `shape_of(layers)`, in the same order, as Parameter objects."""
    holders: dict[nn.Parameter, list[int]] = {}  # a Parameter hashes by identity
    for l, layer in enumerate(layers):
        for parameter in layer.parameters():
            holders.setdefault(parameter, []).append(l)
    forms = {parameter: getattr(parameter, "minipar_form", "") for parameter in holders}
    groups: dict[tuple[tuple[int, ...], str], Held] = {}
    for l in range(len(layers)):
        form = next((forms[p] for p, found in holders.items() if found == [l] and forms[p] != "P"), "")
        groups[(l,), form] = Held((l,), [], [], form)
    for parameter, found in holders.items():
        key = tuple(found), forms[parameter]
        group = groups.setdefault(key, Held(key[0], [], [], key[1]))
        (group.trainable if parameter.requires_grad else group.frozen).append(parameter)
    return list(groups.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
