"""The steps that workers of parameter servers have done: their losses, and during the run a picture of the last ones.

worker 0   |pull F B push|pull F B push|          each worker reports every step that it has done;
worker 1   |pull ... F B push|pull F B ..         the trace shows the time of the slowest worker's last step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from minipar.comm.clocks import Reading
from minipar.execution.following import Span, window
from minipar.program import Program
from minipar.strategies.served_order import blocks_of
from minipar.trace import Trace
from minipar.trace.memory_series import Series


class Step(NamedTuple):
    """A step that a worker has done: its share of the mean loss, its `rows` of the `of` rows of the step, and gradients
    by parameter name (if kept). Also when each instruction ran, sizes as in `Compute`, bytes of input
    rows, by how much these times may be wrong against those of another host, and what happened to the worker's memory,
    if that was followed."""

    worker: int
    step: int
    loss: float
    rows: float
    of: float
    gradients: dict[str, Tensor]
    times: Sequence[tuple[float, float]] = ()
    sizes: Mapping[tuple[str | int, ...], int] = MappingProxyType({})
    data: int = 0
    clock_error: float = 0.0
    series: Series | None = None

    def by(self, clock: Reading) -> Step:
        """The same by the clock of rank 0."""
        times = [(start + clock.seconds, end + clock.seconds) for start, end in self.times]
        series = self.series
        if series is not None:
            series = replace(series, times=[time + clock.seconds for time in series.times])
        return self._replace(times=times, clock_error=clock.error, series=series)


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


class Progress:
    """In the driver: what the workers have reported of their steps.

    done    the number of steps that all workers together have done, divided by the number of workers
    losses  of these steps, each over the rows of the workers that did it
    trace   of the last step of the worker that is furthest behind, with what the others did meanwhile
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._blocks = [blocks_of(program, worker) for worker in range(program.workers)]
        self._steps: dict[int, list[Step]] = {}
        self._rows: dict[int, list[Span]] = {}
        self._last: dict[int, tuple[float, float]] = {}  # worker that takes part -> start and end of its last step

    def heard(self, step: Step) -> None:
        """A worker has done a step."""
        done = self._steps.setdefault(step.step, [])
        if any(one.worker == step.worker for one in done):
            return  # (a worker that was started again did it once more)
        done.append(step._replace(gradients={}, sizes={}, series=None))
        row = zip(self._blocks[step.worker][step.step], step.times, strict=True)
        self._rows.setdefault(step.worker, []).extend((ins, start, end) for ins, (start, end) in row)
        self._last[step.worker] = min(a for a, _ in step.times), max(b for _, b in step.times)
        behind = min(self._last.values(), key=lambda span: span[1])
        for worker, rows in self._rows.items():
            self._rows[worker] = [one for one in rows if one[2] >= behind[0]]

    def gone(self, worker: int) -> None:
        """A worker has died, and starts again."""
        self._last.pop(worker, None)

    @property
    def done(self) -> int:
        return min(self.program.steps, sum(map(len, self._steps.values())) // self.program.workers)

    @property
    def losses(self) -> list[float]:
        return [mean_loss(self._steps.get(s, ())) for s in range(self.done)]

    @property
    def trace(self) -> Trace | None:
        if not self._last:
            return None
        worker = min(self._last, key=lambda w: self._last[w][1])
        step = max(s for s, done in self._steps.items() if any(one.worker == worker for one in done))
        rows = [self._rows.get(w, []) for w in range(self.program.workers)]
        what = f"the time of step {step + 1} of rank {worker}; what the servers do is in the trace of the whole run"
        return window(self.program, rows, *self._last[worker], what)
