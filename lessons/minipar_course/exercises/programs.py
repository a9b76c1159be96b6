"""Lesson 01: the time of a pipeline's step; a schedule to repair; a schedule for small devices."""

from __future__ import annotations

from minipar.prediction.simulator import simulate
from minipar.strategies.plan import Plan
from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.schedule import Target


def _gpipe_time(stages: int, microbatches: int, forward: float, backward: float) -> float:
    program = Plan(pp=int(stages), microbatches=int(microbatches), schedule="gpipe").compile(layers=int(stages))
    return simulate(program, forward=forward, backward=backward).time


GPIPE_TIME = Formula(
    ("stages", "microbatches", "forward", "backward"),
    _gpipe_time,
    ((4, 8, 1, 2), (1, 1, 1, 2), (1, 6, 1, 2), (3, 1, 1, 1), (2, 5, 1.5, 2.5), (8, 4, 2, 3)),
    (
        (lambda p, m, f, b: m * (f + b), "that is how long a rank works; how long does the last one wait at first?"),
        (lambda p, m, f, b: p * m * (f + b), "that is one micro-batch at a time; in a pipeline the ranks overlap"),
        (lambda p, m, f, b: (m + p) * (f + b), "one too many: micro-batch 0 crosses how many links to the last rank?"),
        (lambda p, m, f, b: m * (f + b) + (p - 1) * f, "the pipeline fills before it works; must it not drain, too?"),
        (lambda p, m, f, b: (m + p - 1) * f, "that is the forwards alone; the backwards fill and drain the same way"),
    ),
    hint="the last rank begins (stages - 1) forwards late, works for all micro-batches, and then its gradient has "
    "(stages - 1) backwards to go to rank 0",
)  # fmt: skip


TURNS = Target(stages=4, microbatches=8, time=33, activations=4)
SMALL_DEVICES = Target(stages=4, microbatches=8, time=60, activations=2)
