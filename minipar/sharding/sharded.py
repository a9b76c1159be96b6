"""A whole model shared by ranks: captured, its forms propagated, and cut into the nodes of one of them."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.network import edges_of
from minipar.models.nodes import Node, ShardedModel, SlicedNode
from minipar.models.selective_checkpoint import Recomputed
from minipar.models.sliced import describe
from minipar.models.tensors import count_rows, layers_of, map_tensors, take_rows, take_tokens, tensors
from minipar.program.forms import PARTIAL, WHOLE, Forms, along, in_words, letters, on_axes, parts_of, text_of
from minipar.program.mesh import Mesh
from minipar.sharding import automatic, local
from minipar.sharding.capture import Captured, capture_model, within
from minipar.sharding.cutting import AXIS, ROWS, Nodes, Stored, by_rows, nodes_of, planned, templates_of, with_rows
from minipar.sharding.graph import Graph, Layer, Operator, Slot
from minipar.sharding.propagation import EXPERTS, ModelSharding, Preset, matches, propagate_model
from minipar.sharding.whole import LAYER, filled
from minipar.wording import several


@dataclass(frozen=True)
class Graphs:
    """A model as graphs, for each slice of its sequences: what all ranks that share it need, and one of them makes.

    layers      of each slice (one, if sequences are not cut) the layers, captured with each of two numbers of rows
    constants   of each slice for each layer the tensors that its code makes and keeps, by name
    found       what the model gives, with Slots in place of tensors, and numbers that depend on rows as `Size`s; None:
                tensors alone
    whole       the layers that every rank computes whole, and why
    """

    layers: tuple[tuple[tuple[Layer, ...], tuple[Layer, ...]], ...]
    constants: tuple[tuple[Mapping[str, Any], ...], ...]
    found: Any = None
    whole: Mapping[str, str] = field(default_factory=dict)


def pickled(graphs: Graphs | None) -> bytes:
    """Graphs as bytes, which `unpickled` reads in a process that has the same operators."""
    with io.BytesIO() as file:
        _Pickler(file, 5).dump(graphs)
        return file.getvalue()


def unpickled(data: bytes) -> Graphs | None:
    found: Graphs | None = pickle.loads(data)
    return found


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """Operators go by their names: torch itself pickles none."""
        if isinstance(obj, torch._ops.OpOverload):
            return _operator, (*obj._schema.name.split("::"), obj._overloadname)
        return NotImplemented


def _operator(library: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, library), name), overload)


def capture_graphs(
    model: nn.Module,
    count: int,
    example: Any,
    slices: Sequence[range] = (),
    known: Mapping[str, str] = MappingProxyType({}),
) -> Graphs | None:
    """A model as graphs, for `local_model` of each of `count` ranks; None if its layers say themselves how they are
    cut. Example, slices and errors are those of `local_model`.

    known   layers that are computed whole, whatever is found, and why
    """
    if edges_of(model):
        raise PlanError(
            f"the model has branches, and layers that {count} ranks share are those of chains; possible is to train it "
            "without tensor parallelism"
        )
    if any(hasattr(layer, "shard") for layer in layers_of(model)):
        if slices:
            raise PlanError(
                "the model's layers say themselves how they are cut, by a method `shard`: they take whole sequences; "
                "possible is a schedule of rows such as 1f1b"
            )
        return None
    if not count_rows(example):
        raise PlanError(f"tp={count}: needs an example of at least one row to capture the model with")
    some, more = (_with_rows(example, n * count) for n in ROWS)
    small, whole = _capture(model, some, slices, None), dict(known)
    if whole:
        small = _capture(model, some, slices, _whole_of(model, small[0]) | whole)
    while True:
        large = _capture(model, more, slices, _whole_of(model, small[0]) | whole)
        rows = ROWS[0] * count, ROWS[1] * count
        found = {} if slices else _not_divisible(model, small[0].layers, large[0].layers, rows)
        if not found:
            break
        if found.keys() <= whole.keys():  # (computed whole, they still have sizes that do not come from the rows)
            name, why = next(iter(found.items()))
            raise PlanError(f"tp={count}: layer {name}: {why}; possible are dp={count}, and tp=1")
        whole |= found
        small = _capture(model, some, slices, _whole_of(model, small[0]) | whole)
    return Graphs(
        tuple((one.layers, other.layers) for one, other in zip(small, large, strict=True)),
        tuple(tuple(map(_constants, one.programs, layers_of(model))) for one in small),
        None if slices else by_rows(small[0].found, large[0].found, rows, "the model's output"),
        _whole_of(model, small[0]),
    )


def _blamed(model: nn.Module, error: PlanError, free: bool) -> dict[str, str]:
    """The layers that are computed whole for an error, and why: those that share a parameter which they would read in
    different forms; and if nobody has said how layers are divided (free), one that cannot be divided as was found."""
    if not error.shared:
        return {list(model._modules)[error.layer]: error.reason} if free and error.layer is not None else {}
    parameter = error.shared
    (shared,) = [p for name, p in model.named_parameters() if name == parameter]
    why = f"shares {parameter} with a layer that would read it in another form"
    return {key: why for key, layer in model._modules.items() if layer and any(p is shared for p in layer.parameters())}


def _whole_of(model: nn.Module, captured: Captured) -> dict[str, str]:
    """The layers, by their names, that are computed whole, and why."""
    named = zip(model._modules, captured.layers, strict=True)
    return {key: op.options["why"] for key, layer in named for op in layer.graph.operators if op.op == LAYER}


def _not_divisible(
    model: nn.Module, small: Sequence[Layer], large: Sequence[Layer], rows: tuple[int, int]
) -> dict[str, str]:
    """The layers that were captured, but cannot run as parts, and why."""
    found: dict[str, str] = {}
    firsts: dict[int, nn.Module] = {}
    for (key, module), one, other in zip(model._modules.items(), small, large, strict=True):
        assert module is not None
        first = firsts.setdefault(id(one.graph), module)
        drawing = next((op for op in one.graph.operators if _draws(op) and not _is_dropout(op, first)), None)
        try:
            templates_of(one.graph, other.graph, rows)
        except PlanError as error:
            found[key] = error.reason
        if drawing is not None:
            found[key] = f"{one.own(drawing.name)} ({drawing.op}) draws random numbers"
    return found


def _constants(program: torch.export.ExportedProgram | None, layer: nn.Module) -> Mapping[str, Any]:
    """The tensors that a layer's code makes and keeps. (Buffers are constants of the program, too.)"""
    if program is None:
        return {}
    buffers = dict(layer.named_buffers(remove_duplicate=False))
    return {name: value for name, value in program.constants.items() if name not in buffers}


def local_model(
    model: nn.Module,
    index: int,
    sharers: int | Mesh,
    example: Any,
    annotations: Mapping[str, str] | None = None,
    inputs: str = "",
    slices: Sequence[range] = (),
    graphs: Graphs | None = None,
    as_computed: Callable[[], nn.Module] | None = None,
) -> ShardedModel:
    """The nodes that rank `index` of some ranks that share layers has of a model, an nn.Sequential of layers.

    sharers       how many ranks share them, or along which axes of the mesh, such as Mesh(tp=2, cp=2)
    example       rows that the model is given
    annotations   forms by name (`propagation.py`); default: Megatron's, or those of `automatic.py`
    inputs        the form in which sharing ranks have rows and targets: "", "S0" or "S1", or a letter with a part for
                  each axis
    slices        the tokens of each slice of a sequence, if the model is given one slice after the other. Every slice
                  is captured, since its operators have sizes of their own; the forms are those of the first one
    graphs        what `capture_graphs` gave for this model, so many ranks and these slices; default: made here
    as_computed   gives the model in the type in which it computes, which is that of the example; default: its own

    A layer may say itself how it is cut: a method `shard(index, count, name, known)` gives its nodes. Then all layers
    of the model have one.

    Errors: PlanError for a layer that cannot be captured or divided, with its operator and tensor.
    """
    mesh = Mesh({AXIS: sharers}) if isinstance(sharers, int) else sharers
    mesh = Mesh({AXIS: mesh.size}) if len(mesh) == 1 else mesh
    count, own = mesh.size, mesh.coordinates(index)
    graphs = graphs or capture_graphs(as_computed() if as_computed else model, count, example, slices)
    if graphs is None:
        if len(mesh) > 1:
            raise PlanError(
                f"{mesh}: the model's layers say themselves how they are cut, by a method `shard`, along one axis; "
                "possible is one of these axes"
            )
        return _by_hand(model, index, count)
    for part, (_, size) in zip(parts_of(inputs, len(mesh)), mesh, strict=True):
        _check_slices(slices, size if part == "S1" else 1)
    rows = ROWS[0] * count, ROWS[1] * count
    chosen, undivided = _chosen(annotations, graphs.layers[0][0], mesh)
    if EXPERTS in chosen and isinstance(chosen, Preset):
        check_experts(model, mesh.length("ep") if len(mesh) > 1 else count)
    places = {axis: local.Place(own[axis], size) for axis, size in mesh}
    both = zip(parts_of(inputs, len(mesh)), mesh, strict=True)
    given = ", ".join(f"{_placed(part)} on {axis}" for part, (axis, _) in both)
    found, built, known = None, [], dict[str, nn.Parameter]()
    own_parameters = [(module, dict(module._parameters)) for module in model.modules()]
    for j, ((small, large), constants) in enumerate(zip(graphs.layers, graphs.constants, strict=True)):
        try:
            found = propagate_model(small, chosen, mesh, given, before=found)
            built.append(_nodes(model, small, large, constants, rows, found, places, known))
        except PlanError as error:
            if not slices:
                holders = _blamed(model, error, annotations is None or isinstance(annotations, Preset))
                for module, parameters in own_parameters:  # (a layer that is computed whole was given shared ones)
                    module._parameters.update(parameters)
                if not holders.keys() <= graphs.whole.keys():
                    one = as_computed() if as_computed else model
                    again = capture_graphs(one, count, example, slices, {**graphs.whole, **holders})
                    return local_model(model, index, sharers, example, annotations, inputs, slices, again, as_computed)
            if not slices:
                raise
            where = f"slice {j} of {several(len(slices[j]), 'token')}"
            named = PlanError(f"{where}: {error.reason}", error.details)
            named.operator = error.operator
            raise named from error
    for layers in built:
        written = layers[-1][-1].forms.writes
        for k, part in enumerate(parts_of(inputs, len(mesh))):
            takes_own = not along(written, k) and not along(layers[-1][-1].forms.grad_reads, k) and not slices
            if inputs and part != WHOLE and not along(written, k).startswith("S") and not takes_own:
                raise PlanError(
                    f"{list(model._modules)[-1]}: its output is {in_words(along(written, k))}, but each of "
                    f"{mesh[k][1]} ranks has a part of the targets; possible are models whose output has a number for "
                    "each token"
                )
        _add_end(layers[-1], inputs, len(mesh), graphs.found, graphs.layers[0][0])
    nodes = _one_behind_the_other(model, built, slices) if slices else built[0]
    shared = ShardedModel(nodes, [size for _, size in mesh], inputs)
    shared.names = [name for name, _ in model.named_parameters()]
    shared.whole = dict.fromkeys(model._modules, undivided) | dict(graphs.whole) if undivided else graphs.whole
    return shared


def _check_slices(slices: Sequence[range], count: int) -> None:
    """Errors: PlanError for a slice of whose tokens so many ranks cannot have equal parts."""
    for j, tokens in enumerate(slices):
        if len(tokens) % count:
            raise PlanError(
                f"context_parallel={count}: slice {j} has {several(len(tokens), 'token')}, and each rank has an equal "
                f"part of each slice; possible are slices= of multiples of {count} tokens, or context_parallel=1"
            )


def _capture(
    model: nn.Module, example: Any, slices: Sequence[range], whole: Mapping[str, str] | None
) -> list[Captured]:
    """The model as graphs, once for each slice of its sequences; once, if they are not cut."""
    if not slices:
        return [capture_model(model, example, whole=whole)]
    _, undivided = describe(layers_of(model))
    if undivided:
        raise PlanError(
            f"layer {undivided} of this model takes whole sequences; possible are models whose layers derive from "
            "minipar.models.Sliced, such as models.gpt, or a schedule of rows such as 1f1b"
        )
    found: list[Captured] = []
    for tokens in slices:
        before = found[-1].carries if found else None
        found.append(capture_model(model, take_tokens(example, tokens), tokens.start, before))
    return found


def _one_behind_the_other(
    model: nn.Module, built: Sequence[Sequence[Sequence[Node]]], slices: Sequence[range]
) -> list[list[Node]]:
    """The nodes of all slices as one node each. Errors: PlanError for a layer that is cut otherwise in some slice: a
    program says once how a node takes and gives values."""
    found: list[list[Node]] = []
    for number, name in enumerate(model._modules):
        layers = [nodes[number] for nodes in built]
        cuts = [[(node.forms, node.carried) for node in nodes] for nodes in layers]
        for j, cut in enumerate(cuts):
            if cut != cuts[0]:
                raise PlanError(
                    f"layer {number} ({name}): its slice {j} is cut into nodes of other forms than slice 0, or other "
                    "nodes of it have a carry; possible is a schedule of rows such as 1f1b, or tp=1 and "
                    "context_parallel=1"
                )
        starts = [tokens.start for tokens in slices]
        found.append([SlicedNode(each, starts, bool(each[0].carried)) for each in zip(*layers, strict=True)])
    return found


def _nodes(
    model: nn.Module,
    small: Sequence[Layer],
    large: Sequence[Layer],
    constants: Sequence[Mapping[str, Any]],
    captured: tuple[int, int],
    found: ModelSharding,
    places: Mapping[str, local.Place],
    known: dict[str, nn.Parameter],
) -> list[list[Node]]:
    """The nodes of each layer of a model.

    small, large   the layers captured with two numbers of rows, `captured`; `constants`: of each layer
    known          parameters that other layers hold already, by name
    """
    shared: dict[int, Nodes] = {}  # of equal layers, by the id of their forms
    firsts: dict[int, nn.Module] = {}
    names = _names(model)
    titles = {id(module): name for name, module in model.named_modules()}
    layers: list[list[Node]] = []
    for number, (key, layer) in enumerate(model._modules.items()):
        assert layer is not None
        graph = small[number].graph
        first = firsts.setdefault(id(graph), layer)
        sharding = found.shardings[number]
        try:
            if id(sharding) not in shared:
                templates = templates_of(graph, large[number].graph, captured)
                shared[id(sharding)] = planned(sharding, templates, places, captured[0])
            stored = _stored(graph, constants[number], first, layer, names)
            nodes = nodes_of(
                small[number], sharding, shared[id(sharding)], stored, key, places, known,
                _dropouts(small[number], first, layer, titles), _cores(small[number], first), layer, number,
            )  # fmt: skip
        except PlanError as error:
            error.layer = number
            raise
        nodes[0].state = {
            f"{key}.{name}": value
            for name, value in layer.state_dict().items()
            if name in dict(layer.named_buffers()) and isinstance(value, Tensor)
        }
        layers.append(nodes)
        names |= {id(p): name for name, p in known.items()}  # (which modules of several layers have now)
    return layers


def _placed(letter: str) -> str:
    """How rows and targets lie on an axis: in parts, or alike on all ranks."""
    return "I" if letter in ("", WHOLE) else letter


def _chosen(
    annotations: Mapping[str, str] | None, layers: Sequence[Layer], mesh: Mesh
) -> tuple[Mapping[str, str], str]:
    """The annotations of a model; those that a preset leaves to the model's own names and operators are found. And why
    nothing is divided, if nobody has asked for annotations and there are none."""
    if annotations is None and len(mesh) == 1:
        try:
            return _on_axis(automatic.default(layers, mesh.size)), ""
        except PlanError as error:
            return Preset(), error.reason
    if len(mesh) == 1:
        return _on_axis(annotations or {}), ""
    found = {} if annotations is None else annotations
    if mesh.length("tp") > 1 and not any(re.search(r"\bon tp\b", text) for text in found.values()):
        return Preset({**automatic.default(layers, mesh.length("tp")), **found}), ""
    return found, ""


def _on_axis(annotations: Mapping[str, str]) -> Mapping[str, str]:
    """The annotations with the one axis that layers are cut on, whichever of the plan's keys it stands for."""
    on_axis = {pattern: re.sub(r"\bon (ep|cp)\b", f"on {AXIS}", text) for pattern, text in annotations.items()}
    return Preset(on_axis) if isinstance(annotations, Preset) else on_axis


def check_experts(model: nn.Module, count: int) -> None:
    """Errors: PlanError for a model of which `experts()` would divide nothing, or experts that cannot be divided."""
    found = [(name, p) for name, p in model.named_parameters() if matches(EXPERTS, name)]
    if not found:
        raise PlanError(
            f"ep={count}: the model has no experts (*.experts.up); possible are dp={count} or a mixture such as "
            "models.build('gpt-moe-tiny')"
        )
    for name, parameter in found:
        if len(parameter) % count:
            ways = [str(n) for n in range(1, len(parameter) + 1) if len(parameter) % n == 0]
            raise PlanError(
                f"ep={count}: must divide the {len(parameter)} experts of {name}; possible are {', '.join(ways)}"
            )


def _with_rows(example: Any, rows: int) -> Any:
    """The example with so many rows: its own ones, again and again."""
    return take_rows(map_tensors(example, lambda t: t[torch.arange(rows) % len(t)]), range(rows))


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter in the model, by its id."""
    return {id(p): name for name, p in model.named_parameters()}


def _stored(
    graph: Graph, constants: Mapping[str, Any], first: nn.Module, layer: nn.Module, names: Mapping[int, str]
) -> dict[str, Stored]:
    """A layer's parameters and buffers by their names in its graph, which is that of the first layer equal to it."""
    parameters = zip(
        first.named_parameters(remove_duplicate=False), layer.named_parameters(remove_duplicate=False), strict=True
    )
    found = {name: Stored(own, names[id(own)]) for (name, _), (_, own) in parameters if name in graph.tensors}
    buffers = zip(first.named_buffers(remove_duplicate=False), layer.named_buffers(remove_duplicate=False), strict=True)
    found |= {name: Stored(own) for (name, _), (_, own) in buffers if name in graph.tensors}
    for name, tensor in graph.tensors.items():
        if tensor.kind == "buffer" and name not in found:
            found[name] = Stored(constants[name])
    return found


def _dropouts(captured: Layer, first: nn.Module, layer: nn.Module, titles: Mapping[int, str]) -> dict[str, nn.Dropout]:
    """For each operator of a layer that is an nn.Dropout one of its own, which knows the name in the model.

    first   the layer that was captured, which is equal to this one
    """
    found = {}
    both = (one.named_modules(remove_duplicate=False) for one in (first, layer))
    modules = {path: own for (path, _), (_, own) in zip(*both, strict=True)}
    for op in captured.graph.operators:
        if _draws(op):
            module = modules[_module_of(op, modules)]
            assert isinstance(module, nn.Dropout)
            found[op.name] = nn.Dropout(module.p).train(module.training)
            found[op.name].row_name = _row_name(module, titles)
    if any(op.op == LAYER for op in captured.graph.operators):
        for module in layer.modules():
            if type(module) is nn.Dropout:
                module.row_name = _row_name(module, titles)
    return found


def _row_name(module: nn.Module, titles: Mapping[int, str]) -> Any:
    """By which a mask is drawn: the name in the model, or in the one that this was cut from."""
    return getattr(module, "row_name", titles[id(module)])


def _module_of(op: Operator, paths: Iterable[str]) -> str:
    return max((path for path in paths if within(op.name, path)), key=len)


def _is_dropout(op: Operator, first: nn.Module) -> bool:
    """Whether an operator is that of an nn.Dropout, whose mask any part of it can draw."""
    modules = dict(first.named_modules(remove_duplicate=False))
    return op.op == "aten::dropout" and type(modules[_module_of(op, modules)]) is nn.Dropout


def _cores(captured: Layer, first: nn.Module) -> dict[str, str]:
    """For each operator of a part that checkpoint=selective runs again, the path of that part, "." for the layer."""
    paths = [path for path, module in first.named_modules() if isinstance(module, Recomputed)]
    return {op.name: path or "." for op in captured.graph.operators for path in paths if within(op.name, path)}


def _draws(op: Operator) -> bool:
    """Whether an operator takes numbers from torch's generators."""
    if op.op == "aten::dropout":
        return bool(op.option("train", False)) and op.option("p", 0.0) > 0
    if op.op == "aten::scaled_dot_product_attention":
        return bool(op.option("dropout_p", 0.0) > 0)
    return torch.Tag.nondeterministic_seeded in getattr(op.call, "tags", ())


def _by_hand(model: nn.Module, index: int, count: int) -> ShardedModel:
    layers: list[list[Node]] = []
    known: dict[str, nn.Parameter] = {}
    for number, (name, layer) in enumerate(model._modules.items()):
        if not hasattr(layer, "shard"):
            raise PlanError(f"tp={count}: layer {number} ({name}) has no method `shard`, as others have")
        layers.append(layer.shard(index, count, name, known))  # type: ignore[operator, union-attr]
    return ShardedModel(layers, [count])


class _End(Node):
    """The model's output as the loss takes it. `form`: its structure, with Slots in place of tensors."""

    def __init__(self, forms: Forms, title: str, form: Any) -> None:
        super().__init__(forms, title)
        self.form = form

    def forward(self, given: Any) -> Any:
        found = [tensor.view_as(tensor) for tensor in tensors(given)]
        if self.form is None:
            return found[0] if len(found) == 1 else tuple(found)
        return filled(with_rows(self.form, next((len(t) for t in found if t.dim()), 0)), found)


def _add_end(nodes: list[Node], inputs: str, axes: int, form: Any, captured: Sequence[Layer]) -> None:
    """A last node, where the loss does not take the model's output, or gives its gradient, as the last layer does; and
    where the output is no single tensor.

    Along an axis whose ranks have whole targets, the loss takes the whole output. Every rank computes it alike; of its
    gradient, which is whole, each takes the shard that it wrote. Where each has a part of the targets, its loss takes
    its shard of the output, also of one that is whole; what is no shard, such as a number for a whole row of which it
    has some tokens, gets a part of its gradient.
    """
    last = nodes[-1]
    given_to, hands_on = captured[0].graph, captured[-1].graph
    outputs = [hands_on.tensors[name] for name in hands_on.outputs]
    found = []
    for k, part in enumerate(parts_of(inputs, axes)):
        writes, grad_reads = along(last.forms.writes, k), along(last.forms.grad_reads, k)
        if part in ("", WHOLE):
            both = ("", "", "", grad_reads.replace("S", "C")) if writes else (writes, writes, grad_reads, grad_reads)
            found.append(both)
        elif not writes and not grad_reads:
            dim = int(part[1:])
            sizes = {t.shape[dim] for t in map(given_to.tensors.get, given_to.inputs) if t and len(t.shape) > dim}
            shards = [t.shape[dim : dim + 1] and t.shape[dim] in sizes for t in outputs]
            takes = text_of(tuple(f"C{dim}" if own else WHOLE for own in shards))
            taken = text_of(tuple(part if own else WHOLE for own in shards))
            smooth = zip(outputs, shards, strict=True)
            given = text_of(tuple(part if own else PARTIAL for t, own in smooth if t.floating))
            found.append((takes, taken, given, grad_reads))
        else:
            taken = text_of(tuple(WHOLE if letter == PARTIAL else letter for letter in letters(writes)))
            given = text_of(tuple(PARTIAL if letter == WHOLE else letter for letter in letters(grad_reads)))
            found.append((taken, taken, given, grad_reads))
    takes, taken, given, reads = (on_axes(forms) for forms in zip(*found, strict=True))
    several = type(form) is tuple and form == tuple(map(Slot, range(len(form))))
    structured = not (form is None or isinstance(form, Slot) or several)
    if structured or (takes, taken, given) != (taken, last.forms.writes, reads) or reads != last.forms.grad_reads:
        last.forms = last.forms._replace(grad_reads=reads)
        nodes.append(_End(Forms(takes, taken, given, given), "output", form))
