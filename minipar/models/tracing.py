"""`from_torch`: cuts any nn.Module that can be traced into layers.

    def forward(self, x):                     layer 0     stem          takes x, gives a
        a = self.stem(x)                      layer 1     blocks_0      takes a, gives (a, b)
        b = self.blocks[0](a)                 layer 2     blocks_1      takes (a, b), gives c
        c = self.blocks[1](b) + a             layer 3     head
        return self.head(c)

torch.fx traces what the model's forward does between its blocks. It does not trace blocks themselves, so these may
contain any code. The cuts are between blocks, where later layers need the fewest bytes. Each layer gives everything
that later layers need, so a skip connection goes through the layers that it skips.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from minipar.errors import PlanError
from minipar.models.cutting import (
    Holder,
    Layered,
    check,
    first_line,
    hold_tensor,
    is_inside,
    is_spine,
    is_unit,
    statement,
    undisturbed,
    versions,
)
from minipar.models.network import Network, is_only_layers
from minipar.models.replaying import Whole, at_blocks, shallow
from minipar.models.tensors import arguments, count_bytes, opaque, rebuilt

_WHOLE = "model."  # where the tracer finds the model


def from_torch(model: nn.Module, example: Any) -> nn.Sequential:
    """A model cut into layers that `train` takes: an nn.Sequential that computes the same.

    model     an nn.Sequential (nested ones that contain blocks are opened), or a model whose forward torch.fx can trace
              between its blocks: the elements of its nn.Sequential and nn.ModuleList, and its other parts
    example   an input of a few rows: a tensor, or a tuple or dict of the arguments of the model's forward; the rows
              that `train` gives to the layers have the same structure
    Parameters and modules are the model's own, not copies: tied parameters stay tied, and each module keeps its mode
    and dtype. `named_parameters` and `state_dict` use the model's names. `print(layers.report)` says what crosses each
    cut.

    Errors: PlanError, with the reason and what to do, if the model cannot be traced, or if the layers do not give the
    same output and gradients on the example.
    """
    if is_only_layers(model):
        if isinstance(model, Network):
            return model
        found = _flattened(model)
        way = "the elements of an nn.Sequential"
        named = {_key(path): _Only(path, module) for path, module in found}
        return check(model, Layered(named, model), example, _call, way)
    if isinstance(model, (Scripted, torch.jit.ScriptModule)):
        name = model._compiled.original_name if isinstance(model, Scripted) else model.original_name
        raise PlanError(
            f"model: torch.jit has compiled {name} into code that cannot be cut; possible is the module as it was "
            "before torch.jit.script or torch.jit.trace"
        )
    model = _uncompiled(model)
    errors: list[PlanError] = []
    for fine in (False, True):
        for rung in (_between_operators, partial(at_blocks, call=_call)):
            try:
                return rung(model, example, fine=fine)
            except PlanError as error:
                errors.append(error)
            except Exception as error:
                reason = f"{type(error).__name__}: {first_line(error)}{statement(error)}"
                errors.append(PlanError(f"model: the forward of {type(model).__name__} fails in layers: {reason}"))
    own = errors[1].reason.removeprefix("model: ")
    raise PlanError(f"{errors[0].reason}; with its forward run in each layer, {own}", errors[0].details) from errors[0]


def in_layers(model: nn.Module, example: Any, uncut: str = "") -> nn.Sequential:
    """Any model as layers: cut between its blocks, or else one layer, with the reason in its report. `uncut`: a reason
    that is known."""
    try:
        if not uncut:
            return from_torch(model, example)
    except PlanError as error:
        uncut = error.reason.removeprefix("model: ")
    whole = Layered({"whole": Whole(model, _call)}, model)
    return check(model, whole, example, _call, f"one layer, since {uncut}")


def _between_operators(model: nn.Module, example: Any, fine: bool) -> Layered:
    """A model cut between the operators that torch.fx traces. Errors: PlanError."""
    graph, whole = _traced(model, example, fine)
    before = versions(dict(whole.named_modules()))
    with undisturbed(model):
        segments = _segments(graph, whole, _run(graph, whole, example), fine)
    after = versions(dict(whole.named_modules()))
    if len(segments) < 2:
        raise PlanError(
            f"model: {type(model).__name__} has no two blocks to cut between; possible are models whose forward calls "
            "several modules with parameters"
        )
    changing = {path for path, found in after.items() if found != before[path]}
    pieces = _pieces(graph, whole, segments, changing)
    return check(model, Layered(pieces, model), example, _call, "cut between its blocks")


def _call(model: nn.Module, example: Any) -> Any:
    """Runs the model on an example, whose parts are the arguments of its forward."""
    if getattr(type(model), "forward", None) is nn.Sequential.forward:
        return model(example)
    args, named = arguments(model, example)
    # (keys and values of transformers' models are no values that layers hand on)
    options = {"use_cache": False} if named and getattr(getattr(model, "config", None), "use_cache", False) else {}
    return model(*args, **options | named)


class Uncompiled(nn.Module):
    """In place of a module that torch.compile has wrapped: what is in it, at its path there."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self._orig_mod, self.training = wrapped.get_submodule("_orig_mod"), wrapped.training

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._orig_mod(*args, **named)


class Scripted(nn.Module):
    """A module that torch.jit has compiled, as any other one: it has the same parameters and buffers at the same paths,
    and others may take their places."""

    _compiled: torch.jit.ScriptModule

    def __init__(self, compiled: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.__dict__["_compiled"] = compiled  # (no child: torch.jit takes no hooks, and copies no dicts of parameters)
        self.training = compiled.training
        made: dict[int, nn.Parameter] = {}  # (a module that was loaded has tensors for parameters)
        for path, p in compiled.named_parameters(remove_duplicate=False):
            made.setdefault(id(p), p if isinstance(p, nn.Parameter) else nn.Parameter(p.detach(), p.requires_grad))
            hold_tensor(self, path, made[id(p)])
        for path, buffer in compiled.named_buffers(remove_duplicate=False):
            hold_tensor(self, path, buffer)

    def train(self, mode: bool = True) -> Scripted:
        self._compiled.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **named: Any) -> Any:
        modules = dict(self._compiled.named_modules(remove_duplicate=False))
        places = [(own, modules[path]) for path, own in self.named_modules()]
        for own, there in places:
            for name in own._parameters:
                there._parameters[name] = own._parameters[name]
            for name in own._buffers:
                there._buffers[name] = own._buffers[name]
        output = self._compiled(*args, **named)
        for own, there in places:
            for name in own._buffers:
                own._buffers[name] = there._buffers[name]
        return output


def _uncompiled(model: nn.Module) -> nn.Module:
    """The model as code that can be followed. (Modules in it stay compiled: they are units.)"""
    if "_orig_mod" in model._modules:
        return Uncompiled(model)
    return model if model._compiled_call_impl is None else shallow(model)


# an nn.Sequential -----------------------------------------------------------------------------------------------------


class _Only(Holder):
    """A layer that holds one module, at its path."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__({path: module})
        self.path = path

    def forward(self, x: Any) -> Any:
        return self.get_submodule(self.path)(x)


def _flattened(model: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The elements of an nn.Sequential. An element that contains blocks is replaced by its own elements."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in model._modules.items():
        if child is None:
            continue
        path = prefix + name
        if type(child) is nn.Sequential and is_spine(child):
            found += _flattened(child, path + ".")
        else:
            found.append((path, child))
    return found


def _key(path: str) -> str:
    """The name of a layer. (The name of a module must have no dots.)"""
    return path.replace(".", "_")


# tracing --------------------------------------------------------------------------------------------------------------


class _Whole(nn.Module):
    """A model as a function of one value that has the example's structure."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model = model
        args, named = arguments(model, example)
        self.keys = list(named) if named else None
        self.count = len(args) if args and args[0] is not example else None

    def forward(self, x: Any) -> Any:
        if self.keys is not None:
            return self.model(**{key: x[key] for key in self.keys})
        return self.model(x) if self.count is None else self.model(*[x[k] for k in range(self.count)])


class _Tracer(fx.Tracer):
    """Traces only modules that contain blocks, and treats all others as leaves."""

    def __init__(self, whole: nn.Module, fine: bool) -> None:
        super().__init__()
        self.modules, self.fine = dict(whole.named_modules()), fine

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name + "." != _WHOLE and is_unit(m, module_qualified_name, self.modules, self.fine)


def _traced(model: nn.Module, example: Any, fine: bool) -> tuple[fx.Graph, _Whole]:
    """What the model does between its blocks. Errors: PlanError if this cannot be traced."""
    modes = [(module, module.training) for module in model.modules()]
    traced = []
    try:
        for mode in (model.training, not model.training):
            for module, own in modes:
                module.training = own if mode is model.training else not own
            whole = _Whole(model, example)
            with undisturbed(model):
                traced.append((_Tracer(whole, fine).trace(whole), whole))
            for module, own in modes:
                module.training = own
    except Exception as error:
        raise PlanError(
            f"model: the forward of {type(model).__name__} cannot be traced: {first_line(error)}{statement(error)}",
            "Outside of its blocks a forward may not branch on the values of tensors or iterate over them. Ways out: "
            "put such code into modules of their own, in an nn.ModuleList or nn.Sequential (blocks are not looked "
            "into); write the model as an nn.Sequential; or, of Hugging Face's, use models.from_transformers.",
        ) from error
    finally:
        for module, own in modes:
            module.training = own
    first, second = (graph.python_code("self").src for graph, _ in traced)
    if first != second:
        raise PlanError(
            f"model: the forward of {type(model).__name__} does something else in train mode than in eval mode outside "
            "of its blocks, such as F.dropout(x, training=self.training); use a module there, such as nn.Dropout"
        )
    return traced[0]


# cutting --------------------------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """Facts about a value that was computed from the example."""

    nbytes: int
    opaque: bool


def _run(graph: fx.Graph, whole: _Whole, example: Any) -> dict[str, _Known]:
    """Run a traced model on an example. Returns facts about each of its values, by name."""
    names = [node.name for node in graph.nodes if node.op not in ("placeholder", "output")]
    (given,) = [node.name for node in graph.nodes if node.op == "placeholder"]
    steps = [_step(node) for node in graph.nodes if node.op not in ("placeholder", "output")]
    known = {given: _Known(count_bytes(example), opaque(example) is not None)}
    values = {given: example}
    with torch.no_grad():
        for name, step in zip(names, steps, strict=True):
            values[name] = step(whole, values, _WHOLE)
            known[name] = _Known(count_bytes(values[name]), opaque(values[name]) is not None)
    return known


@dataclass(frozen=True)
class _Ref:
    """The result of an earlier step."""

    name: str


@dataclass(frozen=True)
class _Step:
    """One operation of a traced forward. `dead` has the values of which it is the last reader."""

    op: str
    target: Any
    args: Any
    kwargs: Any
    name: str
    dead: tuple[str, ...] = ()

    def __deepcopy__(self, memo: Any) -> _Step:
        return self  # (nothing in it changes, and torch copies no function that torch.jit has compiled)

    def __call__(self, root: nn.Module, values: dict[str, Any], prefix: str = "") -> Any:
        args, kwargs = (_filled(given, values) for given in (self.args, self.kwargs))
        if self.op == "call_module":
            return root.get_submodule(prefix + self.target)(*args, **kwargs)
        if self.op == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        if self.op == "get_attr":
            own = prefix if not self.target.startswith("_tensor_constant") else ""
            return reduce(getattr, (own + self.target).split("."), root)
        return self.target(*args, **kwargs)


def _filled(given: Any, values: dict[str, Any]) -> Any:
    return map_aggregate(given, lambda one: values[one.name] if isinstance(one, _Ref) else one)


def _plain(value: Any) -> Any:
    """A result in tuples, lists and dicts as the model makes them (torch.fx has kinds of its own)."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, tuple):
        return rebuilt(type(value), [_plain(part) for part in value])
    return value


def _step(node: fx.Node, dead: tuple[str, ...] = ()) -> _Step:
    target = node.target
    if node.op in ("call_module", "get_attr"):
        target = str(target).removeprefix(_WHOLE)
    args, kwargs = (_references(given) for given in (node.args, node.kwargs))
    return _Step(node.op, target, args, kwargs, node.name, dead)


def _references(given: Any) -> Any:
    def reference(one: Any) -> Any:
        return _Ref(one.name) if isinstance(one, fx.Node) else one

    return map_aggregate(given, reference)


def _segments(graph: fx.Graph, whole: _Whole, known: dict[str, _Known], fine: bool) -> list[list[fx.Node]]:
    """The operations of each layer. The cuts are between blocks, where later layers need the fewest bytes."""
    nodes = [node for node in graph.nodes if node.op in ("call_module", "call_function", "call_method")]
    tracer = _Tracer(whole, fine)
    trains = [_trains(node, whole) for node in nodes]
    blocks = [k for k, node in enumerate(nodes) if trains[k] and node.op == "call_module"]
    inside = [k for k in blocks if is_inside(str(nodes[k].target), tracer.modules)]
    blocks = inside if len(inside) > 1 else blocks
    if len(blocks) < 2:
        return [nodes]
    place = {node: k for k, node in enumerate(nodes)}
    last = {node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in graph.nodes}
    carried = [node for node in graph.nodes if node.op == "placeholder"]

    def needed(k: int) -> list[fx.Node]:
        """The values of the first k + 1 operations, and of the input, that later ones read."""
        return [node for node in carried + nodes[: k + 1] if last[node] > k]

    def best(places: Sequence[int], sign: int = 1) -> int | None:
        possible = [k for k in places if not any(known[node.name].opaque for node in needed(k))]
        return min(possible, key=lambda k: (sum(known[n.name].nbytes for n in needed(k)), sign * k), default=None)

    ranges = [range(a, b) for a, b in pairwise(blocks)]
    before = [k for k in range(blocks[0]) if any(trains[: k + 1])]
    after = [k for k in range(blocks[-1], len(nodes) - 1) if any(trains[k + 1 :])]
    found = [best(before, -1), *map(best, ranges), best(after)]
    cuts = [cut for cut in found if cut is not None]
    starts = [0, *(cut + 1 for cut in cuts), len(nodes)]
    return [nodes[a:b] for a, b in pairwise(starts)]


def _trains(node: fx.Node, whole: nn.Module) -> bool:
    """Whether an operation has parameters."""
    if node.op == "call_module":
        return next(whole.get_submodule(str(node.target)).parameters(), None) is not None
    read = [one for one in node.all_input_nodes if one.op == "get_attr"]
    return any(isinstance(_attribute(whole, one), nn.Parameter) for one in read)


def _attribute(whole: nn.Module, node: fx.Node) -> Any:
    return reduce(getattr, str(node.target).split("."), whole)


class _Piece(Holder):
    """Some operations of a traced forward, as a layer.

    takes, gives   names of its input and output values; several values are in a tuple
    result         only for the last layer: what it returns
    """

    def __init__(
        self, held: dict[str, nn.Module], steps: Sequence[_Step], takes: tuple[str, ...], gives: tuple[str, ...],
        result: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(held)
        self.steps, self.takes, self.gives, self.result = tuple(steps), takes, gives, result
        self._minipar_gives = gives

    def forward(self, given: Any) -> Any:
        values = {self.takes[0]: given} if len(self.takes) == 1 else dict(zip(self.takes, given, strict=True))
        del given
        for step in self.steps:
            values[step.name] = step(self, values)
            for name in step.dead:
                del values[name]
        if self.result is not None:
            return _plain(_filled(self.result, values))
        return values[self.gives[0]] if len(self.gives) == 1 else tuple(values[name] for name in self.gives)


def _pieces(
    graph: fx.Graph, whole: _Whole, segments: Sequence[list[fx.Node]], changing: Collection[str]
) -> dict[str, nn.Module]:
    """One layer for each segment. `changing`: the modules whose buffers their calls change."""
    (given,) = [node for node in graph.nodes if node.op == "placeholder"]
    (end,) = [node for node in graph.nodes if node.op == "output"]
    holders: dict[str, int] = {}
    titled: dict[str, nn.Module] = {}
    takes = (given.name,)
    done = {given}
    for k, segment in enumerate(segments):
        constants = list(dict.fromkeys(n for node in segment for n in node.all_input_nodes if n.op == "get_attr"))
        final = k == len(segments) - 1
        if final:
            constants += [n for n in end.all_input_nodes if n.op == "get_attr" and n not in constants]
        done.update(segment)
        later = {node for rest in segments[k + 1 :] for node in rest} | {end}
        gives = tuple(n.name for n in graph.nodes if n in done and later & n.users.keys())
        nodes = [*constants, *segment]
        steps = [_step(node, dead) for node, dead in zip(nodes, _last_reads(nodes, takes, gives), strict=True)]
        held = {}
        for node in segment:
            if node.op == "call_module":
                path = str(node.target)
                held[path.removeprefix(_WHOLE)] = whole.get_submodule(path)
                if holders.setdefault(path, k) != k and path in changing:
                    raise PlanError(
                        f"model: module {path.removeprefix(_WHOLE)} changes its buffers and is used in layers "
                        f"{holders[path]} and {k}, which may be on two ranks; give each use a module of its own"
                    )
        piece = _Piece(held, steps, takes, gives, _references(end.args[0]) if final else None)
        for node in constants:
            hold_tensor(piece, str(node.target).removeprefix(_WHOLE), _attribute(whole, node))
        title = next((str(n.target) for n in segment if n.op == "call_module" and _trains(n, whole)), segment[0].name)
        title = _key(title.removeprefix(_WHOLE))
        titled[title if title not in titled else f"{title}_again_{k}"] = piece
        takes = gives
    return titled


def _last_reads(nodes: Sequence[fx.Node], takes: Sequence[str], gives: Sequence[str]) -> list[tuple[str, ...]]:
    """For each operation, the values that no later operation reads."""
    left = {*takes, *(node.name for node in nodes)} - {*gives}
    found: list[tuple[str, ...]] = []
    for node in reversed(nodes):
        dead = {one.name for one in node.all_input_nodes} | {node.name}
        found.append(tuple(sorted(dead & left)))
        left -= dead
    return found[::-1]
