"""A model in layers as bytes: one rank finds how a model is cut, and every other one makes the same of its own model.

Parameters, buffers, modules, and what these hold, are not in the bytes: there they have the names that they have in the
model, which every rank has built for itself.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
from torch import nn

from minipar.models.cutting import name_dropouts

_PLAIN = (int, float, complex, str, bytes, type(None), type(...), type)


def written(layers: nn.Module, model: nn.Module) -> bytes | None:
    """How a model is cut, for `read`; None where that cannot be pickled: then each rank finds it for itself."""
    names = {id(one): name for name, one in _parts(model).items()}
    try:
        with io.BytesIO() as file:
            writer = cloudpickle.Pickler(file)
            writer.persistent_id = lambda one: names.get(id(one))
            writer.dump(layers)
            return file.getvalue()
    except Exception:
        return None


def read(data: bytes, model: nn.Module) -> nn.Module:
    """The layers of another model that was built in the same way."""
    parts = _parts(model)
    with io.BytesIO(data) as file:
        reader = pickle.Unpickler(file)
        reader.persistent_load = parts.__getitem__  # type: ignore[method-assign]
        layers: nn.Module = reader.load()
    name_dropouts(model)
    return layers


def _parts(model: nn.Module) -> dict[Any, Any]:
    """Whatever a model holds, by its place; what is in several places has the first of them."""
    found: dict[Any, Any] = {}
    for path, module in model.named_modules():
        found[path] = module
        for name, held in vars(module).items():
            if not isinstance(held, _PLAIN):
                found[path, name] = held
        for kind in (module._parameters, module._buffers):
            found |= {(path, "tensor", name): tensor for name, tensor in kind.items() if tensor is not None}
    return found
