"""checkpoint=selective: a part inside a layer keeps only its inputs, and runs forward again in the layer's backward.

    forward     q, k, v --core--> seen          kept: q, k, v; not the core's own values (scores, softmax, mask)
    backward    q, k, v --core--> seen          again, and then the gradient

The core of an attention makes the largest activations of a block with few operations: in GPT-3 it has 70 % of the bytes
and takes 2.7 % of the time. Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022.

A model's author marks such a part by deriving it from `Recomputed`. The part runs again inside its layer's BACKWARD,
because a layer is the smallest unit of a program. A profile measures the layer with this recomputation.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models import randomness


class Recomputed(nn.Module):
    """A part of a layer, without parameters, that runs again in backward if a plan has checkpoint=selective.

    Derive from it and write `compute(*inputs) -> Tensor`; it may also give a tuple of tensors. It may depend only on
    its inputs and on `nn.Dropout`s inside.
    """

    again = False

    def compute(self, *inputs: Tensor) -> Any:
        """What the part computes: a tensor, or a tuple of them."""
        raise NotImplementedError(f"{type(self).__name__} needs a method compute(*inputs)")

    def forward(self, *inputs: Tensor) -> Any:
        if self.again and torch.is_grad_enabled():
            return _Again.apply(self, *inputs)
        return self.compute(*inputs)


def choose(layers: Iterable[nn.Module], again: bool) -> None:
    """Say whether the marked parts of these layers run again in backward, or keep their values."""
    for part in _parts(layers):
        part.again = again
    if again:
        # Autograd imports this at the first backward from a given gradient: half a second in the middle of a trace.
        with suppress(ImportError):
            importlib.import_module("torch.fx.experimental.symbolic_shapes")


def check(layers: Iterable[nn.Module]) -> None:
    """Errors: `PlanError` for a model without marked parts, or with a marked part that has parameters."""
    found = _parts(layers)
    if not found:
        raise PlanError(
            "checkpoint=selective: no layer of this model has a part that derives from minipar.models.Recomputed, as "
            " the attention core of models.gpt does; possible are checkpoint=none, sqrt, K, a budget or layers"
        )
    for part in found:
        if any(True for _ in part.parameters()):
            raise PlanError(f"checkpoint=selective: {type(part).__name__} has parameters; a recomputed part has none")


def _parts(layers: Iterable[nn.Module]) -> list[Recomputed]:
    return [part for layer in layers for part in layer.modules() if isinstance(part, Recomputed)]


class _Again(torch.autograd.Function):
    """The part as one node of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, part: Recomputed, *inputs: Tensor) -> Tensor:
        ctx.part = part
        ctx.rows = [(d, d.step, d.first_row, d.first_token, d.rows) for d in randomness.row_dropouts(part)]
        ctx.sources = randomness.generators(inputs[0].device if inputs else torch.device("cpu"))
        ctx.states = [source.get_state() for source in ctx.sources]
        ctx.save_for_backward(*inputs)
        return part.compute(*inputs)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        buffers = [(buffer, buffer.clone()) for buffer in ctx.part.buffers()]
        with torch.enable_grad(), randomness.untouched(ctx.sources):
            for dropout, *where in ctx.rows:  # the same mask as before
                randomness.at([dropout], *where)
            for source, state in zip(ctx.sources, ctx.states, strict=True):
                source.set_state(state)
            result = ctx.part.compute(*inputs)
        for buffer, before in buffers:  # (a buffer that counts runs must not count twice)
            buffer.copy_(before)
        wanted = [x for x in inputs if x.requires_grad]
        results = result if isinstance(result, tuple) else (result,)
        pairs = [(r, g) for r, g in zip(results, received, strict=True) if r.requires_grad]
        found = iter(torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        return (None, *(next(found) if need else None for need in needed))
