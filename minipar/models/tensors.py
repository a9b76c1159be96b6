"""Inputs and outputs of layers: a tensor, or nested tuples, lists, dicts and dataclasses of such values; and functions
for them.

In addition to tensors a value may contain None, numbers, strings and similar constants, which do not change. A dict may
have any type that can be made from items, such as the outputs of Hugging Face's models. The order of its items counts.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import enum
import importlib
import inspect
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError, RankError
from minipar.wording import several

_CONSTANTS = (
    bool, int, float, complex, str, bytes, range, slice, enum.Enum, torch.dtype, torch.device, type(...)
)  # fmt: skip


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_named(name: str) -> torch.dtype:
    """The dtype of a `dtype_name`. ValueError for a name that this version of torch does not know."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r}: unknown to this version of torch")
    return found


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a sequential model, in order. A layer that is used twice is here twice (in `children` it is
    once)."""
    return [layer for layer in model._modules.values() if layer is not None]


SHADOW = "shape of"  # begins the tuple of a shape and a dtype, which is handed on in place of a tensor: `replaying.py`
EMPTIED = "_minipar_emptied"  # modules without numbers, which stand for those of other layers: see `replaying.py`


def copied(model: nn.Module) -> Any:
    """A deep copy of a module. What its forward makes anew of its parameters, such as the weight of an old
    torch.nn.utils.weight_norm, may still be in a graph, and torch would refuse to copy it; so it does what torch.jit
    has compiled."""
    modules = [*model.modules(), *(vars(one)["_minipar"][0] for one in model.modules() if "_minipar" in vars(one))]
    held = [one for module in modules for one in vars(module).values()]
    made = [t for t in held if isinstance(t, Tensor) and not t.is_leaf]
    kept: dict[int, Any] = {id(module): module for module in model.modules() if EMPTIED in vars(module)}
    kept |= {id(one): one for one in held if isinstance(one, torch.jit.ScriptFunction)}
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in made} | kept)


def resize(tensors: Iterable[Tensor], whole: bool) -> None:
    """Give the storages of tensors room for their values, or none."""
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size() if whole else 0
        if tensor.untyped_storage().nbytes() != size:
            tensor.untyped_storage().resize_(size)


def tensors(value: Any) -> list[Tensor]:
    """The tensors inside a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors(part)]
    return [tensor for part in items_of(value).values() for tensor in tensors(part)]


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors inside a value, in order, each with its place in the value, such as `x['mask'][0]`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for k, part in enumerate(value):
            yield from named_tensors(part, f"{name}[{k}]")
    else:
        for key, part in items_of(value).items():
            yield from named_tensors(part, f"{name}[{key!r}]")


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same structure with every tensor replaced by `change(tensor)`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return rebuilt(type(value), [map_tensors(part, change) for part in value])
    if items := items_of(value):
        return rebuilt(type(value), [map_tensors(part, change) for part in items.values()], list(items), value)
    return value


@dataclasses.dataclass(frozen=True)
class Undivided:
    """A tensor of a batch that has no rows, such as a mask of all tokens: every micro-batch is given all of it. It is
    no tensor to the functions of this module, until `take_rows` gives it."""

    tensor: Tensor


def undivided(x: Any, y: Any) -> frozenset[str]:
    """The tensors of x that have no rows, such as "x['mask']": their dimension 0 is not as long as that of y is; where
    y is x, not as long as that of most of its tensors. (If no tensor of x is as long, it is not this that is wrong.)"""
    found = list(named_tensors(x, "x"))
    lengths = Counter(len(t) for _, t in (found if y is x else named_tensors(y, "y")) if t.dim())
    rows = max(lengths, key=lengths.__getitem__, default=0)
    without = frozenset(name for name, t in found if not t.dim() or len(t) != rows)
    return without if len(without) < len(found) else frozenset()


def mark_undivided(x: Any, without: Collection[str]) -> Any:
    """x with these of its tensors marked as undivided."""
    names = iter([name for name, _ in named_tensors(x, "x")])
    return map_tensors(x, lambda t: Undivided(t) if next(names) in without else t) if without else x


def items_of(value: Any) -> Mapping[Any, Any]:
    """The items of a dict, or the fields of a dataclass; of anything else none."""
    if isinstance(value, Mapping):
        return value
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, Undivided)):
        return {}
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


def rebuilt(kind: type, parts: Sequence[Any], keys: Sequence[Any] = (), like: Any = None) -> Any:
    """A tuple, list, dict or dataclass of type `kind` with these parts."""
    if issubclass(kind, Mapping):
        items = dict(zip(keys, parts, strict=True))
        if kind is dict:
            return items
        if issubclass(kind, defaultdict):
            return kind(getattr(like, "default_factory", None), items)
        return kind(**items) if dataclasses.is_dataclass(kind) else kind(items)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(kind):
        found = object.__new__(kind)
        for key, part in zip(keys, parts, strict=True):
            object.__setattr__(found, key, part)
        return found
    return kind._make(parts) if hasattr(kind, "_fields") else kind(parts)  # type: ignore[attr-defined, call-arg]


def laid_out(tensor: Tensor) -> Tensor:
    """A tensor whose memory has its numbers in order and as they are. (A view by conj() says that a sign differs.)"""
    return tensor.contiguous().resolve_conj().resolve_neg()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor that is `laid_out`, of any dtype."""
    assert tensor.is_conj() is tensor.is_neg() is False, "its numbers are not in its memory"
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def single(tensor: Tensor) -> Tensor:
    """A tensor of a shorter type in float32, in which losses are computed; any other tensor unchanged."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def take_rows(value: Any, rows: range) -> Any:
    """The value with only these rows (positions of dimension 0) of every tensor, and all of those that have no rows."""
    if isinstance(value, Undivided):
        return value.tensor
    if isinstance(value, (tuple, list)):
        return rebuilt(type(value), [take_rows(part, rows) for part in value])
    if isinstance(value, Mapping):
        return rebuilt(type(value), [take_rows(part, rows) for part in value.values()], list(value), value)
    return value[rows.start : rows.stop] if isinstance(value, Tensor) else value


def take_tokens(value: Any, tokens: range) -> Any:
    """The value with only these tokens (positions of dimension 1) of every tensor (rows, tokens, ...)."""
    return map_tensors(value, lambda t: t[:, tokens.start : tokens.stop])


def count_rows(value: Any) -> int:
    """Number of rows: the size of dimension 0 of the first tensor that has one."""
    return next((len(t) for t in tensors(value) if t.dim()), 0)


def check_rows(value: Any, name: str) -> int:
    """Number of rows, which must be the same in all tensors of a value. Errors: RankError if one has another number."""
    rows = None
    for where, tensor in named_tensors(value, name):
        if not tensor.dim():
            raise RankError(
                f"{where}: a single number has no rows; every tensor of {name} needs one entry for each row in "
                "dimension 0 (expand it, or let a layer hold it as a buffer)"
            )
        rows = rows or (where, len(tensor))
        if len(tensor) != rows[1]:
            raise RankError(
                f"{where} of shape {tuple(tensor.shape)} has {several(len(tensor), 'row')}, but {rows[0]} has "
                f"{rows[1]}; every tensor of {name} needs the same rows in dimension 0 (expand what all rows share, "
                "or let a layer hold it as a buffer)"
            )
    return rows[1] if rows else 0


def count_bytes(value: Any) -> int:
    """Bytes of the tensors inside a value, as a message would carry them."""
    return sum(t.numel() * t.element_size() for t in tensors(value))


def detach(value: Any, requires_grad: bool = False) -> Any:
    """The value detached from its graph (same memory); floating-point tensors become leaves if `requires_grad`."""
    return map_tensors(value, lambda t: t.detach().requires_grad_(requires_grad and _smooth(t)))


def opaque(value: Any) -> str | None:
    """The type of an object inside a value that these functions cannot look into; None: there is no such object.

    Tensors in such an object would pass the places where the graph is cut.
    """
    if value is None or isinstance(value, (Tensor, Undivided, *_CONSTANTS)):
        return None
    if isinstance(value, (tuple, list)):
        return next((found for part in value if (found := opaque(part))), None)
    if items := items_of(value):
        return next((found for part in items.values() if (found := opaque(part))), None)
    return None if isinstance(value, Mapping) else _path(type(value))


def overwrites(layer: nn.Module) -> bool:
    """Whether a layer is known to change its input in place. Then it needs a copy, because a leaf of a graph must not
    change."""
    return any(getattr(module, "inplace", False) for module in layer.modules()) or hasattr(layer, _OVERWRITES)


_signature = cache(inspect.signature)


def arguments(model: nn.Module, x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """With which arguments a model's forward is called for rows x: a dict's items by name, those of a tuple one after
    the other; x itself where forward takes no such ones. Errors: PlanError if it takes neither."""
    named = isinstance(x, Mapping) and all(isinstance(key, str) for key in x)
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), dict(x))] if named else []
    ways += [(tuple(x), {})] if isinstance(x, (tuple, list)) else []
    forward = getattr(model.forward, "__func__", None)
    own = () if forward is None else (model,)
    signature = _signature(forward or model.forward)
    for args, kwargs in [*ways, ((x,), {})]:
        with suppress(TypeError):
            signature.bind(*own, *args, **kwargs)
            return args, kwargs
    count = len(x) if isinstance(x, (tuple, list)) else 1
    given = f"a dict of {', '.join(x)}" if named else several(count, "value")
    raise PlanError(
        f"model: {type(model).__name__}.forward{inspect.signature(model.forward)} cannot be called with x, which is "
        f"{given}; possible is a batch of what forward takes by these names, or in this order. What is no input "
        "belongs to y, or is left out: data.Batches(loader, pair=lambda batch: (x, y))"
    )


def given_to(layer: nn.Module, value: Any) -> Any:
    """What a layer is called with: the value, or a copy that it may overwrite."""
    return map_tensors(value, torch.clone) if overwrites(layer) else value


def find_overwriting(layer: nn.Module, given: Any, run: Callable[[Any], Any] | None = None) -> bool:
    """Run a layer once on a copy of its input, to find out for `overwrites` whether it changes its input in place.

    Gives whether it so changes a tensor that another tensor of its input shares memory with."""
    before, trial = Unchanged(given), map_tensors(given, lambda t: t.detach().clone())
    after = Unchanged(trial)
    (run or layer)(trial)  # (with gradients as it is called: its forward may ask for some)
    if not after.versions_are() or not before.equals(trial):
        setattr(layer, _OVERWRITES, True)
    changed = [
        k for k, (t, version) in enumerate(zip(after.tensors, after.versions, strict=True)) if t._version != version
    ]
    pairs = ((before.tensors[k], other) for k in changed for j, other in enumerate(before.tensors) if j != k)
    return any(overlap(one, other) for one, other in pairs)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or one.dtype is not other.dtype:
        return False
    size = one.untyped_storage().nbytes() // one.element_size()
    marks = torch.zeros(size, dtype=torch.bool, device=one.device)
    marks.as_strided(one.shape, one.stride(), one.storage_offset())[...] = True
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


_OVERWRITES = "_minipar_overwrites"


class Unchanged:
    """Remembers the versions of the tensors in values, to find out whether something writes into them."""

    def __init__(self, *values: Any) -> None:
        self.tensors = tensors(values)
        self.versions = [t._version for t in self.tensors]

    def versions_are(self) -> bool:
        """Whether the tensors' versions have not changed. (Writing through `.data` or numpy changes no version.)"""
        return [t._version for t in self.tensors] == self.versions

    def equals(self, *values: Any) -> bool:
        """Whether all tensors equal those of other values; NaN counts as equal to NaN."""
        return all(
            bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in zip(self.tensors, tensors(values), strict=True)
        )


def differentiable(value: Any) -> list[Tensor]:
    """The tensors of a value that can have a gradient: real and complex floating-point tensors."""
    return [t for t in tensors(value) if _smooth(t)]


def _smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def storages(values: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of each distinct storage. Addresses are distinct as long as all storages are alive."""
    found = (part.untyped_storage() for t in values for part in _memory_parts(t))
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


@contextmanager
def saving_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Iterator[None]:
    """torch's saved_tensors_hooks. torch.func.grad refuses them: what it computes is saved as if there were none."""

    @contextmanager
    def without(error_message: str) -> Iterator[None]:
        torch._C._autograd._saved_tensors_hooks_disable(error_message, fail_if_non_empty=False)
        try:
            yield
        finally:
            torch._C._autograd._saved_tensors_hooks_enable()

    graph = torch.autograd.graph
    refuse, graph.disable_saved_tensors_hooks = graph.disable_saved_tensors_hooks, without
    try:
        with graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        graph.disable_saved_tensors_hooks = refuse


def _memory_parts(t: Tensor) -> tuple[Tensor, ...]:
    """The tensors in whose memory a tensor's numbers lie."""
    if t.layout is torch.sparse_coo:
        return t._indices(), t._values()
    if t.layout is torch.sparse_csr:
        return t.crow_indices(), t.col_indices(), t.values()
    return () if t._is_zerotensor() else (t,)  # (torch.func.jvp has zeros without memory)


def spec(value: Any) -> Any:
    """A value's structure, shapes and dtypes as plain JSON data, from which `allocate` makes an uninitialised value.

    Errors: TypeError for a value that cannot be made on another rank.
    """
    if isinstance(value, Tensor):
        return {"dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, (tuple, list)):
        return [_path(type(value)), [spec(part) for part in value]]
    items = items_of(value)
    if items or isinstance(value, Mapping):
        keys = list(items)
        if not all(key is None or isinstance(key, (bool, int, float, str)) for key in keys):
            raise TypeError(f"layers can hand on dicts whose keys are strings or numbers to another rank; not {keys}")
        return [_path(type(value)), [spec(part) for part in items.values()], keys]
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"is": value}
    raise TypeError(
        "layers can hand on tensors, None, numbers and strings, and tuples, lists and dicts of them, to another rank; "
        f"not {type(value).__name__}"
    )


def has_tensors(form: Any) -> bool:
    """Whether the value that `spec` described as `form` contains tensors."""
    return "dtype" in form if isinstance(form, dict) else any(map(has_tensors, form[1]))


_PLAIN: dict[str, type] = {
    "tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict, "Size": torch.Size
}  # fmt: skip
_NAMES = {kind: name for name, kind in _PLAIN.items()}


def _path(kind: type) -> str:
    """The name by which another rank finds a type."""
    return _NAMES.get(kind) or f"{kind.__module__}:{kind.__qualname__}"


@cache
def _type(path: str) -> type:
    """The type that has this name. Errors: TypeError if this rank cannot import it."""
    if path in _PLAIN:
        return _PLAIN[path]
    module, _, name = path.partition(":")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise TypeError(
            f"layers hand on a {path}, which this rank cannot import; hand on a tuple or a dict instead"
        ) from None
    assert isinstance(found, type)
    return found


def allocate(form: Any, device: torch.device) -> Any:
    """An uninitialised value with the structure, shapes and dtypes that `spec` described."""
    if isinstance(form, dict):
        if "is" in form:
            return form["is"]
        return torch.empty(form["shape"], dtype=dtype_named(form["dtype"]), device=device)
    kind, parts, *keys = form
    return rebuilt(_type(kind), [allocate(part, device) for part in parts], *keys)
