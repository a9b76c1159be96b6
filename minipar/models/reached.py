"""What a function or an object can reach: what a plan places on ranks must come to it by its arguments alone.

    W = nn.Linear(6, 3)                          loss --global name--> W --> its parameters
    def loss(output, y):
        return F.cross_entropy(output, y) + 0.1 * W.weight.square().sum()

Every rank, and plain torch beside them, would have a copy of W that is never trained. Looked at are closures, names of
globals, defaults, partial arguments, bound methods, attributes, containers and dataclasses, and the functions that
these call. The code of installed packages is not read, but objects of their classes are looked into.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from typing import Any

from torch import Tensor, nn

from minipar.errors import PlanError

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PLAIN = (Tensor, str, bytes, int, float, complex, bool, types.ModuleType, type(None))


def reached(value: Any, name: str, ends: Callable[[Any], bool] = lambda found: False) -> Iterator[tuple[str, Any]]:
    """Everything that can be reached from a value, nearest first, each once, with the way to it; but nothing where
    `ends` holds, and nothing through it."""
    seen: dict[int, Any] = {}  # (they are kept, so that no number is used again)
    queue = deque([(name, value)])
    while queue:
        path, found = queue.popleft()
        if id(found) in seen or ends(found):
            continue
        seen[id(found)] = found
        yield path, found
        if not isinstance(found, _PLAIN):
            queue.extend(_parts(path, found))


def check_ids(optimizer: Any, model: nn.Module) -> None:
    """Errors: PlanError for an optimizer that knows parameters of the model by their `id()`: ranks have copies."""
    known = {id(p): name for name, p in model.named_parameters()}
    for path, found in reached(optimizer, "optimizer"):
        numbers = [*found] if isinstance(found, Mapping) else [found]
        names = [known[number] for number in numbers if type(number) is int and number in known]
        if names:
            raise PlanError(
                f"optimizer: {path} has the id() of a parameter, {names[0]}; but each rank has parameters of its own, "
                "with other ids, and none of them would be found. Possible are groups by name: an optimizer whose own "
                "parameter is called named_parameters is given pairs (name, parameter)"
            )


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, partial):
        yield path, value.func
        yield from _parts(path, value.args)
        yield from ((f"{path}({key}=...)", part) for key, part in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in [*value.items()])
    elif isinstance(value, (list, tuple, deque, Set)):
        yield from ((f"{path}[{k}]", part) for k, part in enumerate([*value]))
    elif isinstance(value, types.FunctionType):
        yield from ((path, part) for part in (value.__defaults__, value.__kwdefaults__) if part)
        yield from ((f"{path}.{key}", part) for key, part in vars(value).items())
        if _is_read(value):
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield from [(key, cell.cell_contents)] if _is_set(cell) else ()
            yield from _named(value.__code__, value.__globals__)
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        yield path, getattr(value, "__func__", None)
        yield path, value.__self__
    elif isinstance(value, (staticmethod, classmethod)):
        yield path, value.__func__
    elif isinstance(value, property):
        yield path, (value.fget,)
    elif isinstance(value, type):
        if not _installed(getattr(sys.modules.get(value.__module__), "__file__", None) or "", value.__module__):
            yield from ((f"{value.__name__}.{key}", part) for key, part in vars(value).items())
        yield from ((base.__name__, base) for base in value.__bases__ if base is not object)
    else:
        own = getattr(value, "__dict__", {})
        for key, part in [*own.items()] if isinstance(own, dict) else ():
            if key in ("_parameters", "_modules", "_buffers") and isinstance(part, dict):
                yield from ((f"{path}.{k}", one) for k, one in part.items())
            else:
                yield f"{path}.{key}", part
        slots = [key for kind in type(value).__mro__ for key in _texts(vars(kind).get("__slots__", ()))]
        yield from (
            (f"{path}.{key}", getattr(value, key)) for key in slots if key in dir(value) and hasattr(value, key)
        )
        yield path, type(value)


def _named(code: types.CodeType, globals_: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a function's code finds by global names, and by names in modules, as in `helpers.net`."""
    path, found = "", None
    for ins in dis.get_instructions(code):
        if ins.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            path, found = ins.argval, globals_.get(ins.argval)
        elif ins.opname == "IMPORT_NAME":
            path, found = ins.argval, sys.modules.get(ins.argval)
        elif ins.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") and isinstance(found, types.ModuleType):
            part = vars(found).get(ins.argval)
            if ins.opname == "IMPORT_FROM":
                yield f"{path}.{ins.argval}", part
                continue
            path, found = f"{path}.{ins.argval}", part
        elif found is not None:
            yield path, found
            found = None
        if found is not None and not isinstance(found, types.ModuleType):
            yield path, found
            found = None
        if isinstance(ins.argval, types.CodeType):
            yield from _named(ins.argval, globals_)


def _is_read(function: types.FunctionType) -> bool:
    return not _installed(function.__code__.co_filename, function.__module__ or "")


def _installed(file: str, module: str) -> bool:
    return module.partition(".")[0] in ("minipar", "torch", "builtins") or file.startswith(_INSTALLED)


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable has no value yet
        return False


def _texts(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
