"""A sharded layer in one process: all ranks of the mesh side by side, forward and backward, without messages.

It runs what propagation found, operator by operator and repartition by repartition, and so shows whether a sharding is
right: outputs and gradients must be those of the whole layer. It is also the plainest description of what real ranks
do. Each step of a repartition is written so that autograd brings the gradient's step by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from minipar.program.mesh import Mesh
from minipar.sharding import local
from minipar.sharding.forms import Form, I, axes_of, conjugate
from minipar.sharding.propagation import Divided, Sharding
from minipar.sharding.repartition import Step

Place = tuple[int, ...]  # coordinates on the axes that tensors lie on
Parts = dict[Place, Tensor]


@dataclass(frozen=True)
class Simulated:
    """What the ranks have after a layer: of each tensor of the graph the parts, in its form."""

    sharding: Sharding
    parts: Mapping[str, Parts]

    def whole(self, name: str) -> Tensor:
        """A tensor of the graph, joined."""
        return join(self.parts[name], self.sharding.forms[name], self.sharding.mesh)


def simulate_layer(sharding: Sharding, given: Mapping[str, Tensor]) -> Simulated:
    """Run a layer on all ranks of its mesh.

    given   whole tensors of all parameters, buffers and inputs, by their names in the graph

    Errors: PlanError, if an operator is divided in two ways that its parts cannot run.
    """
    mesh = sharding.mesh
    parts = {name: cut(tensor, sharding.forms[name], mesh) for name, tensor in given.items()}
    for moment in parts.values():
        for place, part in moment.items():
            moment[place] = part.detach().requires_grad_(part.is_floating_point())
    moved: dict[tuple[str, Form], Parts] = {(name, sharding.forms[name]): one for name, one in parts.items()}
    for one in sharding.operators:
        read = []
        for name, form in zip(one.operator.inputs, one.ins, strict=True):
            read.append(_in_form(sharding, moved, name, form))
        for name, form, built in zip(one.operator.outputs, one.outs, _run(one, read, mesh), strict=True):
            parts[name] = moved[name, form] = built
    return Simulated(sharding, parts)


def _in_form(sharding: Sharding, moved: dict[tuple[str, Form], Parts], name: str, form: Form) -> Parts:
    """A tensor as an operator reads it: as it lies, or moved, once for all that read it so."""
    if (name, form) not in moved:
        found = next((m for m in sharding.repartitions if m.value == name and m.forward.end == form), None)
        if found is None:  # R and I of a value without a gradient
            return moved[name, sharding.forms[name]]
        parts = moved[name, found.forward.start]
        for step in found.forward.steps:
            counts = _counts_of(sharding, moved, name, step) if step.before.unequal else None
            parts = move(parts, step, sharding.mesh, counts)
        moved[name, form] = parts
    return moved[name, form]


def _counts_of(sharding: Sharding, moved: Mapping[tuple[str, Form], Parts], name: str, step: Step) -> Parts:
    """What counts the unequal parts of a tensor, whole on the axis of a step."""
    writer = sharding.graph.writer(name)
    assert writer is not None
    form = sharding.forms[writer.counts]
    before = form.on(step.axis)
    counts = moved[writer.counts, form]
    return counts if before.whole else move(counts, Step("all_gather", step.axis, before, I, 0, 0.0), sharding.mesh)


def _run(one: Divided, read: Sequence[Parts], mesh: Mesh) -> list[Parts]:
    """An operator on every rank, side by side: some need each other."""
    axes = axes_of(mesh)
    running = {
        place: local.run(
            one.operator,
            one.choices,
            {axis: local.Place(place[k], mesh.length(axis)) for k, axis in enumerate(axes)},
            [parts[place] for parts in read],
            one.out_shapes,
        )
        for place in product(*(range(mesh.length(axis)) for axis in axes))
    }
    built = local.side_by_side(running, axes)
    return [{place: outputs[k] for place, outputs in built.items()} for k in range(len(one.operator.outputs))]


def move(parts: Parts, step: Step, mesh: Mesh, counts: Parts | None = None) -> Parts:
    """One step of a repartition on all ranks. `counts`: of unequal parts, what they are counted by, on each rank."""
    k = axes_of(mesh).index(step.axis)
    built: Parts = {}
    for group in local.groups(parts, k):
        own = None if counts is None else counts[group[0]]
        for place, tensor in zip(group, _moved([parts[place] for place in group], step, own), strict=True):
            built[place] = tensor
    return built


class _Nothing(torch.autograd.Function):
    """Zeros, which bring the gradient of what they are added to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _moved(parts: Sequence[Tensor], step: Step, counts: Tensor | None = None) -> list[Tensor]:
    """A step within one group."""
    before, after, ranks = step.before, step.after, len(parts)

    def flows(tensor: Tensor) -> Tensor:
        found: Tensor = _Nothing.apply(tensor)
        return found

    def block(tensor: Tensor, index: int) -> Tensor:
        return local.cut(tensor, after, ranks)[index]

    def gathered(index: int | None = None) -> Tensor:
        own = [part if index in (None, j) else part.detach() for j, part in enumerate(parts)]
        found = local.join(own, before, counts)
        assert found is not None
        return found

    if before.kind == "P" and after.whole:
        total = torch.stack(list(parts)).sum(0)
        return [total if after.kind == "R" else total.detach() + flows(part) for part in parts]
    if before.kind == "P":
        return local.cut(torch.stack(list(parts)).sum(0), after, ranks)
    if before.kind == "S" and after.whole:
        return [gathered(None if after.kind == "R" else k) for k in range(ranks)]
    if before.kind == "S" and after.kind == "S":
        return local.cut(gathered(), after, ranks, counts)
    if before.kind == "S":  # a sum of which each rank has its block
        zeros = [torch.zeros_like(part) for part in parts]
        padded = [
            local.join([part if j == k else zeros[j] for j in range(ranks)], before) for k, part in enumerate(parts)
        ]
        return [one for one in padded if one is not None]
    if after.kind == "S" and (before.kind == "R" or not parts[0].is_floating_point()):
        return [block(part, k) for k, part in enumerate(parts)]
    if after.kind == "S":
        others = [[part for j, part in enumerate(parts) if j != k] for k in range(ranks)]
        return [block(part, k) + sum(flows(block(one, k)) for one in others[k]) for k, part in enumerate(parts)]
    if before.whole and after.whole and not parts[0].is_floating_point():
        return list(parts)
    if (before.kind, after.kind) == ("I", "R"):
        return [part + sum(flows(one) for j, one in enumerate(parts) if j != k) for k, part in enumerate(parts)]
    if (before.kind, after.kind) == ("R", "I"):
        return [part if k == 0 else part.detach() for k, part in enumerate(parts)]
    if before.kind == "I":  # to a sum, to which the first rank alone adds
        return [part if k == 0 else flows(part) for k, part in enumerate(parts)]
    return [part if k == 0 else torch.zeros_like(part) for k, part in enumerate(parts)]


def cut(tensor: Tensor, form: Form, mesh: Mesh) -> Parts:
    """The part of a tensor that each rank has. Of P they are drawn at random."""
    parts: Parts = {(): tensor}
    for axis, p in form.items():
        ranks = mesh.length(axis)
        parts = {(*place, k): one for place, part in parts.items() for k, one in enumerate(local.cut(part, p, ranks))}
    return parts


def join(parts: Parts, form: Form, mesh: Mesh) -> Tensor:
    """The whole of what all ranks have. Errors: ValueError where ranks should have the same, and do not."""
    for axis, p in reversed(list(form.items())):
        ranks = mesh.length(axis)
        found: Parts = {}
        for place in {place[:-1] for place in parts}:
            one = local.join([parts[(*place, k)] for k in range(ranks)], p)
            if one is None:
                raise ValueError(f"the ranks of {axis} do not have the same")
            found[place] = one
        parts = found
    return parts[()]


def gradients(simulated: Simulated, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of all parameters and inputs, joined from what the ranks have.

    outputs   the gradients of the outputs, whole
    """
    sharding = simulated.sharding
    mesh, graph = sharding.mesh, sharding.graph
    ends, seeds = [], []
    for name, gradient in outputs.items():
        form = Form(sharding.forms[name].axes, tuple(map(conjugate, sharding.forms[name].placements)))
        laid = cut(gradient, form, mesh)
        for place, part in simulated.parts[name].items():
            if part.requires_grad:
                ends.append(part)
                seeds.append(laid[place])
    names = [name for name, t in graph.tensors.items() if t.kind in ("parameter", "input") and t.differentiable]
    flat = [simulated.parts[name][place] for name in names for place in simulated.parts[name]]
    found = iter(torch.autograd.grad(ends, flat, seeds, allow_unused=True))
    built = {}
    for name in names:
        parts = {}
        for place, part in simulated.parts[name].items():
            one = next(found)
            parts[place] = torch.zeros_like(part) if one is None else one
        built[name] = join(parts, sharding.forms[name].conjugate(), mesh)
    return built
