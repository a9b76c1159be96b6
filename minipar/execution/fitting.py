"""Whether a model is the one that a program was made for, and one that can be trained here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minipar.errors import PlanError, RankError
from minipar.models.parameter_groups import shape_of
from minipar.program import Program
from minipar.program.edges import Edges
from minipar.wording import several


def check_fit(program: Program, layers: Sequence[nn.Module], edges: Edges = ()) -> None:
    """Refuse a model with other layers, edges or ties, or more to train than the program was compiled for.

    A program that trains nothing (inference) takes any model of its layers.
    """
    check_parameters(layers)
    if program.sharded:
        check_types(layers)
    shape = shape_of(layers)
    groups, planned = shape.groups, {(group.layers, group.form): group.trainable for group in program.groups}
    same = len(layers) == program.layers and planned.keys() == {(group.layers, group.form) for group in groups}
    trains = any(planned.values())
    other = ""
    if program.slice_count > 1 and (shape.whole or set(shape.carries) != set(program.carries)):
        what = f"layer {shape.whole} takes whole sequences" if shape.whole else f"layers {shape.carries} carry"
        other = f", in whose slices of sequences layers {program.carries} carry: {what}"
    elif same and edges != program.edges:
        other = f": with edges {program.edges or 'of a chain'}, not {edges or 'of a chain'}"
    elif not same or any(trains and group.trainable and not planned[group.layers, group.form] for group in groups):
        theirs, mine = ([g.layers for g in some if len(g.layers) > 1] for some in (program.groups, groups))
        other = f": {several(program.layers, 'layer')} with ties {theirs}, not {len(layers)} with {mine}"
    if other:
        raise RankError(
            f"program {program.name!r} was compiled for another model{other}; compile it for "
            "minipar.models.shape_of(model)"
        )


def check_parameters(layers: Sequence[nn.Module]) -> None:
    """Refuse parameters that cannot be trained: `RankError` with their names."""
    for k, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
                kind = type(module).__name__
                raise RankError(
                    f"layer {k}{name and ': '}{name}: {kind}(sparse=True) has sparse gradients, which ranks do not add "
                    "up; possible is sparse=False"
                )
        for name, p in layer.named_parameters():
            if p.layout is not torch.strided or p.is_quantized or p.is_nested:
                raise RankError(f"layer {k}: parameter {name} is of layout {p.layout}; possible are dense tensors")
            if any(stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride(), strict=True)):
                what = "is expanded: elements share memory; possible is nn.Parameter(x.contiguous())"
                raise RankError(f"layer {k}: parameter {name} {what}")


def check_types(layers: Sequence[nn.Module]) -> None:
    """Refuse what replicas cannot divide into slices: trained numbers of several types. `PlanError`."""
    first: dict[torch.dtype, str] = {}
    for k, layer in enumerate(layers):
        for name, p in layer.named_parameters():
            if p.requires_grad:
                first.setdefault(p.dtype, f"{name} of layer {k}")
    if len(first) > 1:
        (one, a), (other, b), *_ = first.items()
        raise PlanError(
            f"zero: {a} is of {one}, {b} of {other}; slices of one message are of one type; possible are zero=0, or a "
            "model of one type"
        )


def row_major(layer: nn.Module) -> nn.Module:
    """The layer, with its parameters made contiguous, row by row: messages, buckets, slices and files need that."""
    for p in layer.parameters():
        if not p.is_contiguous():
            p.data = p.data.contiguous(memory_format=torch.contiguous_format)
    return layer
