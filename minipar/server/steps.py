"""The steps that workers of parameter servers have done, and their losses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from minipar.trace.memory_series import Series


class Step(NamedTuple):
    """A step that a worker has done: its share of the mean loss, its `rows` of the `of` rows of the step, and gradients
    by parameter name (if kept). Also when each instruction ran, and what happened to the worker's memory, if that was
    followed."""

    worker: int
    step: int
    loss: float
    rows: float
    of: float
    gradients: dict[str, Tensor]
    times: Sequence[tuple[float, float]] = ()
    series: Series | None = None


def losses_of(taken: Collection[Step], count: int) -> list[float]:
    """The mean loss of each step, over the rows of the workers that did it."""
    of_step: dict[int, list[Step]] = {}
    for one in taken:
        of_step.setdefault(one.step, []).append(one)
    return [mean_loss(of_step.get(s, ())) for s in range(count)]


def mean_loss(here: Sequence[Step]) -> float:
    """The mean loss of a step, over the rows of these workers."""
    rows, whole = sum(t.rows for t in here), sum(t.loss for t in here)
    return whole * (here[0].of / rows) if rows and rows != here[0].of else whole
