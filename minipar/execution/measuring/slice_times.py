"""Measure what slices of a sequence take on this machine: t(length, context), for `minipar.costs.slicing`.

tokens   |------ context ------|-- length --|            the context runs first, so that its keys and values are there

times = slice_times(model, (x, y))
lengths = best_slices(tokens, stages, fit(times))        slices=4,3,2,2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.execution.measuring.profiler import profile
from minipar.execution.sliced import count_tokens, pick
from minipar.models.parameter_groups import shape_of
from minipar.models.tensors import count_rows


def slice_times(
    model: Iterable[nn.Module],
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    parts: int = 4,
    repeats: int = 3,
) -> dict[tuple[int, int], float]:
    """Seconds of forward and backward through all layers, by (length, context) of a slice in tokens.

    batch   (x, y) of shapes (rows, tokens, ...)
    parts   lengths and contexts are multiples of a `parts`-th of the tokens, and half of it

    Errors: PlanError for a model whose layers take whole sequences, or too few tokens.
    """
    layers, tokens, rows = list(model), count_tokens(batch), count_rows(batch[0])
    if whole := shape_of(layers).whole:
        raise PlanError(f"model: layer {whole} takes whole sequences; possible are minipar.models.Sliced")
    step = tokens // parts
    if parts < 2 or step < 2:
        raise PlanError(f"parts={parts}: of {tokens} tokens; possible are 2 to {tokens // 2} parts")
    found: dict[tuple[int, int], float] = {}
    for context in range(0, tokens, step):
        for length in (step // 2, *range(step, tokens - context + 1, step)):
            before = [range(context)] if context else []
            slices = [*before, range(context, context + length)]
            given = pick(batch, range(context + length))
            measured = profile(layers, given, loss, [rows], repeats, slices=slices)
            key = rows * len(slices) + len(slices) - 1
            found[length, context] = sum(measured.forward[key]) + sum(measured.backward[key])
    return found
