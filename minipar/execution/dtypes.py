"""The type of a model's numbers: which of them `dtype` and `precision` change, and which stay.

    float32 model, dtype=float64      weights float32 -> float64    rotary table complex64 -> complex128    indices stay
    float32 model with a float64 buffer
        dtype=float32 (its main type)   everything stays as it is
        dtype=float64, precision=bf16   refused: nobody said what becomes of the mixture

The main type is that of most elements: of parameters, or of buffers where a model has none. A complex tensor counts as
the type of its parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.network import Network
from minipar.models.tensors import arguments, dtype_name, map_tensors

_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def matching(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The type of a tensor where numbers are of `dtype`: integers and truth values stay, and complex numbers become
    those whose parts are of `dtype` (or stay, where there are none)."""
    if tensor.is_complex():
        return _COMPLEX.get(dtype, tensor.dtype)
    return dtype if tensor.is_floating_point() else tensor.dtype


def main_type(model: nn.Module) -> torch.dtype | None:
    """The type of most numbers of a model; None if it has no floating numbers."""
    for tensors in (model.parameters(), model.buffers()):
        sizes: Counter[torch.dtype] = Counter()
        for tensor in tensors:
            if tensor.is_floating_point() or tensor.is_complex():
                sizes[_PARTS.get(tensor.dtype, tensor.dtype)] += tensor.numel()
        if sizes:
            return max(sizes, key=sizes.__getitem__)
    return None


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the numbers of a model this type, in place; tied and shared tensors stay so.

    A model that mixes types stays as it is if `dtype` is its main type; if not, a PlanError names a tensor of another
    type.
    """
    main = main_type(model)
    if main is None or main is dtype:
        return
    if other := _of_another_type(model, main):
        name = dtype_name(main)
        raise PlanError(
            f"dtype={dtype_name(dtype)}: the model is of {name}, but {other}; possible is dtype=torch.{name}, "
            "which leaves everything as it is, or a model of one type"
        )
    _change(model, dtype)


def find_sizes(model: nn.Module, x: Any) -> None:
    """Give the parameters of lazy modules their sizes and first values, by a forward of rows x in evaluation mode."""
    x = map_tensors(x, lambda t: t.to(torch.get_default_dtype()) if t.is_floating_point() else t)
    modes = [(module, module.training) for module in model.modules()]
    layered = type(model).forward in (nn.Sequential.forward, Network.forward)
    args, named = ((x,), {}) if layered else arguments(model, x)
    with torch.no_grad():
        model.eval()(*args, **named)
    for module, mode in modes:
        module.training = mode


def narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the floating numbers of a model a shorter type, in place; complex ones stay."""
    _change(model, dtype)


def check_narrow(model: nn.Module, precision: str) -> None:
    """Raise a PlanError for a model that cannot have a shorter type, such as precision=bf16: one that mixes types, or
    that trains complex parameters. The error names the tensor."""
    main = main_type(model)
    if main is None:
        return
    if other := _of_another_type(model, main):
        raise PlanError(
            f"precision={precision}: the model is of {dtype_name(main)}, but {other}; possible are a model of one "
            "type, and precision=float32"
        )
    for name, p in model.named_parameters():
        if p.is_complex() and p.requires_grad:
            kind = dtype_name(p.dtype)
            raise PlanError(
                f"precision={precision}: {name} is {kind}, which has no shorter type; possible is precision=float32"
            )


def _of_another_type(model: nn.Module, main: torch.dtype) -> str:
    """What is of another type than `main`, in words: "1.table is float64"; "" for nothing."""
    for name, tensor in _named(model):
        kind = tensor.dtype
        if (tensor.is_floating_point() or tensor.is_complex()) and _PARTS.get(kind, kind) is not main:
            return f"{name} is {dtype_name(kind)}"
    return ""


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _change(model: nn.Module, dtype: torch.dtype) -> None:
    converted: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in converted:
            kept.append(tensor)
            converted[id(tensor)] = tensor.detach().to(matching(tensor, dtype))
        return converted[id(tensor)]

    for p in model.parameters():
        if p.dtype is not matching(p, dtype):
            p.data = changed(p)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype is not matching(buffer, dtype):
                module._buffers[name] = changed(buffer)
