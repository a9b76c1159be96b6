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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minipar_course.exercises.kinds.formula import Formula
from minipar_course.exercises.kinds.function import Function
from minipar_course.exercises.kinds.rewrite import Rewrite
from minipar_course.exercises.kinds.schedule import Target
from minipar_course.exercises.kinds.verdict import Task, Verdict, raised
from minipar_course.exercises.programs import GPIPE_TIME

if TYPE_CHECKING:
    from minipar_course.against import Comparison, against_plain_torch
    from minipar_course.exercises.kinds.built import Exchanged, Saving, Trained

__all__ = [
    "GPIPE_TIME",
    "Comparison",
    "Exchanged",
    "Formula",
    "Function",
    "Rewrite",
    "Saving",
    "Target",
    "Task",
    "Trained",
    "Verdict",
    "against_plain_torch",
    "check",
    "raised",
]

_WITH_TORCH = {  # only who asks for these waits until torch is imported
    "Comparison": "against",
    "against_plain_torch": "against",
    "Exchanged": "exercises.kinds.built",
    "Saving": "exercises.kinds.built",
    "Trained": "exercises.kinds.built",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"minipar_course.{_WITH_TORCH[name]}"), name)


def check(answer: Any, task: Task) -> Verdict:
    """Judge an answer at once. Never raises for a wrong answer: the verdict says what is wrong with it."""
    return task.judge(answer)
