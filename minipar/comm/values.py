"""What a Communicator takes and returns: numbers, lists, NumPy arrays and tensors. All of them are sent as tensors."""

from __future__ import annotations

import builtins
import functools
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from minipar.errors import RankError
from minipar.models.tensors import dtype_name
from minipar.program.collectives import OPERATIONS

KINDS = ("number", "list", "array", "tensor")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
_DIMENSIONS = 8
FORM = 3 + _DIMENSIONS  # how many numbers describe a tensor, see `encode_form`
_POSSIBLE = "possible are a number, a list of numbers (nested or not), a NumPy array and a tensor"


def operation(op: Any, call: str = "allreduce") -> str:
    """The name of a reduction: sum, max and min as built-ins or by name, "avg". RankError for others."""
    for name in OPERATIONS:
        if op is getattr(builtins, name, None) or (isinstance(op, str) and op == name):
            return name
    raise RankError(f"{call}: op={getattr(op, '__name__', op)!r} is not known; possible are {', '.join(OPERATIONS)}")


def to_tensor(x: Any, op: str = "", call: str = "allreduce") -> tuple[str, torch.Tensor]:
    """The kind of `x` and a new contiguous tensor of its values. RankError if `x` cannot be sent or, with `op`,
    reduced."""
    if isinstance(x, torch.Tensor):
        if x.layout is not torch.strided or x.is_quantized:
            raise RankError(f"{call}: a tensor of layout {x.layout} is not possible; use .to_dense()")
        tensor = x.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        kind = "tensor"
    elif type(x).__module__ == "numpy" and hasattr(x, "__array__"):
        try:
            tensor, kind = torch.tensor(x), "array"
        except TypeError as error:
            raise RankError(f"{call}: a NumPy array of dtype {x.dtype} is not possible: {error}") from error
    elif isinstance(x, (list, int, float)):
        kind = "list" if isinstance(x, list) else "number"
        numbers = list(_numbers(x, call))
        real = any(isinstance(number, float) for number in numbers)
        if not real and any(not -(2**63) <= number < 2**63 for number in numbers):
            raise RankError(f"{call}: whole numbers must fit in 64 bits; use real ones")
        try:
            tensor = torch.tensor(x, dtype=torch.float64 if real else torch.int64)
        except (ValueError, TypeError) as error:
            raise RankError(f"{call}: a list must have equal lengths at each level: {error}") from error
    else:
        raise RankError(f"{call}: {_article(type(x).__name__)} is not possible; {_POSSIBLE}")
    if tensor.dim() > _DIMENSIONS:
        raise RankError(f"{call}: {tensor.dim()} dimensions are too many; possible are {_DIMENSIONS}")
    if op and tensor.dtype not in DTYPES:
        possible = ", ".join(map(dtype_name, DTYPES))
        raise RankError(f"{call}: dtype {dtype_name(tensor.dtype)} is not possible; use one of {possible}")
    if op == "avg" and kind in ("array", "tensor") and not tensor.dtype.is_floating_point:
        raise RankError(f"{call}: an average is no {dtype_name(tensor.dtype)}; use a floating-point dtype for op='avg'")
    return kind, tensor


def _numbers(x: Any, call: str) -> Iterator[int | float]:
    if isinstance(x, list):
        for element in x:
            yield from _numbers(element, call)
    elif isinstance(x, (int, float)):
        yield x
    else:
        raise RankError(f"{call}: a list with {_article(type(x).__name__)} in it is not possible; {_POSSIBLE}")


def describe(call: str, kind: str, tensor: torch.Tensor, rest: str = "", rows: bool = False) -> tuple[str, str]:
    """An operation in words, and the part of it that must agree on all ranks. Python's numbers may be whole on one rank
    and real on another; and the first dimension may differ if ranks bring `rows`."""
    shape = [str(n) for n in tensor.shape]
    name, ends = dtype_name(tensor.dtype), f" {rest}" if rest else ""
    text = f"{call} of {_article(kind)} of {'x'.join(shape) or '1'} {name}{ends}"
    same = (["*", *shape[1:]] if kind != "list" else []) if rows else shape  # (an empty list has no further shape)
    return text, f"{call} of {kind} {same}{'' if kind in ('number', 'list') else name}{ends}"


def form(tensor: torch.Tensor) -> str:
    """Shape and dtype in words."""
    return _form(tensor.shape, tensor.dtype)


@functools.lru_cache(4096)
def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"a tensor of {'x'.join(map(str, shape)) or '1'} {dtype_name(dtype)}"


def encode_form(kind: str, tensor: torch.Tensor) -> list[int]:
    """Kind, dtype and shape as FORM numbers."""
    shape = [*tensor.shape, *([0] * (_DIMENSIONS - tensor.dim()))]
    return [KINDS.index(kind), dtype_code(tensor.dtype), tensor.dim(), *shape]


def decode_form(numbers: list[int]) -> tuple[str, torch.dtype, tuple[int, ...]]:
    """What `encode_form` was given."""
    kind, code, dimensions, *shape = numbers
    return KINDS[kind], _by_code()[code], tuple(shape[:dimensions])


def form_in_words(numbers: list[int]) -> str:
    """What `encode_form` was given, for an error message."""
    kind, dtype, shape = decode_form(numbers)
    return f"{_article(kind)} of {'x'.join(map(str, shape)) or '1'} {dtype_name(dtype)}"


@functools.cache
def dtype_code(dtype: torch.dtype) -> int:
    """A number for a dtype, the same in every process."""
    return zlib.crc32(str(dtype).encode())


@functools.cache
def _by_code() -> dict[int, torch.dtype]:
    return {dtype_code(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def divide(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The average from the sum; whole Python numbers become real."""
    return (tensor if tensor.dtype.is_floating_point else tensor.double()) / size


def from_tensor(kind: str, tensor: torch.Tensor) -> Any:
    """A tensor as a value of this kind."""
    if kind == "tensor":
        return tensor
    if kind == "array":
        return tensor.numpy()
    return tensor.tolist()  # (of a tensor without dimensions this is a number)


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, byte by byte. (The stride of a tensor with a single element may be any number,
    and a view as bytes refuses some: so this sets it.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
