"""`at_blocks`: cuts a model whose forward cannot be traced, by running that forward again in every layer.

    def forward(self, ids, mask):              call 0   layer 0 runs it        layer 1 is given what call 0 gave,
        h = self.embed(ids)                    call 1   layer 0 runs it        and so on; the code in between runs in
        m = wide(mask, h)                               every layer            every layer, as it is written
        for block in self.blocks:
            h = block(h, m)                    call 2   layer 1 runs it
        return self.head(h)                    call 3   layer 2 runs it

A layer calls the model's own forward. Calls of modules that an earlier layer has made return at once what they gave
there, its own calls run, and after its last one the forward is left. So a forward may branch, make masks, caches and
tuples; nothing of it is read or rewritten. What later layers need of an earlier call crosses the cut. Of all else only
its shape does, and the forward gets zeros that take no memory.

What is needed is found in one run of the example: every value has the numbers of the calls whose outputs went into it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from minipar.errors import PlanError
from minipar.models.cutting import Layered, check, is_inside, undisturbed, units_of
from minipar.models.tensors import dtype_name, dtype_named, map_tensors, rebuilt, tensors

_GIVEN = -1  # the number of the call that gives the model's input
_SHADOW = "shape of"  # marks what crosses a cut without its numbers
_READS = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist}

Source = tuple[int, int]  # a call, and which of the tensors that it gave
Call = Callable[[nn.Module, Any], Any]


class _Enough(BaseException):
    """The last call of a layer is made. (No handler of the model's own catches it.)"""


@dataclass
class Cut:
    """What each call of an example was: its module, and the sources that its inputs were made of. A parameter that is
    read between calls is a source by its name.

    end       the sources of the model's output
    changed   the sources that are changed in place between calls: each layer changes a copy
    """

    paths: list[str] = field(default_factory=list)
    needs: list[set[Any]] = field(default_factory=list)
    end: set[Any] = field(default_factory=set)
    changed: set[Source] = field(default_factory=set)


# one run of the example -----------------------------------------------------------------------------------------------


class _Sources(TorchFunctionMode):
    """Follows from which calls and parameters every tensor comes. What Python reads of a tensor may decide everything
    after it, and so belongs to everything after it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, set[Any]]] = {}
        self.read: set[Any] = set()

    def of(self, value: Any) -> set[Any]:
        found = set(self.read)
        for one in _all_tensors(value):
            found |= self.known.get(id(one), (one, set()))[1]
        return found

    def name(self, one: Tensor, sources: set[Any]) -> None:
        self.known[id(one)] = one, sources

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sources = self.of((args, kwargs))
        if func in _READS:
            self.read |= sources
        changed = [args[0]] if args and isinstance(args[0], Tensor) and (found is None or found is args[0]) else []
        for one in [*_all_tensors(found), *changed]:
            self.name(one, sources)
        return found


def _all_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in arguments, those in plain objects that they hold included (a cache of keys and values)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, set)):
        for part in value:
            yield from _all_tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _all_tensors(part)


def record(model: nn.Module, example: Any, call: Call, units: dict[str, nn.Module]) -> Cut:
    """Run a model on an example, and note every call of one of the units."""
    found, sources = Cut(), _Sources()
    for name, parameter in model.named_parameters():
        sources.name(parameter, {name})
    given: list[tuple[Source, Tensor, int]] = []  # with the version that it had
    for k, one in enumerate(tensors(example)):
        sources.name(one, {(_GIVEN, k)})
        given.append(((_GIVEN, k), one, one._version))

    def around(path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = len(found.paths)
        found.paths.append(path)
        found.needs.append(sources.of((args, kwargs)))
        with torch._C.DisableTorchFunction():
            output = run(*args, **kwargs)
        for k, one in enumerate(tensors(output)):
            sources.name(one, {(number, k)})
            given.append(((number, k), one, one._version))
        return output

    shared = dict(model.named_buffers())
    for path, unit in units.items():
        for name, _ in unit.named_buffers():
            shared.pop(f"{path}.{name}", None)
    before = {name: buffer._version for name, buffer in shared.items()}
    with undisturbed(model), torch.no_grad(), _intercepted(units, around), sources:
        found.end = sources.of(call(model, example))
        for name, buffer in shared.items():
            if buffer._version != before[name]:
                raise PlanError(f"model: buffer {name} changes between the calls of modules; put that into a module")
    found.changed = {source for source, one, version in given if one._version != version}
    return found


@contextmanager
def _intercepted(units: Mapping[str, nn.Module], around: Callable[..., Any]) -> Iterator[None]:
    """Within the block every call of a unit goes through a function. `around(path, run, args, kwargs)` is called."""
    before = {path: unit.__dict__.get("forward") for path, unit in units.items()}

    def through(path: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: around(path, run, args, kwargs)

    for path, unit in units.items():
        unit.__dict__["forward"] = through(path, unit.forward)
    try:
        yield
    finally:
        for path, unit in units.items():
            del unit.__dict__["forward"]
            if before[path] is not None:
                unit.__dict__["forward"] = before[path]


# the layers -----------------------------------------------------------------------------------------------------------


class Replayed(nn.Module):
    """A layer: the model's forward, of which it makes the calls `first` to `last`.

    paths   the modules of all calls
    keeps   of calls and the input, the tensors that cross the cut after this layer
    units   the paths of all modules that are not looked into
    """

    def __init__(
        self, model: nn.Module, call: Call, cut: Cut, own: range, keeps: set[Source], units: Iterable[str]
    ) -> None:
        super().__init__()
        self.call, self.paths, self.changed = call, tuple(cut.paths), cut.changed
        self.first, self.last, self.keeps = own.start, own.stop - 1, keeps
        self.units = tuple(units)
        names = ["input" if call == _GIVEN else cut.paths[call] for call, _ in sorted(keeps)]
        self.gives = tuple(dict.fromkeys(names))  # for the report
        # The copy of the model is no module of this one: what it holds is here at the same paths as in the model.
        self.hidden = (model,)
        for one in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[one] = model.__dict__[one]
        self.given: Any = None
        self.done: list[Any] = []

    def train(self, mode: bool = True) -> Replayed:
        self.hidden[0].training = mode
        return super().train(mode)

    def forward(self, given: Any) -> Any:
        self.given, self.done = (given, []) if self.first == 0 else (_lit(given["x"]), list(map(_lit, given["done"])))
        self.position = 0
        units = {path: self.get_submodule(path) for path in self.units}  # (others may have taken their places)
        try:
            with _left_early(), _intercepted(units, self.made):
                output = self.call(self.hidden[0], self._own(self.given, _GIVEN))
            if self.last < len(self.paths) - 1 or self.position < len(self.paths):
                made = f"ends after {self.position} calls of modules, and made {len(self.paths)}"
                raise PlanError(f"{self._title()} {made}{_OTHER}")
            return output
        except _Enough:
            return {
                "x": _crossing(self.given, _GIVEN, self.keeps),
                "done": [_crossing(one, k, self.keeps) for k, one in enumerate(self.done)],
            }
        finally:
            self.given, self.done = None, []

    def made(self, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call of a module gives in this layer."""
        k = self.position
        if k >= len(self.paths) or self.paths[k] != path:
            wanted = self.paths[k] if k < len(self.paths) else "none"
            raise PlanError(f"{self._title()} calls {path}, and called {wanted} there{_OTHER}")
        self.position += 1
        if k >= self.first:
            self.done.append(run(*args, **kwargs))
            if k == self.last < len(self.paths) - 1:
                raise _Enough
        return self._own(self.done[k], k)

    def _own(self, value: Any, call: int) -> Any:
        """What a call gives the forward: the value, or a copy of what the forward changes in place."""
        numbers = iter(range(len(tensors(value))))
        return map_tensors(value, lambda one: one.clone() if (call, next(numbers)) in self.changed else one)

    def _title(self) -> str:
        return f"model: the forward of {type(self.hidden[0]).__name__}"


@contextmanager
def _left_early() -> Iterator[None]:
    """torch.export keeps a stack of the modules whose forward it is in; what an exception leaves stays there."""
    stack = getattr(getattr(get_proxy_mode(), "tracer", None), "module_stack", {})
    before = dict(stack)
    try:
        yield
    finally:
        stack.clear()
        stack.update(before)


_OTHER = " on the example; a model whose calls depend on its input can only be one layer"


def _crossing(value: Any, call: int, keeps: set[Source]) -> Any:
    """A value with only those tensors that are needed later; of the others their shapes."""
    numbers = iter(range(len(tensors(value))))

    def kept(one: Tensor) -> Any:
        return one if (call, next(numbers)) in keeps else (_SHADOW, *one.shape, dtype_name(one.dtype))

    return map_tensors(value, kept)


def _lit(value: Any) -> Any:
    """The value, with zeros that take no memory for what has crossed as a shape."""
    if isinstance(value, tuple) and value and isinstance(value[0], str) and value[0] == _SHADOW:
        return torch.zeros((), dtype=dtype_named(value[-1])).expand(value[1:-1])
    if isinstance(value, (tuple, list)):
        return rebuilt(type(value), [_lit(part) for part in value])
    if isinstance(value, Mapping):
        return rebuilt(type(value), [_lit(part) for part in value.values()], list(value), value)
    return value


# the model's parts in each layer --------------------------------------------------------------------------------------


def at_blocks(model: nn.Module, example: Any, call: Call) -> Layered:
    """A model in layers, cut after the call of each of its blocks: the elements of its nn.ModuleLists and
    nn.Sequentials; if it has no two of them, all modules with parameters that are called.

    Errors: PlanError if there are no two blocks, or if the layers do not compute what the model does on the example.
    """
    units, modules = units_of(model), dict(model.named_modules())
    try:
        cut = record(model, example, call, units)
    except PlanError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise PlanError(
            f"model: {type(model).__name__} fails on the example: {type(error).__name__}: {reason[0]}"
        ) from error
    blocks = [path for path in cut.paths if is_inside(path, modules)]
    if len(blocks) < 2:
        blocks = [path for path in cut.paths if next(units[path].parameters(), None) is not None]
    layers: dict[str, nn.Module] = {}
    holders: dict[str, range] = {}
    for own in _ranges(cut, blocks, units):
        for path in {cut.paths[k] for k in own}:
            if holders.setdefault(path, own) != own and next(units[path].buffers(), None) is not None:
                raise PlanError(
                    f"model: module {path} has buffers and is called in two layers, which may be on two ranks; give "
                    "each use a module of its own"
                )
        after = [*cut.needs[own.stop :], cut.end]
        later = set().union(*after) if own.stop < len(cut.paths) else set()
        used = set().union(*cut.needs[own.start : own.stop])
        if own.stop == len(cut.paths):  # (it has what nothing uses, too: that is the model's)
            inside = tuple(f"{path}." for path in units)
            unused = {name for name, _ in model.named_parameters() if not name.startswith(inside)}
            used |= cut.end | unused - set().union(*cut.needs)
        keeps = {one for one in later if isinstance(one, tuple) and one[0] < own.stop}
        title = next((cut.paths[k] for k in own if cut.paths[k] in blocks), cut.paths[own.start]).replace(".", "_")
        layer = _layer(model, call, cut, own, keeps, units, {one for one in used if isinstance(one, str)})
        layers[title if title not in layers else f"{title}_again_{own.start}"] = layer
    return check(model, Layered(layers, model), example, call, "cut between its blocks, its forward runs in each layer")


def _ranges(cut: Cut, blocks: Collection[str], units: dict[str, nn.Module]) -> list[range]:
    """The calls of each layer: what comes before the first block, each block with what comes before it, and the rest.
    A layer has parameters, as far as the model has them there."""
    places = [k for k, path in enumerate(cut.paths) if path in blocks]
    trains = [next(units[path].parameters(), None) is not None for path in cut.paths]
    if len(places) < 2:
        raise PlanError("model: its forward calls no two blocks, between which it could be cut")
    ends = [places[0]] * any(trains[: places[0]]) + [k + 1 for k in places]
    if any(trains[ends[-1] :]):
        ends.append(len(cut.paths))
    ends[-1] = len(cut.paths)
    return [range(a, b) for a, b in pairwise([0, *ends])]


def _layer(
    model: nn.Module, call: Call, cut: Cut, own: range, keeps: set[Source], units: dict[str, nn.Module], used: set[str]
) -> Replayed:
    """A layer with the modules that it calls, and the parameters that it reads between their calls. The last layer has
    the modules that are never called, too."""
    here = {cut.paths[k] for k in own}
    if own.stop == len(cut.paths):
        here |= units.keys() - set(cut.paths)

    def part(path: str, module: nn.Module) -> nn.Module:
        if path not in units:
            own_copy = _shallow(module)
            for name, child in module._modules.items():
                own_copy._modules[name] = child and part(f"{path}.{name}" if path else name, child)
            for name, parameter in module._parameters.items():
                if parameter is not None and f"{path}.{name}".lstrip(".") not in used:
                    _empty(own_copy, name, parameter)
            return own_copy
        read = any(name.startswith(f"{path}.") for name in used)  # (such as `self.embed.weight`, between calls)
        return module if path in here or read else _emptied(module)

    return Replayed(part("", model), call, cut, own, keeps, units)


def _shallow(module: nn.Module) -> nn.Module:
    """A module with the same parameters and children, to which others can be given."""
    found: nn.Module = object.__new__(type(module))
    found.__dict__.update(module.__dict__)
    for one in ("_parameters", "_buffers", "_modules"):
        found.__dict__[one] = dict(module.__dict__[one])
    return found


def _emptied(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have their shapes, and no memory; it is called, but nothing runs."""
    found = _shallow(module)
    for name, child in module._modules.items():
        found._modules[name] = child and _emptied(child)
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            _empty(found, name, tensor)
    for one in vars(found):
        if one.endswith("_hooks"):
            found.__dict__[one] = type(found.__dict__[one])()
    return found


def _empty(module: nn.Module, name: str, tensor: Tensor) -> None:
    (module._parameters if name in module._parameters else module._buffers).pop(name)
    module.__dict__[name] = tensor.new_zeros(()).expand(tensor.shape)
