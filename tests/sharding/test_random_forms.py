"""Forms fixed at random: a layer is refused in one line, or its outputs and gradients are those of the whole layer."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import nn

from minipar import PlanError, models
from minipar.program.mesh import Mesh
from minipar.sharding import capture_model, propagate_model
from tests.sharding.running import TOLERANCE, largest_error

NUMBERS = {"layers": 1, "width": 32, "heads": 4, "context": 16, "vocab": 64}
MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(tp=2, cp=2)]


@cache
def captured(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "convolutions":
            first = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU())
            rest = nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Softmax(-1), nn.Linear(36, 8), nn.LayerNorm(8)
            model, given = nn.Sequential(first, *rest), torch.randn(4, 2, 6, 6).double()
        else:
            model, given = models.gpt(fused=name == "fused", **NUMBERS), torch.randint(64, (4, 8))
        model = model.double()
        return model, given, capture_model(model, given)


@pytest.mark.many(6)
@pytest.mark.parametrize("seed", range(120))
def test_right_or_refused(seed):
    draw = random.Random(seed)
    model, given, layers = captured(draw.choice(["plain", "fused", "convolutions"]))
    mesh = draw.choice(MESHES)
    axes = [axis for axis, _ in mesh]
    places = [
        (layer.own(name), len(layer.graph.tensors[tensor].shape))
        for layer in layers.layers
        for name, tensor in [
            *((op.name, op.outputs[0]) for op in layer.graph.operators),
            *((name, name) for name in layer.graph.parameters),
        ]
    ]
    annotations = {}
    for name, rank in draw.sample(places, draw.randint(1, 4)):
        letters = [*(f"S{d}" for d in range(rank))] * 3 + ["P", "R"] + [f"S{d}:3" for d in range(rank)]
        chosen = draw.sample(axes, draw.randint(1, len(axes)))
        annotations[name] = ", ".join(f"{draw.choice(letters)} on {axis}" for axis in chosen)
    inputs = draw.choice(["I", *(f"S{d} on {axis}" for d in range(2) for axis in axes)])
    refusal = None
    try:
        found = propagate_model(layers.layers, annotations, mesh, inputs)
    except PlanError as error:
        refusal = str(error)
    if refusal is not None:
        assert "\n" not in refusal
        assert any(word in refusal for word in ("nearest choice", "possible", "keep one of the two"))
        return
    everything = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for layer, sharding, module in zip(found.layers, found.shardings, model, strict=True):
        error, given = largest_error(sharding, layer, module, everything, given)
        assert error < TOLERANCE, annotations
