"""Find a loss that is not a finite number where it is computed, before any update uses it. (Of an asynchronous program
on a GPU, as soon as the host knows it.)"""

from __future__ import annotations

import math
from collections.abc import Callable

from minipar.errors import NotFinite, PlanError
from minipar.execution.following import Warned

CHOICES = ("stop", "warn", "ignore")


def check_choice(on_nan: str) -> str:
    """`on_nan` itself; PlanError if it is unknown."""
    if on_nan not in CHOICES:
        raise PlanError(f"on_nan={on_nan}: unknown; possible are {', '.join(CHOICES)}")
    return on_nan


class Finite:
    """In a rank: checks the loss of each micro-batch that it computes.

    on_nan   "stop": NotFinite at the first one that is not finite; "warn": `report` it once; "ignore": nothing
    """

    def __init__(self, rank: int, on_nan: str, report: Callable[[Warned], None]) -> None:
        self.rank, self.on_nan, self._report = rank, on_nan, report

    def __call__(self, value: float, step: int, microbatch: int, rows: range) -> None:
        """Check the loss of these rows of a step's batch."""
        if self.on_nan == "ignore" or math.isfinite(value):
            return
        what = f"the loss is {value} in step {step}, rank {self.rank}, micro-batch {microbatch}"
        of = f"rows {rows.start} to {rows.stop - 1} of the batch"
        if self.on_nan == "stop":
            error = NotFinite(
                f"{what} ({of}); possible: a smaller learning rate, clip=1.0 in the plan, a look at these rows, "
                'or train(..., on_nan="warn") to go on'
            )
            error.step, error.rank, error.microbatch = step, self.rank, microbatch
            raise error
        self.on_nan = "ignore"
        self._report(Warned(f'{what} ({of}); the run goes on, as on_nan="warn" says'))
