"""Weights that a layer shares with another in a way that torch does not see: `self.tied = [other.weight]`.

A layer that keeps a parameter in a plain list, a dict, a closure or another object, or finds it by a global name,
computes with it, but does not name it among its own: the rank that has the layer would not know that it needs the
weight, and a gradient that it makes would be lost. `register` makes such a weight one of the layer's own, as
`self.weight = other.weight` does. It is a tie then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.reached import reached
from minipar.models.tensors import overlap

_TORCH = frozenset(vars(nn.Module()))  # what every module has: parameters, submodules, hooks


def register(model: nn.Module) -> None:
    """Register the weights of earlier layers that later ones hold. Errors: PlanError where a layer holds one of a later
    layer, which would get another name."""
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    owner = {id(p): k for k, (_, layer) in reversed([*enumerate(layers)]) for p in layer.parameters()}
    read: dict[type, list[tuple[str, nn.Parameter]]] = {}
    for k, (name, layer) in enumerate(layers):
        own = {id(p) for p in layer.parameters()}
        for attribute, p in [*_held_by(layer, read)]:
            if id(p) in own or id(p) not in owner:
                continue
            if owner[id(p)] > k:
                later = layers[owner[id(p)]][0]
                raise PlanError(
                    f"model: layer {name} ({type(layer).__name__}) keeps a parameter of layer {later} in {attribute}, "
                    "where torch does not see it; possible is to register it, as in self.tied = other.weight"
                )
            own.add(id(p))
            layer.register_parameter(f"held_{len(own)}", p)


def check_memory(model: nn.Module) -> None:
    """PlanError where a parameter has memory in common with another tensor of a module, as after `a.data = b.data`."""
    held: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        own = {} if type(module).__module__.startswith("torch.") else vars(module)
        for name, t in (*module._parameters.items(), *module._buffers.items(), *own.items()):
            if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_meta and t.numel():
                held.setdefault(id(t), (f"{path}.{name}".lstrip("."), t))
    for (name, one), (other, t) in pairwise(sorted(held.values(), key=lambda pair: pair[1].data_ptr())):
        if nn.Parameter in (type(one), type(t)) and overlap(one, t):
            raise PlanError(
                f"model: {name} and {other} have the same memory, and ranks have copies of both; possible is one "
                "parameter that both modules hold, as in self.tied = other.weight, or memory of its own: clone()"
            )


def exchange(layer: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    """Give a layer other parameters in the place of those with these ids, where it keeps them in lists and dicts.
    Errors: PlanError where it keeps one elsewhere."""
    for module in layer.modules():
        for held in (value for name, value in vars(module).items() if name not in _TORCH):
            for key, p in [*enumerate(held)] if isinstance(held, list) else [*getattr(held, "items", tuple)()]:
                if id(p) in others:
                    held[key] = others[id(p)]
    for attribute, p in _held_by(layer, {}) if others else ():
        if id(p) in others:
            raise PlanError(
                f"model: {type(layer).__name__} keeps another layer's parameter in {attribute}, where torch does not "
                "see it, and ranks that share layers have others; possible is to register it, as in self.tied = "
                "other.weight"
            )


def _held_by(layer: nn.Module, read: dict[type, list[tuple[str, nn.Parameter]]]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a layer reaches by attributes that are no parameters or modules of it, or by its code, with
    the way to each. `read`: those that the code of a class reaches."""

    def around(value: Any) -> bool:  # what the layer is a part of
        return isinstance(value, nn.Module) and any(part is layer for part in value.modules())

    def parameters(held: Mapping[str, Any]) -> list[tuple[str, nn.Parameter]]:
        found = (pair for name, value in held.items() for pair in reached(value, name, around))
        return [(path, p) for path, p in found if isinstance(p, nn.Parameter)]

    for module in layer.modules():
        yield from parameters({name: value for name, value in vars(module).items() if name not in _TORCH})
        for kind in type(module).__mro__:
            if kind not in read:
                own = {} if kind.__module__.partition(".")[0] in ("torch", "builtins") else vars(kind)
                read[kind] = parameters({name: value for name, value in own.items() if name != "__init__"})
            yield from read[kind]
