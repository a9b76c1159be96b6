"""Lesson 10: how many micro-batches a pipeline needs; a schedule of two chunks; slack for slow links."""

from __future__ import annotations

import math

from minipar.prediction.simulator import simulate
from minipar.strategies.plan import Plan
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.schedule import Target

MOST = 500  # micro-batches; more than any case needs


def _idle(stages: int, microbatches: int) -> float:
    program = Plan(pp=stages, microbatches=microbatches, schedule="1f1b").compile(layers=stages)
    return simulate(program).bubble_of_total()


def _not_the_fewest(given: float, stages: int, bubble: float) -> str:
    if isinstance(given, bool) or given != int(given) or given < 1:
        return f"gives {given!r}, but micro-batches are counted: 1, 2, 3, ..."
    count = int(given)
    if count > MOST:
        return f"gives {count}; far fewer are enough"
    idle = _idle(stages, count)
    if idle > bubble + 1e-9:
        return f"gives {count}; with so many the bubble is {idle:.1%} of the total, more than {bubble:.1%}"
    if count > 1 and _idle(stages, count - 1) <= bubble + 1e-9:
        return f"gives {count}; but {count - 1} are enough"
    return ""


FEWEST = Function(
    "fewest(stages, bubble)",
    ((4, 0.25), (4, 0.125), (8, 0.25), (2, 0.5), (6, 0.3), (3, 0.75), (3, 0.6), (5, 0.3), (6, 0.45)),
    problem=_not_the_fewest,
    mistakes=(
        (lambda p, b: math.ceil((p - 1) / b), "(p - 1) / bubble is m + p - 1, not m: the total counts idle time, too"),
        (lambda p, b: max(1, int((p - 1) * (1 - b) / b)), "nearly: a part of a micro-batch too few; round up"),
        (lambda p, b: max(1, round((p - 1) * (1 - b) / b)), "rounded to the nearest, it may be too few; round up"),
        (lambda p, b: 9 * (p - 1), "that is for a tenth only; solve (p - 1) / (m + p - 1) = bubble for m"),
    ),
    hint="the bubble is (p - 1) / (m + p - 1) of the total; solve that for m, and round up",
)  # fmt: skip

BREADTH_FIRST = Target(stages=4, microbatches=8, time=28.5, activations=8)
SLOW_LINKS = Target(stages=4, microbatches=8, time=37, activations=5, latency=0.5)
