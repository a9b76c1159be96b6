"""What a loss says about its mean: which targets it leaves out, and whether it is a plain mean at all.

The share of a micro-batch in the step's mean loss is its number of counted targets over that of the whole batch. So
minipar must know `ignore_index`, and cannot run losses whose mean is weighted otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from minipar.errors import PlanError
from minipar.tensors import count_rows, tensors


def option(loss: Any, name: str, default: Any) -> Any:
    """An option of a loss: a keyword of a partial, or an attribute of a loss module."""
    while isinstance(loss, partial):
        if name in loss.keywords:
            return loss.keywords[name]
        loss = loss.func
    return getattr(loss, name, default)


def check_loss(loss: Any) -> None:
    """Refuse a loss that is no plain mean over its rows or targets."""
    if not callable(loss):
        raise PlanError(f"loss={loss!r}: must be a function loss(output, y) -> scalar")
    if option(loss, "weight", None) is not None:
        raise PlanError("loss: class weights are not possible, as they weigh micro-batches; use a plain mean")
    if option(loss, "reduction", "mean") == "sum":
        raise PlanError("loss: reduction='sum' is not possible; use 'mean' (gradients are of the mean over all rows)")


def counts_elements(y: Any) -> bool:
    """Whether a batch of these targets weighs by its target elements, which are integers; others weigh by rows."""
    first = next(iter(tensors(y)), None)
    return first is not None and not first.is_floating_point() and not first.is_complex()


def counted(y: Any, loss: Any) -> int:
    """How much a batch weighs in a mean loss: its target elements that count, or its rows where y is not integer."""
    if not counts_elements(y):
        return count_rows(y)
    first = tensors(y)[0]
    return int((first != option(loss, "ignore_index", -100)).sum())
