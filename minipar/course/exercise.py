"""Checks for the exercises of the lessons. They answer at once, in words that teach, and a stub does not pass them.

    exercise.check(step_time, tasks.GPIPE_TIME)                                         a function of numbers
    exercise.check(mine, exercise.Target(stages=4, microbatches=8, time=33, activations=4))      a schedule

A task says what is asked for, and the engine itself judges: `simulate` gives the right number, `verify` says whether a
schedule can run, and the predicted trace says what it costs. A verdict shows itself, and is true only if all that was
asked for is met.

A mechanism that you build with `torch.distributed` is compared with plain torch on real ranks, and what it sends and
holds is counted; `against_plain_torch(train, model, batches)` does this for your own models, too.

Tasks are in `exercises/`, one module for each topic, made of the kinds that are named here.
"""

from __future__ import annotations

from typing import Any

from minipar.course.against import Comparison, against_plain_torch
from minipar.course.exercises.kinds.built import Exchanged, Trained
from minipar.course.exercises.kinds.formula import Formula
from minipar.course.exercises.kinds.function import Function
from minipar.course.exercises.kinds.rewrite import Rewrite
from minipar.course.exercises.kinds.schedule import Target
from minipar.course.exercises.kinds.verdict import Task, Verdict, raised
from minipar.course.exercises.programs import GPIPE_TIME

__all__ = [
    "GPIPE_TIME",
    "Comparison",
    "Exchanged",
    "Formula",
    "Function",
    "Rewrite",
    "Target",
    "Task",
    "Trained",
    "Verdict",
    "against_plain_torch",
    "check",
    "raised",
]


def check(answer: Any, task: Task) -> Verdict:
    """Judge an answer at once. Never raises for a wrong answer: the verdict says what is wrong with it."""
    return task.judge(answer)
