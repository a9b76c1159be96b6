"""The steps that workers of parameter servers have done: their losses, and during the run a picture of the last ones.

worker 0   |pull F B push|pull F B push|          each worker reports every step that it has done;
worker 1   |pull ... F B push|pull F B ..         the trace shows the time of the slowest worker's last step
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from minipar.execution.following import Span, window
from minipar.program import Program
from minipar.strategies.served_order import Blocks
from minipar.trace import Trace
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


def last_of(program: Program, blocks: Sequence[Blocks], done: Collection[Step]) -> Trace:
    """The trace of the last step of the worker that is furthest behind, with what the others did meanwhile. `blocks`:
    the instructions of each worker, by step."""
    latest = {one.worker: one for one in done}
    behind = min(latest.values(), key=lambda one: one.times[-1][1])
    begin, end = behind.times[0][0], behind.times[-1][1]
    rows: list[list[Span]] = [[] for _ in blocks]
    for one in done:
        if one.times[-1][1] > begin:
            block = zip(blocks[one.worker][one.step], one.times, strict=True)
            rows[one.worker] += [(ins, *span) for ins, span in block]
    what = (
        f"the time of step {behind.step + 1} of rank {behind.worker}; what the servers do is in the trace of the whole"
    )
    return window(program, rows, begin, end, f"{what} run")
