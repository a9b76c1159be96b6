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
its shape does, and the forward gets a tensor that takes no memory.

What is needed is found in one run of the example: every value has the numbers of the calls whose outputs went into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from minipar.errors import PlanError
from minipar.models.cutting import Layered, check, first_line, is_inside, undisturbed, units_of, versions
from minipar.models.tensors import (
    EMPTIED,
    SHADOW,
    count_rows,
    dtype_name,
    dtype_named,
    items_of,
    map_tensors,
    named_tensors,
    rebuilt,
    take_rows,
    tensors,
)

_GIVEN = -1  # the number of the call that gives the model's input
_READS = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist}

Source = tuple[int, str]  # a call, and the place of a tensor in what it gave, such as "[0]"
Call = Callable[[nn.Module, Any], Any]


class _Enough(BaseException):
    """The last call of a layer is made. (No handler of the model's own catches it.)"""


@dataclass
class Cut:
    """What each call of an example was: its module, and the sources that its inputs were made of. A parameter that is
    read between calls is a source by its name.

    given     the sources that are tensors of the input, or that a call gave
    end       the sources of the model's output
    changed   the sources that are changed in place between calls: each layer changes a copy
    counting  the modules whose buffers their calls change
    """

    paths: list[str] = field(default_factory=list)
    needs: list[set[Any]] = field(default_factory=list)
    given: set[Source] = field(default_factory=set)
    end: set[Any] = field(default_factory=set)
    changed: set[Source] = field(default_factory=set)
    counting: set[str] = field(default_factory=set)


# one run of the example -----------------------------------------------------------------------------------------------


class _Sources(TorchFunctionMode):
    """Follows from which calls and parameters every tensor comes. What Python reads of a tensor may decide everything
    after it, and so belongs to everything after it."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, set[Any]]] = {}
        self.read: set[Any] = set()
        self.checked: set[Any] = set()  # what torch.distributions reads, only to refuse numbers that are none

    def of(self, value: Any) -> set[Any]:
        found = self.read | self.checked
        for one in _all_tensors(value):
            found |= self.known.get(id(one), (one, set()))[1]
        return found

    def name(self, one: Tensor, sources: set[Any]) -> None:
        self.known[id(one)] = one, sources

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sources = self.of((args, kwargs))
        if func in _READS:
            code = sys._getframe(1).f_code.co_filename
            (self.checked if "distributions" in Path(code).parts[-2:] else self.read).update(sources)
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
    else:
        for part in items_of(value).values():
            yield from _all_tensors(part)


def record(model: nn.Module, example: Any, call: Call, units: dict[str, nn.Module]) -> Cut:
    """Run a model on an example, and note every call of one of the units."""
    found, sources = Cut(), _Sources()
    for name, parameter in model.named_parameters():
        sources.name(parameter, {name})
    seen: list[tuple[Source, Tensor, int]] = []

    def note(call: int, value: Any) -> None:
        for place, one in named_tensors(value, ""):
            sources.name(one, {(call, place)})
            found.given.add((call, place))
            seen.append(((call, place), one, one._version))

    note(_GIVEN, example)

    def around(path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = len(found.paths)
        found.paths.append(path)
        found.needs.append(sources.of((args, kwargs)))
        with torch._C.DisableTorchFunction():
            output = run(*args, **kwargs)
        note(number, output)
        return output

    shared = dict(model.named_buffers())
    for path, unit in units.items():
        for name, _ in unit.named_buffers():
            shared.pop(f"{path}.{name}", None)
    before, own = {name: buffer._version for name, buffer in shared.items()}, versions(units)
    with undisturbed(model), torch.no_grad(), _intercepted(units, around), sources:
        found.end = sources.of(call(model, example))
        computed = sorted({found.paths[one[0]] for one in sources.read if one[0] in range(len(found.paths))})
        if computed:
            raise PlanError(
                f"model: the forward of {type(model).__name__} decides by values that {computed[0]} gives, so that "
                "other rows may need other calls; it can only be one layer"
            )
        for name, buffer in shared.items():
            if buffer._version != before[name]:
                raise PlanError(f"model: buffer {name} changes between the calls of modules; put that into a module")
    found.changed = {source for source, one, version in seen if one._version != version}
    found.counting = {path for path, numbers in versions(units).items() if numbers != own[path]}
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


class Whole(nn.Module):
    """A layer that calls a model, whose modules and parameters it has at the same paths: as one layer, or by `part`.

    Nothing else is an attribute, since the model may have a module of any name.
    """

    def __init__(self, model: nn.Module, call: Call, part: Part | None = None) -> None:
        super().__init__()
        for one in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[one] = model.__dict__[one]
        self.__dict__["_minipar"] = model, call, part
        self.__dict__["_minipar_gives"] = part and part.names
        self.training = model.training

    def train(self, mode: bool = True) -> Whole:
        model, *_ = self.__dict__["_minipar"]
        model.training = mode
        return super().train(mode)

    def forward(self, x: Any) -> Any:
        model, call, part = self.__dict__["_minipar"]
        if part is None:
            return call(model, x)
        units = {path: self.get_submodule(path) for path in part.units}  # (others may have taken their places)
        return _Replay(part, type(model).__name__, x).run(partial(call, model), units)


@dataclass(frozen=True)
class Part:
    """What a layer does of a model's forward: the calls `first` to `last`.

    paths     the modules of all calls
    given     of the input and the calls until here, all tensors that there were on the example
    drops     those whose numbers no later layer needs
    changed   those that the forward changes in place
    units     the paths of all modules that are not looked into
    """

    paths: tuple[str, ...]
    first: int
    last: int
    given: frozenset[Source]
    drops: frozenset[Source]
    changed: frozenset[Source]
    units: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What crosses the cut after this layer, for the report."""
        kept = sorted(self.given - self.drops)
        return tuple(dict.fromkeys("input" if k == _GIVEN else self.paths[k] for k, _ in kept))


class _Replay:
    """One run of the forward in a layer. `done`: what the calls have given until now."""

    def __init__(self, part: Part, name: str, given: Any) -> None:
        self.part, self.name, self.position = part, name, 0
        device = next((one.device for one in tensors(given)), torch.device("cpu"))
        self.given = given if part.first == 0 else _lit(given["x"], device)
        self.done = [] if part.first == 0 else [_lit(one, device) for one in given["done"]]
        places = {place for call, place in part.given if call == _GIVEN}
        # Rows of another form (a mask more) may take another way through the forward: then everything crosses.
        self.known = places == {place for place, _ in named_tensors(self.given, "")}

    def run(self, forward: Callable[[Any], Any], units: Mapping[str, nn.Module]) -> Any:
        part = self.part
        try:
            with _left_early(), _intercepted(units, self._made):
                output = forward(self._own(self.given, _GIVEN))
        except _Enough:
            drops = part.drops if self.known else frozenset()
            done = [_crossing(one, k, drops) for k, one in enumerate(self.done)]
            return {"x": _crossing(self.given, _GIVEN, drops), "done": done}
        if self.position < len(part.paths):
            raise self._error(f"ends after {self.position} calls of modules, and made {len(part.paths)}")
        return output

    def _made(self, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call of a module gives in this layer."""
        k, part = self.position, self.part
        if k >= len(part.paths) or part.paths[k] != path:
            raise self._error(f"calls {path}, and called {part.paths[k] if k < len(part.paths) else 'nothing'} there")
        self.position += 1
        if k >= part.first:
            self.done.append(run(*args, **kwargs))
            if k == part.last < len(part.paths) - 1:
                raise _Enough
        return self._own(self.done[k], k)

    def _own(self, value: Any, call: int) -> Any:
        """What a call gives the forward: the value, or a copy of what the forward changes in place."""
        places = iter([place for place, _ in named_tensors(value, "")])
        changed = self.part.changed

        def own(one: Tensor) -> Tensor:
            return one.clone() if (call, next(places)) in changed or not self.known else one

        return map_tensors(value, own) if changed or not self.known else value

    def _error(self, what: str) -> PlanError:
        return PlanError(
            f"model: the forward of {self.name} {what} on the example; a model whose calls depend on its input can "
            "only be one layer"
        )


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


def _crossing(value: Any, call: int, drops: Collection[Source]) -> Any:
    """A value without the numbers that are not needed later: of those tensors only the shape is left."""
    places = iter([place for place, _ in named_tensors(value, "")])

    def kept(one: Tensor) -> Any:
        return (SHADOW, *one.shape, dtype_name(one.dtype)) if (call, next(places)) in drops else one

    return map_tensors(value, kept)


def _lit(value: Any, device: torch.device) -> Any:
    """The value, with tensors of no memory for what has crossed as a shape."""
    if isinstance(value, tuple) and value and isinstance(value[0], str) and value[0] == SHADOW:
        return _hollow(torch.empty((), dtype=dtype_named(value[-1]), device=device), value[1:-1])
    if isinstance(value, (tuple, list)):
        return rebuilt(type(value), [_lit(part, device) for part in value])
    if items := items_of(value):
        return rebuilt(type(value), [_lit(part, device) for part in items.values()], list(items), value)
    return value


def _hollow(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of a shape, of one number: if it is used after all, the loss is no number, or an index is far off."""
    kind = like.dtype
    floating = kind.is_floating_point or kind.is_complex
    number = float("nan") if floating else kind is not torch.bool and torch.iinfo(kind).min
    return torch.full((), number, dtype=kind, device=like.device).expand(tuple(shape))


# the model's parts in each layer --------------------------------------------------------------------------------------


def at_blocks(model: nn.Module, example: Any, call: Call, fine: bool = False) -> Layered:
    """A model in layers, cut after the call of each of its blocks: the elements of its nn.ModuleLists and
    nn.Sequentials; if it has no two of them, or if fine, all modules with parameters that are called.

    Errors: PlanError if there are no two blocks, or if the layers do not compute what the model does on the example.
    """
    units, modules = units_of(model, fine), dict(model.named_modules())
    try:
        cut = record(model, example, call, units)
        if cut.paths != _paths_of_one_row(model, example, call, units, cut.paths):
            raise PlanError(
                f"model: the forward of {type(model).__name__} calls other modules for fewer rows; it can only be one "
                "layer"
            )
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            f"model: {type(model).__name__} fails on the example: {type(error).__name__}: {first_line(error)}"
        ) from error
    blocks = [path for path in cut.paths if is_inside(path, modules)]
    if fine or len(blocks) < 2:
        blocks = [path for path in cut.paths if next(units[path].parameters(), None) is not None]
    way = "cut between its blocks, its forward runs in each layer"
    try:
        return check(model, Layered(_layers(model, call, cut, blocks, units, True), model), example, call, way)
    except Exception:  # such as an index that is not there any more, in what the forward does again for nobody
        return check(model, Layered(_layers(model, call, cut, blocks, units, False), model), example, call, way)


def _layers(
    model: nn.Module, call: Call, cut: Cut, blocks: Collection[str], units: dict[str, nn.Module], sparing: bool
) -> dict[str, nn.Module]:
    """The layers by their names. If sparing, only what later layers need crosses the cuts."""
    layers: dict[str, nn.Module] = {}
    emptied: dict[str, nn.Module] = {}  # units as they stand in layers that do not call them
    holders: dict[str, range] = {}
    for own in _ranges(cut, blocks, units):
        for path in {cut.paths[k] for k in own}:
            if holders.setdefault(path, own) != own and path in cut.counting:
                raise PlanError(
                    f"model: module {path} changes its buffers and is called in two layers, which may be on two ranks; "
                    "give each use a module of its own"
                )
        after = [*cut.needs[own.stop :], cut.end]
        later = set().union(*after) if own.stop < len(cut.paths) else set()
        used = set().union(*cut.needs[own.start : own.stop])
        if own.stop == len(cut.paths):  # (it has what nothing uses, too: that is the model's)
            inside = tuple(f"{path}." for path in units)
            unused = {name for name, _ in model.named_parameters() if not name.startswith(inside)}
            used |= cut.end | unused - set().union(*cut.needs)
        given = {one for one in cut.given if one[0] < own.stop}
        drops = given - later if sparing else set()
        title = next((cut.paths[k] for k in own if cut.paths[k] in blocks), cut.paths[own.start]).replace(".", "_")
        needed = {one for one in used if isinstance(one, str)}
        layer = _layer(model, call, cut, own, given, drops, units, needed, emptied)
        layers[title if title not in layers else f"{title}_again_{own.start}"] = layer
    return layers


def _paths_of_one_row(
    model: nn.Module, example: Any, call: Call, units: dict[str, nn.Module], otherwise: list[str]
) -> list[str]:
    """The modules that are called for one row of the example; a model may refuse so few, such as one with BatchNorm."""
    try:
        return record(model, take_rows(example, range(1)), call, units).paths if count_rows(example) > 1 else otherwise
    except Exception:
        return otherwise


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
    model: nn.Module, call: Call, cut: Cut, own: range, given: set[Source], drops: set[Source],
    units: dict[str, nn.Module], used: set[str], emptied: dict[str, nn.Module],
) -> Whole:  # fmt: skip
    """A layer with the modules that it calls, and the parameters that it reads between their calls. The last layer has
    the modules that are never called, too."""
    here = {cut.paths[k] for k in own}
    if own.stop == len(cut.paths):
        here |= units.keys() - set(cut.paths)

    def part(path: str, module: nn.Module) -> nn.Module:
        if path not in units:
            own_copy = shallow(module)
            for name, child in module._modules.items():
                inner = f"{path}.{name}" if path else name
                own_copy._modules[name] = None if child is None else part(inner, child)
            for name, parameter in module._parameters.items():
                if parameter is not None and f"{path}.{name}".lstrip(".") not in used:
                    _empty(own_copy, name, parameter)
            return own_copy
        read = any(name.startswith(f"{path}.") for name in used)  # (such as `self.embed.weight`, between calls)
        if path in here or read:
            return module
        if path not in emptied:
            emptied[path] = _emptied(module)
        return emptied[path]

    sources = frozenset(given), frozenset(drops), frozenset(cut.changed)
    own_part = Part(tuple(cut.paths), own.start, own.stop - 1, *sources, tuple(units))
    return Whole(part("", model), call, own_part)


def shallow(module: nn.Module) -> nn.Module:
    """A module with the same parameters and children, to which others can be given."""
    found: nn.Module = object.__new__(type(module))
    found.__dict__.update(module.__dict__)
    found.__dict__.pop("_compiled_call_impl", None)  # (which calls the other one)
    for one in ("_parameters", "_buffers", "_modules"):
        found.__dict__[one] = dict(module.__dict__[one])
    return found


def _emptied(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have their shapes, and no memory; it is called, but nothing runs."""
    found = shallow(module)
    setattr(found, EMPTIED, True)
    for name, child in module._modules.items():
        found._modules[name] = None if child is None else _emptied(child)
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            _empty(found, name, tensor)
    for one in vars(found):
        if one.endswith("_hooks"):
            found.__dict__[one] = type(found.__dict__[one])()
    return found


def _empty(module: nn.Module, name: str, tensor: Tensor) -> None:
    (module._parameters if name in module._parameters else module._buffers).pop(name)
    module.__dict__[name] = _hollow(tensor, tensor.shape)
