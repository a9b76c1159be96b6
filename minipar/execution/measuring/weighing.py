"""What a layer's forward leaves in memory, by storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.errors import RankError
from minipar.execution.sliced import Beside
from minipar.models.tensors import count_bytes, differentiable, map_tensors, opaque, overwrites, storages, tensors

Loss = Callable[[Any], Tensor]


class Weights(NamedTuple):
    """Bytes that a layer's forward leaves: see `Profile` for what each means."""

    output: int
    grad_output: int
    saved: int
    saves_output: bool
    carry: int = 0
    grad_carry: int = 0


def weigh(
    layer: nn.Module,
    given: Any,
    loss: Loss | None = None,
    known: Any = (),
    run: Beside | None = None,
) -> tuple[Any, list[Tensor], Weights]:
    """Run a layer's forward, and the loss of its output if given, and weigh what is left.

    `known`: tensors that are kept anyway, such as the loss's targets, and count for nothing. `run`: how the layer runs
    on a slice of a sequence; what it takes and hands on beside its output counts for nothing, too.

    Returns the output, the tensors from which a backward starts (the loss, or what can have a gradient), and the bytes.
    """
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = (run or layer)(map_tensors(given, torch.clone) if overwrites(layer) else given)
        ends = [loss(output)] if loss else differentiable(output)
    hidden = opaque(output)
    if hidden is not None:
        raise RankError(
            f"a layer hands on a {hidden}, which minipar cannot look into; possible are tensors, None, numbers and "
            "strings, and tuples, lists and dicts of them"
        )
    others = [*tensors(known), *tensors(run.beside if run else ()), *layer.parameters(), *layer.buffers()]
    given_before = storages([*tensors(given), *others])
    handed_on = storages(tensors(output)).keys() - given_before.keys()
    kept = {key: size for key, size in storages(saved).items() if key not in given_before}
    weights = Weights(
        count_bytes(output),
        count_bytes([t for t in tensors(output) if t.requires_grad]),
        sum(size for key, size in kept.items() if key not in handed_on),
        not handed_on.isdisjoint(kept),
    )
    return output, ends, weights
