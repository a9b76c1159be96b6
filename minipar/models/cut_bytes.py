"""A model in layers as bytes: one rank finds how a model is cut, and every other one makes the same of its own model.

Parameters, buffers, modules, and what these hold, are not in the bytes: there they have the names that they have in the
model, which every rank has built for itself.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import cloudpickle
from torch import Tensor, nn

from minipar.models.cutting import name_dropouts
from minipar.models.tensors import dtype_name, laid_out, memory_of, tensors

_FEW = 16  # numbers of a buffer that a forward may decide by
_MANY = 16  # models
_known: dict[bytes | None, bytes] = {}  # by their fingerprints
_PLAIN = (int, float, complex, str, bytes, type(None), type(...), type)


def known(key: bytes | None) -> bytes | None:
    """How a model with this `fingerprint` was cut in this process before."""
    return _known.get(key)


def written(layers: nn.Module, model: nn.Module, key: bytes | None = None) -> bytes | None:
    """How a model is cut, for `read`; None where that cannot be pickled: then each rank finds it for itself. With a
    `fingerprint` for key it is `known` from now on."""
    names = {id(one): name for name, one in _parts(model).items()}
    try:
        with io.BytesIO() as file:
            writer = cloudpickle.Pickler(file)
            writer.persistent_id = lambda one: names.get(id(one))
            writer.dump(layers)
            found = file.getvalue()
    except Exception:
        return None
    if key is not None:
        _known[key] = found
        while len(_known) > _MANY:
            del _known[next(iter(_known))]
    return found


def read(data: bytes, model: nn.Module) -> nn.Module:
    """The layers of another model that was built in the same way."""
    parts = _parts(model)
    with io.BytesIO(data) as file:
        reader = pickle.Unpickler(file)
        reader.persistent_load = parts.__getitem__  # type: ignore[method-assign]
        layers: nn.Module = reader.load()
    name_dropouts(model)
    return layers


def fingerprint(model: nn.Module, example: Any, *more: Any) -> bytes | None:
    """A digest of all that the way of cutting a model depends on: its code and attributes, the forms of its tensors,
    and the numbers of the example. None where the model cannot be pickled."""
    seen: dict[int, tuple[int, Tensor]] = {}

    def form(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return None
        decides = one.numel() <= _FEW and one.device.type == "cpu" and not isinstance(one, nn.Parameter)
        few = one.flatten().tolist() if decides else []
        first, _ = seen.setdefault(id(one), (len(seen), one))
        return first, dtype_name(one.dtype), tuple(one.shape), one.requires_grad, repr(few)

    try:
        with io.BytesIO() as file:
            writer = cloudpickle.Pickler(file)
            writer.persistent_id = form
            writer.dump((model, example, more))
            found = hashlib.blake2b(file.getvalue())
    except Exception:
        return None
    for one in tensors(example):
        found.update(memory_of(laid_out(one.detach().cpu())))
    return found.digest()


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
