"""Capture: plain torch code to operators, a layer of the model at a time, by `torch.export`.

    captured = capture_model(model, example)    # an nn.Sequential of layers, as models.gpt or from_torch gives
    print(captured.coverage)                    # which operators have a rule
    sharding = propagate_model(captured.layers, megatron(), Mesh(tp=2))

Parameters keep their names. An operator is called after its module: the last operator of a module without children has
the module's name ("mlp.0"), every other one the module's and its own ("attention.view"). Layers that are equal but for
their parameters' values are captured once.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import math
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from minipar.errors import PlanError
from minipar.models.cutting import first_line
from minipar.models.network import edges_of
from minipar.sharding.graph import Graph, Layer, Operator, Slot
from minipar.sharding.graph import Tensor as GraphTensor
from minipar.sharding.rules import RULES
from minipar.sharding.whole import LAYER, difference, form_of, graph_of, hooks_of, output_of, recurrent_in

# Nodes that compute nothing.
_NOTHING = ("aten::_assert_tensor_metadata", "aten::_assert_async", "aten::sym_constrain_range_for_size")


@dataclass(frozen=True)
class Covered:
    """How often an operator occurs, and whether it has a rule: "rule", "no input" (every rank makes it), or "whole"."""

    op: str
    count: int
    state: str
    example: str


@dataclass(frozen=True)
class Coverage:
    """The operators of a model. Those without a rule are computed whole, on gathered inputs."""

    rows: tuple[Covered, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        """Operators without a rule."""
        return tuple(row.op for row in self.rows if row.state == "whole")

    def __str__(self) -> str:
        words = {"rule": "rule", "no input": "made by every rank", "whole": "no rule: falls back to whole"}
        width = max((len(row.op) for row in self.rows), default=0)
        return "\n".join(
            f"{row.op:<{width}}  {row.count:>4}  {words[row.state]:<29} {row.example}" for row in self.rows
        )


@dataclass(frozen=True)
class Captured:
    """A model as graphs.

    layers     in order; equal ones share a graph
    programs   for each layer the exported program, whose nodes `Operator.node` names; None: it is computed whole
    carries    of a slice of sequences, what each layer carries on to the next slice: zeros of the right shapes
    found      what the last layer gives, with a Slot in place of each tensor
    coverage   the operators of all layers
    """

    layers: tuple[Layer, ...]
    programs: tuple[torch.export.ExportedProgram | None, ...]
    carries: tuple[Any, ...] = ()
    found: Any = None

    @property
    def coverage(self) -> Coverage:
        """Which operators have a rule."""
        return coverage(self.layers)

    @property
    def whole(self) -> dict[str, str]:
        """The layers that every rank computes whole, by the names of their operators, and why."""
        return {
            layer.own(op.name): str(op.options["why"]) for layer in self.layers for op in layer.graph.operators
            if op.op == LAYER
        }  # fmt: skip


def coverage(layers: Sequence[Layer]) -> Coverage:
    """Which operators of some layers have a rule; those without come first."""
    count: Counter[str] = Counter()
    first: dict[str, str] = {}
    inputs: dict[str, bool] = {}
    for k, layer in enumerate(layers):
        for op in layer.graph.operators:
            count[op.op] += 1
            first.setdefault(op.op, f"layer {k}, {layer.own(op.name)}")
            inputs[op.op] = inputs.get(op.op, False) or bool(op.inputs)
    states = {op: "rule" if op in RULES else "whole" if inputs[op] else "no input" for op in count}
    order = ["whole", "no input", "rule"]
    rows = [Covered(op, count[op], states[op], first[op]) for op in count]
    return Coverage(tuple(sorted(rows, key=lambda row: (order.index(row.state), -row.count, row.op))))


# A model --------------------------------------------------------------------------------------------------------------


def capture_model(
    model: nn.Module,
    example: Any,
    start: int | None = None,
    carries: Sequence[Any] | None = None,
    whole: Mapping[str, str] | None = None,
) -> Captured:
    """The layers of an nn.Sequential as graphs. Its inputs are taken to need no gradient.

    example   an input of the first layer; sizes are those that the graphs are for
    start     of a slice of sequences its first token: the layers are `models.Sliced`
    carries   what each layer carried on from the slice before (`Captured.carries`)
    whole     the layers that every rank computes whole, and why, where another capture has found out; default: those
              that cannot be captured, or do something else than what was captured (`whole.py`)

    Parameters go by the model's own names, also where it was cut from another model. Layers of equal structure, with
    equal parameters' shapes and equal inputs, are captured once. Errors: PlanError for a layer on a slice of sequences
    that torch.export cannot capture, with its reason.
    """
    if not isinstance(model, nn.Sequential):
        raise PlanError(
            f"{type(model).__name__}: capture takes an nn.Sequential of layers; models.from_torch(model, example) cuts "
            "other models into one"
        )
    if edges_of(model):
        raise PlanError(
            f"{type(model).__name__}: capture takes a chain of layers, and this model's layers form a graph; possible "
            "is one layer that has the branches inside, or tp=1"
        )
    built: dict[object, tuple[Layer, torch.export.ExportedProgram | None, Any, nn.Module]] = {}
    layers, programs, kept = [], [], []
    owners: dict[int, str] = {}
    original: Mapping[str, str] = getattr(model, "original", {})
    given: Any = example
    for number, (key, module) in enumerate(model._modules.items()):
        assert module is not None
        own = {
            name: owners.setdefault(id(p), original.get(f"{key}.{name}", f"{key}.{name}"))
            for name, p in module.named_parameters(remove_duplicate=False)
        }
        slice_of = () if start is None else (start, carries[number] if carries else None)
        why = hooks_of(module) if whole is None else whole.get(key, "")
        same = (_fingerprint(module), _input_shapes((given, *slice_of)), number == 0, why)
        if same not in built:
            built[same] = (*_captured(module, given, number > 0, slice_of, why, whole is None), module)
        layer, program, handed, first = built[same]
        layers.append(replace(layer, names=_own_names(layer.graph, first, module, own, key, bool(original))))
        programs.append(program)
        given, carry = (handed, None) if start is None else handed
        kept.append(carry)
    return Captured(tuple(layers), tuple(programs), () if start is None else tuple(kept), form_of(given))


def _captured(
    module: nn.Module, given: Any, flows: bool, slice_of: tuple[Any, ...], why: str, compare: bool
) -> tuple[Layer, torch.export.ExportedProgram | None, Any]:
    """One layer, its program, and what it hands on. `why`: the reason to compute it whole; `compare`: find one."""
    if slice_of:
        layer, program = capture_layer(module, given, flows, slice_of)
        if why := why or difference(module, program.module(), given, flows, slice_of):
            raise PlanError(
                f"{type(module).__name__}: {why}, and slices of sequences are given to what is captured; possible is a "
                "schedule of rows such as 1f1b"
            )
        return layer, program, _handed_on(program, (given, *slice_of))
    if not (why := why or recurrent_in(module)):
        try:
            layer, program = capture_layer(module, given, flows)
            if any(layer.graph.tensors[name].kind in ("parameter", "buffer") for name in layer.graph.outputs):
                why = "hands on what it holds"
            elif any(_is_complex(node) for node in program.graph.nodes):
                why = "computes with complex numbers"
            elif any(not isinstance(op.call, torch._ops.OpOverload) for op in layer.graph.operators):
                why = "has a transform of torch.func, such as vmap"
            elif any(_writes_a_part(op, layer.graph) for op in layer.graph.operators):
                why = "writes into a part of a tensor"
            elif compare:
                why = difference(module, program.module(), given, flows)
            if not why:
                return layer, program, output_of(module, given) if compare else _handed_on(program, (given,))
        except PlanError as error:
            if not compare:
                raise
            why = error.reason.partition(": ")[2] or error.reason
        except Exception as error:  # such as a buffer that has the name of an attribute of torch.fx
            if not compare:
                raise
            why = f"what was captured of it cannot run ({type(error).__name__}: {first_line(error)})"
    graph, output = graph_of(module, given, why, flows)
    return Layer(graph), None, output


def _writes_a_part(op: Operator, graph: Graph) -> bool:
    """Whether an operator changes what is a view of a larger tensor: that one might be read in another node."""
    if not op.inputs or not getattr(getattr(op.call, "_schema", None), "is_mutable", False):
        return False
    maker = next((other for other in graph.operators if op.inputs[0] in other.outputs), None)
    if maker is None or not maker.inputs or not any(one.alias_info for one in maker.call._schema.returns):
        return False
    base, part = graph.tensors[maker.inputs[0]].shape, graph.tensors[op.inputs[0]].shape
    return math.prod(part) != math.prod(base)


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _own_names(
    graph: Graph, first: nn.Module, module: nn.Module, parameters: Mapping[str, str], key: str, cut: bool
) -> dict[str, str]:
    """Names in the model of what a graph, captured from an equal layer, has.

    Modules of layers that were cut from another model go by their paths there.
    """
    paths = {a: b for (a, _), (b, _) in zip(_modules(first), _modules(module), strict=True)}
    stored = {
        a: parameters.get(b, b)
        for (a, _), (b, _) in zip(
            first.named_parameters(remove_duplicate=False), module.named_parameters(remove_duplicate=False), strict=True
        )
    }
    prefix = "" if cut else f"{key}."
    held = zip(first.named_buffers(remove_duplicate=False), module.named_buffers(remove_duplicate=False), strict=True)
    stored |= {a: f"{key}.{b}" for (a, _), (b, _) in held}
    names = {name: own for name, own in stored.items() if name in graph.tensors}
    for op in graph.operators:
        path = max((p for p in paths if within(op.name, p)), key=len)
        rest = op.name[len(path) :].lstrip(".")
        own_path = paths[path]
        title = ".".join(part for part in (own_path, rest) if part)
        # The layer itself has no path in the model that it was cut from.
        names[op.name] = (prefix or ("" if own_path else f"{key}.")) + title
    if graph.operators and next(module.children(), None) is None:
        names[graph.operators[-1].name] = key
    return names


def _modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return module.named_modules(remove_duplicate=False)


def within(name: str, path: str) -> bool:
    """Whether an operator's name is that of a module, or of something in it."""
    return not path or name == path or name.startswith(path + ".")


def _input_shapes(given: Any) -> object:
    leaves, spec = pytree.tree_flatten(given)
    return tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves), str(
        spec
    )


def _handed_on(program: torch.export.ExportedProgram, given: tuple[Any, ...]) -> Any:
    """What the layer returns: zeros of the right shapes, and whatever is no tensor as it is. `given`: its arguments."""
    (out,) = [node for node in program.graph.nodes if node.op == "output"]
    taken = {spec.arg.name: None for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT}
    leaves = pytree.tree_leaves(given)
    passed = dict(zip(taken, leaves, strict=False))

    def value(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node.name in passed:
            return passed[node.name]
        fake = node.meta["val"]
        return torch.zeros(fake.shape, dtype=fake.dtype)

    specs = list(program.graph_signature.output_specs)
    found = [value(node) for node in out.args[0]]
    users = [one for one, spec in zip(found, specs, strict=True) if spec.kind.name == "USER_OUTPUT"]
    spec = program.call_spec.out_spec
    return pytree.tree_unflatten(users, spec) if spec is not None else users[0]


# What makes two layers equal


def _fingerprint(module: nn.Module) -> object:
    """Equal for layers that differ in names and values of parameters only.

    The modules' types and plain attributes, and the shapes of what they hold. A layer's number in its model does not
    count, unless its configuration says that something depends on it.
    """
    return tuple((type(one).__qualname__, one.training, _attributes(one), _stored(one)) for _, one in _modules(module))


def _stored(module: nn.Module) -> object:
    held = [*module._parameters.items(), *module._buffers.items()]
    return tuple((name, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad)) for name, t in held)


def _attributes(module: nn.Module) -> object:
    config = getattr(module, "config", None)
    numbered = any("layer_idx" in name and bool(value) for name, value in vars(config).items()) if config else False
    skipped = {"_parameters", "_buffers", "_modules", "training"}
    found = []
    for name, value in vars(module).items():
        if name in skipped or (name == "layer_idx" and not numbered):
            continue
        found.append((name, _plain(name, value)))
    return tuple(sorted(found, key=lambda item: item[0]))


def _plain(name: str, value: Any) -> object:
    if isinstance(value, str):
        return "path" if name in ("path", "paths") else value
    if value is None or isinstance(value, (bool, int, float, torch.dtype, torch.Size, torch.device)):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(_plain(name, one) for one in value)
    if isinstance(value, dict):
        return tuple((str(key), _plain(name, one)) for key, one in value.items())
    if isinstance(value, partial):
        return ("partial", _plain(name, value.func), _plain(name, value.args), _plain(name, value.keywords))
    if isinstance(value, FunctionType):  # (all lambdas of a function have one name)
        defaults = _plain(name, (value.__defaults__, value.__kwdefaults__))
        return id(value.__code__), defaults, tuple(map(id, value.__closure__ or ()))
    return id(value)


@contextlib.contextmanager
def _without_sources() -> Iterator[None]:
    """Forget the sources of the graphs that torch makes meanwhile. It keeps each of them for tracebacks, for ever: a
    process that captures again and again would grow. And log nothing: what cannot be captured is computed whole."""
    loader, quiet = fx.graph_module._loader, logging.root.manager.disable
    before = set(loader.eval_cache)
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # (torch prints the graph of what it cannot capture)
            yield
    finally:
        logging.disable(quiet)
        for key in loader.eval_cache.keys() - before:
            del loader.eval_cache[key]
            linecache.cache.pop(key, None)


# A layer --------------------------------------------------------------------------------------------------------------


def capture_layer(
    module: nn.Module, example: Any, differentiable: bool = True, slice_of: tuple[Any, ...] = ()
) -> tuple[Layer, torch.export.ExportedProgram]:
    """One layer as a graph, and the exported program it comes from.

    example          what the layer is called with: one value of any structure
    differentiable   whether gradients of its inputs are needed
    slice_of         of a slice of sequences its first token, and the carry of the slice before (`models.Sliced`)

    Errors: PlanError for code that torch.export cannot capture.
    """
    try:
        with _without_sources():
            program = torch.export.export(module, (example, *slice_of), strict=False)
    except Exception as error:  # whatever the user's code or torch raises
        raise PlanError(
            f"{type(module).__name__}: torch.export cannot capture this layer: {first_line(error)}",
            "It stays possible to train it without tensor parallelism. Code may not branch on the values of tensors; "
            "a part that does can be an operator of its own (torch.library.custom_op) with a rule.",
        ) from error
    graph = _graph(program, module, differentiable, sum(isinstance(t, Tensor) for t in pytree.tree_leaves(example)))
    return Layer(graph if not slice_of else _with_carry(graph, program)), program


@dataclass
class _Making:
    """A graph in the making: its tensors, its operators, and which tensor each node of torch's graph is."""

    module: nn.Module
    tensors: dict[str, GraphTensor]
    operators: list[Operator]
    called: dict[fx.Node, str]

    def title(self, title: str, node: fx.Node) -> str:
        """An operator's name that no other one has: a module may be used twice."""
        taken = {one.name for one in self.operators}
        while title in taken:
            title = f"{title}.{node.name}"
        return title

    def fresh(self, name: str) -> str:
        """A name that no tensor has yet: a parameter of the layer may be called as a node is."""
        while name in self.tensors:
            name += "_"
        return name

    def add(self, graph: fx.Graph, detached: bool = False) -> None:
        """The operators of a graph; `detached`: no gradient flows through them."""
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        titles = _titles(nodes, self.module)
        for node in nodes:
            if node.target is operator.getitem or _op_name(node) in _NOTHING:
                continue
            within = _body(node)
            if within is not None:
                self._inline(node, within, detached or "set_grad" in _op_name(node))
                continue
            options, given = _arguments(node, self.called)
            flows = not detached and any(self.tensors[name].differentiable for name in given) and _has_gradient(node)
            outputs = []
            for taker, name, value in _outputs(node):
                own = self.fresh(name)
                if taker is not None:
                    self.called[taker] = own
                self.tensors[own] = _tensor(own, value, "value", flows and value.is_floating_point())
                outputs.append(own)
            self.operators.append(
                Operator(
                    self.title(titles[node], node),
                    _op_name(node),
                    given,
                    tuple(outputs),
                    options,
                    node.target,
                    node.name,
                    detached,
                )
            )

    def _inline(self, node: fx.Node, within: fx.GraphModule, detached: bool) -> None:
        """The operators of a region without gradients, in place of the one node that stands for it."""
        placeholders = [one for one in within.graph.nodes if one.op == "placeholder"]
        given = [one for one in node.args if isinstance(one, fx.Node) and one.op != "get_attr"]
        for inner, outer in zip(placeholders, given, strict=True):
            if outer in self.called:
                self.called[inner] = self.called[outer]
        self.add(within.graph, detached)
        (out,) = [one for one in within.graph.nodes if one.op == "output"]
        for user in node.users:
            built = out.args[0][user.args[1]]
            if built in self.called:
                self.called[user] = self.called[built]


def _body(node: fx.Node) -> fx.GraphModule | None:
    """What a node that stands for a region of code has inside. Errors: PlanError for a region of another precision."""
    if isinstance(node.target, torch._ops.OpOverload):
        return None
    root = node.graph.owning_module
    for one in node.args:
        if isinstance(one, fx.Node) and one.op == "get_attr" and root is not None:
            found = getattr(root, str(one.target), None)
            if isinstance(found, fx.GraphModule):
                if "autocast" in _op_name(node) and True in node.args:
                    raise PlanError("torch.autocast within a layer cannot be captured; use precision=bf16 of the plan")
                return found
    return None


def _with_carry(graph: Graph, program: torch.export.ExportedProgram) -> Graph:
    """The graph of a layer on a slice, which returns its output and its carry."""
    (out,) = [node for node in program.graph.nodes if node.op == "output"]
    specs = program.graph_signature.output_specs
    users = [one for one, spec in zip(out.args[0], specs, strict=True) if spec.kind.name == "USER_OUTPUT"]
    _, carry = pytree.tree_unflatten(users, program.call_spec.out_spec)
    count = sum(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(carry))
    end = len(graph.outputs) - count
    return replace(graph, outputs=graph.outputs[:end], after=graph.outputs[end:])


def _graph(program: torch.export.ExportedProgram, module: nn.Module, differentiable: bool, count: int) -> Graph:
    """The graph of a layer; `count`: how many of its inputs are tensors of the layer before. Others are its carry."""
    built = _Making(module, {}, [], {})
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    stored = dict(module.named_parameters(remove_duplicate=False))
    kinds = {InputKind.PARAMETER: "parameter", InputKind.USER_INPUT: "input"}
    inputs: list[str] = []
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        name = built.fresh(node.name if spec.target is None else str(spec.target))
        kind = kinds.get(spec.kind, "buffer")
        flows = kind == "input" and (differentiable or len(inputs) >= count)
        flows = stored[name].requires_grad if kind == "parameter" else flows
        built.called[node] = name
        built.tensors[name] = _tensor(name, value, kind, flows and value.is_floating_point())
        if kind == "input":
            inputs.append(name)
    built.add(program.graph)
    (out,) = [node for node in program.graph.nodes if node.op == "output"]
    ends = [built.called[node] for node in out.args[0] if isinstance(node, fx.Node) and node in built.called]
    return Graph(tuple(built.operators), built.tensors, tuple(inputs[:count]), tuple(ends), tuple(inputs[count:]))


def _tensor(name: str, value: Tensor, kind: str, differentiable: bool) -> GraphTensor:
    shape, floating = tuple(int(size) for size in value.shape), value.is_floating_point() or value.is_complex()
    return GraphTensor(name, shape, value.dtype.itemsize, kind, differentiable, floating)


def _op_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return f"torch::{getattr(target, '__name__', str(target))}"


def _has_gradient(node: fx.Node) -> bool:
    return not any(name in _op_name(node) for name in ("detach", "zeros_like", "ones_like", "full_like"))


def _outputs(node: fx.Node) -> list[tuple[fx.Node | None, str, Tensor]]:
    """The tensors that a node gives, with names; of several each with the node that takes it, if there is one."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return [(node, node.name, value)]
    if not isinstance(value, (tuple, list)):
        return []
    takers = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return [
        (takers.get(k), takers[k].name if k in takers else f"{node.name}.{k}", one)
        for k, one in enumerate(value)
        if isinstance(one, Tensor)
    ]


def _arguments(node: fx.Node, called: Mapping[fx.Node, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """All arguments by name, a Slot for each tensor; and the tensors."""
    given: list[str] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value not in called:
                return value  # no tensor: a submodule, a number that only torch knows
            given.append(called[value])
            return Slot(len(given) - 1)
        if isinstance(value, (list, tuple)):
            return [replaced(one) for one in value]
        return value

    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        named = {a.name: a.default_value for a in arguments if a.has_default_value()}
        named |= dict(zip((a.name for a in arguments), node.args, strict=False))
        named |= node.kwargs
        ordered = {a.name: named[a.name] for a in arguments if a.name in named}
    else:
        ordered = {**{str(k): value for k, value in enumerate(node.args)}, **node.kwargs}
    options = {name: replaced(value) for name, value in ordered.items()}
    return options, tuple(given)


def _titles(nodes: Sequence[fx.Node], module: nn.Module) -> dict[fx.Node, str]:
    """Operators' names: the module's path, and the node's name but of the last one of a module without children."""
    where = {node: _path(node) for node in nodes}
    last = {path: node for node, path in where.items()}
    titles: dict[fx.Node, str] = {}
    for node, path in where.items():
        leaf = bool(path) and _has_no_children(module, path)
        own = re.sub(r"_default$", "", node.name)
        titles[node] = path if leaf and last[path] is node else f"{path}.{own}" if path else own
    return titles


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    return paths[-1].split("@")[0] if paths else ""


def _has_no_children(module: nn.Module, path: str) -> bool:
    try:
        found = module.get_submodule(path)
    except AttributeError:
        return False
    return next(found.children(), None) is None
