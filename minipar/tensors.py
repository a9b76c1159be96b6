"""Values as layers hand them on: a tensor, or nested tuples and lists of tensors. Small helpers that look inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a sequential model, in order; one that is used twice stands here twice (`children` drops it)."""
    return [layer for layer in model._modules.values() if layer is not None]


def tensors(value: Any) -> list[Tensor]:
    """The tensors inside a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors(part)]
    return []


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with every tensor replaced by `change(tensor)`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def single(tensor: Tensor) -> Tensor:
    """A bfloat16 tensor in float32, in which losses are computed; any other as it is."""
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def take_rows(value: Any, rows: range) -> Any:
    """Neighbouring rows (positions of dimension 0) of every tensor inside a value."""
    return map_tensors(value, lambda t: t[rows.start : rows.stop])


def count_rows(value: Any) -> int:
    """Number of rows: the size of dimension 0 of the first tensor."""
    return next(map(len, tensors(value)), 0)


def count_bytes(value: Any) -> int:
    """Bytes of the tensors inside a value, as a message would carry them."""
    return sum(t.numel() * t.element_size() for t in tensors(value))


def detach(value: Any, requires_grad: bool = False) -> Any:
    """The value cut off from its graph (same memory); floating-point tensors become leaves if `requires_grad`."""
    return map_tensors(value, lambda t: t.detach().requires_grad_(requires_grad and _smooth(t)))


def overwrites(layer: nn.Module) -> bool:
    """Whether a layer may work in place on its input: then it needs a copy, as a leaf of the graph must stay."""
    return any(getattr(module, "inplace", False) for module in layer.modules())


def differentiable(value: Any) -> list[Tensor]:
    """The tensors of a value that can have a gradient: those of floating point, real or complex."""
    return [t for t in tensors(value) if _smooth(t)]


def _smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def storages(values: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage. Addresses tell storages apart as long as all of them are alive."""
    found = (t.untyped_storage() for t in values)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def spec(value: Any) -> Any:
    """A value's structure, shapes and dtypes as plain JSON data; `allocate` makes an empty value of it."""
    if isinstance(value, Tensor):
        return {"dtype": _name(value.dtype), "shape": list(value.shape)}
    if type(value) in (tuple, list):
        return [type(value).__name__, [spec(part) for part in value]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"is": value}
    raise TypeError(
        f"layers can hand on tensors, and tuples and lists of them, to another rank; not {type(value).__name__}"
    )


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def allocate(form: Any, device: torch.device) -> Any:
    """An uninitialised value of the structure, shapes and dtypes that `spec` wrote down."""
    if isinstance(form, dict):
        if "is" in form:
            return form["is"]
        return torch.empty(form["shape"], dtype=_dtype(form["dtype"]), device=device)
    name, parts = form
    made = [allocate(part, device) for part in parts]
    return made if name == "list" else tuple(made)
