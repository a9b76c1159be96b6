"""What `allreduce` takes and gives back: numbers, lists, NumPy arrays and tensors, as tensors on the way."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minipar.errors import RankError

OPERATIONS = ("sum", "max", "min", "avg")
_KINDS = ("number", "list", "array", "tensor")
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
_DIMENSIONS = 8
_POSSIBLE = "possible are a number, a list of numbers (nested or not), a NumPy array and a tensor"


def operation(op: Any) -> str:
    """The name of a reduction: sum, max and min as built-ins or by name, "avg". RankError for others."""
    for name in OPERATIONS:
        if op is getattr(builtins, name, None) or (isinstance(op, str) and op == name):
            return name
    raise RankError(f"allreduce: op={getattr(op, '__name__', op)!r} is not known; possible are {', '.join(OPERATIONS)}")


def to_tensor(x: Any, op: str) -> tuple[str, torch.Tensor]:
    """The kind of `x` and a new contiguous tensor of its values. RankError for what cannot be reduced."""
    if isinstance(x, torch.Tensor):
        tensor = x.detach().clone(memory_format=torch.contiguous_format)
        kind = "tensor"
    elif type(x).__module__ == "numpy" and hasattr(x, "__array__"):
        try:
            tensor, kind = torch.tensor(x), "array"
        except TypeError as error:
            raise RankError(f"allreduce: a NumPy array of dtype {x.dtype} is not possible: {error}") from error
    elif isinstance(x, (list, int, float)):
        kind = "list" if isinstance(x, list) else "number"
        numbers = list(_numbers(x))
        real = any(isinstance(number, float) for number in numbers)
        if not real and any(not -(2**63) <= number < 2**63 for number in numbers):
            raise RankError("allreduce: whole numbers must fit in 64 bits; use real ones")
        try:
            tensor = torch.tensor(x, dtype=torch.float64 if real else torch.int64)
        except (ValueError, TypeError) as error:
            raise RankError(f"allreduce: a list must have equal lengths at each level: {error}") from error
    else:
        raise RankError(f"allreduce: {_article(type(x).__name__)} is not possible; {_POSSIBLE}")
    if tensor.dtype not in _DTYPES:
        possible = ", ".join(map(_name, _DTYPES))
        raise RankError(f"allreduce: dtype {_name(tensor.dtype)} is not possible; use one of {possible}")
    if op == "avg" and kind in ("array", "tensor") and not tensor.dtype.is_floating_point:
        raise RankError(f"allreduce: an average is no {_name(tensor.dtype)}; use a floating-point dtype for op='avg'")
    return kind, tensor


def _numbers(x: Any) -> Iterator[int | float]:
    if isinstance(x, list):
        for element in x:
            yield from _numbers(element)
    elif isinstance(x, (int, float)):
        yield x
    else:
        raise RankError(f"allreduce: a list with {_article(type(x).__name__)} in it is not possible; {_POSSIBLE}")


def describe(kind: str, tensor: torch.Tensor, op: str) -> tuple[str, str]:
    """A reduction in words, and what of it must agree on all ranks: of Python's numbers not whether they are whole or
    real. RankError for too many dimensions."""
    _check_dimensions(tensor)
    sizes = "x".join(map(str, tensor.shape)) or "1"
    form = f"{_article(kind)} of {sizes}"
    text = f"allreduce of {form} {_name(tensor.dtype)} for {op}"
    return text, f"allreduce of {form} for {op}" if kind in ("number", "list") else text


def form(tensor: torch.Tensor) -> str:
    """Shape and dtype in words."""
    return _form(tensor.shape, tensor.dtype)


@functools.lru_cache(4096)
def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor of {'x'.join(map(str, shape)) or '1'} {_name(dtype)}"


def _check_dimensions(tensor: torch.Tensor) -> None:
    if tensor.dim() > _DIMENSIONS:
        raise RankError(f"allreduce: {tensor.dim()} dimensions are too many; possible are {_DIMENSIONS}")


def agree(
    kind: str, tensor: torch.Tensor, op: str, gather: Callable[[torch.Tensor], list[torch.Tensor]]
) -> tuple[str, torch.Tensor]:
    """Make sure that all ranks bring the same kind, shape, dtype and operation. RankError, on every rank, where not.

    Backends do not check this: they abort the process, hang, or hand back garbage. Python's numbers need not agree on
    whole or real: where one rank has reals, all compute with them.
    """
    _check_dimensions(tensor)
    shape = [*tensor.shape, *([0] * (_DIMENSIONS - tensor.dim()))]
    head = [_KINDS.index(kind), OPERATIONS.index(op), _DTYPES.index(tensor.dtype), tensor.dim()]
    rows = [row.tolist() for row in gather(torch.tensor([*head, *shape]))]
    plain = kind in ("number", "list")
    if plain and any(_DTYPES[row[2]] == torch.float64 for row in rows):
        tensor = tensor.to(torch.float64)
    checked = [row[:2] + row[3:] if plain else row for row in rows]
    for rank, row in enumerate(checked):
        if row != checked[0]:
            mine, other = _describe(rows[0]), _describe(rows[rank])
            raise RankError(f"allreduce: ranks differ: rank 0 has {mine}, rank {rank} has {other}")
    return kind, tensor


def _describe(row: list[int]) -> str:
    kind, op, dtype, dimensions, *shape = row
    sizes = "x".join(map(str, shape[:dimensions])) or "1"
    return f"{_article(_KINDS[kind])} of {sizes} {_name(_DTYPES[dtype])} for {OPERATIONS[op]}"


def combine(parts: list[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Reduce tensors of one form into `out`, in their order: the same bits wherever it is done."""
    result = parts[0]
    for part in parts[1:]:
        if op in ("max", "min"):
            result = torch.maximum(result, part) if op == "max" else torch.minimum(result, part)
        else:
            result = result + part
    out.copy_(result)


def divide(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The average from the sum; whole Python numbers become real."""
    return (tensor if tensor.dtype.is_floating_point else tensor.double()) / size


def from_tensor(kind: str, tensor: torch.Tensor) -> Any:
    """The result as the kind that came in."""
    if kind == "tensor":
        return tensor
    if kind == "array":
        return tensor.numpy()
    return tensor.tolist()  # of no dimension: a number


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
