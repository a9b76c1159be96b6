"""What workers of parameter servers did, step by step, and the mean losses of these steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """A step that a worker has done: its share of the mean loss, its `rows` of the `of` rows of the step, and gradients
    by parameter name (if kept). On real ranks also when each instruction ran, sizes as in `Compute`, and bytes of input
    rows."""

    worker: int
    step: int
    loss: float
    rows: int
    of: int
    gradients: dict[str, Tensor]
    times: Sequence[tuple[float, float]] = ()
    sizes: Mapping[tuple[str, int, int], int] = MappingProxyType({})
    data: int = 0


def losses_of(taken: Sequence[Step], count: int) -> list[float]:
    """The mean loss of each step, over the rows of the workers that did it."""
    of_step: dict[int, list[Step]] = {}
    for one in taken:
        of_step.setdefault(one.step, []).append(one)
    return [mean_loss(of_step.get(s, ())) for s in range(count)]


def mean_loss(here: Sequence[Step]) -> float:
    """The mean loss of a step, over the rows of these workers."""
    rows, whole = sum(t.rows for t in here), sum(t.loss for t in here)
    return whole * (here[0].of / rows) if rows and rows != here[0].of else whole
