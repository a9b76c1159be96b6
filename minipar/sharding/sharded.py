"""A whole model shared by ranks: captured, its forms propagated, and cut into the nodes of one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.network import edges_of
from minipar.models.selective_checkpoint import Recomputed
from minipar.models.tensors import count_rows, layers_of, map_tensors
from minipar.program.forms import PARTIAL, WHOLE, Forms, in_words, letters, text_of
from minipar.program.mesh import Mesh
from minipar.sharding import automatic, local
from minipar.sharding.capture import Captured, capture_model, within
from minipar.sharding.cutting import AXIS, ROWS, Nodes, Stored, nodes_of, planned, templates_of
from minipar.sharding.graph import Layer, Operator
from minipar.sharding.nodes import Node, ShardedModel
from minipar.sharding.propagation import EXPERTS, Preset, matches, propagate_model


def local_model(
    model: nn.Module,
    index: int,
    count: int,
    example: Any,
    annotations: Mapping[str, str] | None = None,
    inputs: str = "",
) -> ShardedModel:
    """The nodes that rank `index` of `count` sharing ranks has of a model, an nn.Sequential of layers.

    example       rows that the model is given
    annotations   forms by name (`propagation.py`); default: Megatron's, or those of `automatic.py`
    inputs        the form in which sharing ranks have rows and targets: "", "S0" or "S1"

    A layer may say itself how it is cut: a method `shard(index, count, name, known)` gives its nodes. Then all layers
    of the model have one.

    Errors: PlanError for a layer that cannot be captured or divided, with its operator and tensor.
    """
    if edges_of(model):
        raise PlanError(
            f"the model has branches, and layers that {count} ranks share are those of chains; possible is to train it "
            "without tensor parallelism"
        )
    if any(hasattr(layer, "shard") for layer in layers_of(model)):
        return _by_hand(model, index, count)
    if not count_rows(example):
        raise PlanError(f"tp={count}: needs an example of at least one row to capture the model with")
    captured = ROWS[0] * count, ROWS[1] * count
    small, large = (capture_model(model, _with_rows(example, rows)) for rows in captured)
    chosen = _on_axis(automatic.default(small.layers, count) if annotations is None else annotations)
    if EXPERTS in chosen and isinstance(chosen, Preset):
        check_experts(model, count)
    found = propagate_model(small.layers, chosen, Mesh(tp=count), f"{inputs or 'I'} on {AXIS}")
    known: dict[str, nn.Parameter] = {}
    shared: dict[int, Nodes] = {}  # of equal layers, by the id of their forms
    firsts: dict[int, nn.Module] = {}
    names = _names(model)
    titles = {id(module): name for name, module in model.named_modules()}
    place = local.Place(index, count)
    layers: list[list[Node]] = []
    for number, (key, layer) in enumerate(model._modules.items()):
        assert layer is not None
        graph = small.layers[number].graph
        first = firsts.setdefault(id(graph), layer)
        sharding = found.shardings[number]
        if id(sharding) not in shared:
            templates = templates_of(graph, large.layers[number].graph, captured)
            shared[id(sharding)] = planned(sharding, templates, place, captured[0])
        stored = _stored(small, number, first, layer, names)
        nodes = nodes_of(
            small.layers[number], sharding, shared[id(sharding)], stored, key, place, known,
            _dropouts(small.layers[number], first, layer, titles), _cores(small.layers[number], first),
        )  # fmt: skip
        nodes[0].state = {
            f"{key}.{name}": value
            for name, value in layer.state_dict().items()
            if name in dict(layer.named_buffers()) and isinstance(value, Tensor)
        }
        layers.append(nodes)
    if inputs and not (written := layers[-1][-1].forms.writes).startswith("S"):
        raise PlanError(
            f"{key}: its output is {in_words(written)}, but each of {count} ranks has a part of the targets; possible "
            "are models whose output has a number for each token"
        )
    _add_end(layers[-1], inputs)
    return ShardedModel(layers, count, inputs)


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
    return map_tensors(example, lambda t: t[torch.arange(rows) % len(t)])


def _names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter in the model, by its id."""
    return {id(p): name for name, p in model.named_parameters()}


def _stored(
    captured: Captured, number: int, first: nn.Module, layer: nn.Module, names: Mapping[int, str]
) -> dict[str, Stored]:
    """A layer's parameters and buffers by their names in its graph, which is that of the first layer equal to it."""
    graph, program = captured.layers[number].graph, captured.programs[number]
    parameters = zip(
        first.named_parameters(remove_duplicate=False), layer.named_parameters(remove_duplicate=False), strict=True
    )
    found = {name: Stored(own, names[id(own)]) for (name, _), (_, own) in parameters if name in graph.tensors}
    buffers = zip(first.named_buffers(remove_duplicate=False), layer.named_buffers(remove_duplicate=False), strict=True)
    found |= {name: Stored(own) for (name, _), (_, own) in buffers if name in graph.tensors}
    for name, tensor in graph.tensors.items():
        if tensor.kind == "buffer" and name not in found:
            found[name] = Stored(program.constants[name])
    return found


def _dropouts(captured: Layer, first: nn.Module, layer: nn.Module, titles: Mapping[int, str]) -> dict[str, nn.Dropout]:
    """For each operator of a layer that is an nn.Dropout one of its own, which knows the name in the model.

    first   the layer that was captured, which is equal to this one

    Errors: PlanError for all other operators that draw: their numbers would depend on how the model is cut.
    """
    found = {}
    both = (one.named_modules(remove_duplicate=False) for one in (first, layer))
    modules = {path: own for (path, _), (_, own) in zip(*both, strict=True)}
    for op in captured.graph.operators:
        if not _draws(op):
            continue
        module = modules[max((path for path in modules if within(op.name, path)), key=len)]
        if op.op != "aten::dropout" or type(module) is not nn.Dropout:
            raise PlanError(
                f"{captured.own(op.name)} ({op.op}): draws random numbers, and only nn.Dropout draws the same ones on "
                "ranks that share a layer; possible is nn.Dropout in its place, a probability of 0 (of attention, "
                "too), or tp=1"
            )
        found[op.name] = nn.Dropout(module.p).train(module.training)
        found[op.name].row_name = titles[id(module)]  # type: ignore[assignment]
    return found


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
    return ShardedModel(layers, count)


class _End(Node):
    """The model's output as the loss takes it."""

    def forward(self, given: Any) -> Any:
        return map_tensors(given, lambda tensor: tensor.view_as(tensor))


def _add_end(nodes: list[Node], inputs: str) -> None:
    """A last node, where the loss does not take the model's output, or gives its gradient, as the last layer does.

    Where ranks have whole targets, the loss takes the whole output. Every rank computes it alike; of its gradient,
    which is whole, each takes the shard that it wrote. Where each has a part of the targets, its loss takes its shard
    of the output; what is no shard, such as a number for a whole row of which it has some tokens, gets a part of its
    gradient.
    """
    last = nodes[-1]
    if not inputs and last.forms.writes:
        last.forms = last.forms._replace(grad_reads=last.forms.grad_reads.replace("S", "C"))
        nodes.append(_End(Forms(), "output"))
    elif inputs:
        taken = text_of(tuple(WHOLE if letter == PARTIAL else letter for letter in letters(last.forms.writes)))
        given = text_of(tuple(PARTIAL if letter == WHOLE else letter for letter in letters(last.forms.grad_reads)))
        if (taken, given) != (last.forms.writes, last.forms.grad_reads):
            nodes.append(_End(Forms(taken, taken, given, given), "output"))
