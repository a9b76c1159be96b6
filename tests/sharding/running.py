"""Compares a model whose layers are sharded, simulated in one process, with the model itself, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from minipar.program.mesh import Mesh
from minipar.sharding import (
    Captured,
    Layer,
    ModelSharding,
    Sharding,
    capture_model,
    gradients,
    propagate_model,
    simulate_layer,
)

TOLERANCE = 1e-10


def largest_error(
    sharding: Sharding, layer: Layer, module: nn.Module, everything: Mapping[str, Tensor], given: Any
) -> tuple[float, Any]:
    """Of a layer's outputs and gradients, relative to the largest; and what the layer hands on."""
    graph = sharding.graph
    leaves, structure = pytree.tree_flatten(given)
    leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
    entering = [x for x in leaves if isinstance(x, Tensor)]
    kept = [name for name, tensor in graph.tensors.items() if tensor.kind in ("parameter", "buffer")]
    stored = {name: everything[layer.own(name)] for name in kept}
    known = {name: t.detach() for name, t in stored.items()}
    known |= dict(zip(graph.inputs, entering, strict=True))
    simulated = simulate_layer(sharding, known)

    for x in entering:
        x.requires_grad_(x.is_floating_point())
    handed = module(pytree.tree_unflatten(leaves, structure))
    outputs = [x for x in pytree.tree_leaves(handed) if isinstance(x, Tensor)]
    errors = []
    made, seeds = [], {}
    for name, want in zip(graph.outputs, outputs, strict=True):
        errors.append(_distance(simulated.whole(name), want))
        if want.requires_grad and name not in graph.inputs:
            made.append((name, want))
            seeds[name] = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(3))
    found = gradients(simulated, seeds)
    wanted = {name: stored[name] if name in stored else entering[graph.inputs.index(name)] for name in found}
    reference = torch.autograd.grad(
        [want for _, want in made], list(wanted.values()), [seeds[name] for name, _ in made], allow_unused=True
    )
    for (name, _), want in zip(wanted.items(), reference, strict=True):
        errors.append(_distance(found[name], torch.zeros_like(found[name]) if want is None else want))
    return max(errors), pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, handed)


def _distance(got: Tensor, want: Tensor) -> float:
    if not got.is_floating_point():
        return float(not torch.equal(got, want))
    return float((got - want).detach().abs().max() / want.detach().abs().max().clamp(min=1e-6))


def check(
    model: nn.Sequential,
    given: Any,
    annotations: Mapping[str, str],
    mesh: Mesh,
    inputs: str = "I",
    tolerance: float = TOLERANCE,
    captured: Captured | None = None,
    **options: Any,
) -> ModelSharding:
    """Shard a model, compare every layer, and return how it is sharded.

    captured   the graphs of this model in float64, if a test captured it before, which takes seconds
    """
    model = model.double()
    captured = captured or capture_model(model, given)
    found = propagate_model(captured.layers, annotations, mesh, inputs, **options)
    everything = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for number, (layer, sharding, module) in enumerate(zip(found.layers, found.shardings, model, strict=True)):
        error, given = largest_error(sharding, layer, module, everything, given)
        assert error < tolerance, f"layer {number}: {error}"
    return found
