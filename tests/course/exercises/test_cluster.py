"""Lesson 19: wrong and wasteful answers are told why; the GPU's trace is what the profiler recorded."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from minipar import Trace
from minipar.program import Op
from minipar_course import gpu_trace
from minipar_course.exercises import cluster as tasks

RIGHT = {
    "CROSSING": tasks._crossing,
    "LINE": tasks._line,
    "EXPOSED": tasks.exposed,
    "LAUNCH_GAPS": tasks.launch_gaps,
    "CULPRIT": tasks.culprit,
    "SAVE_EVERY": tasks._steps(tasks.young),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_empty_and_frequent_wrong_answers(name: str) -> None:
    """Each of the three mistakes is recognised by its own hint."""
    task = getattr(tasks, name)
    assert task.judge(RIGHT[name])
    assert len(task.mistakes) == 3
    for wrong, hint in task.mistakes:
        verdict = task.judge(wrong)
        assert not verdict
        assert verdict.hint == hint
    assert task.judge(lambda *given: None).hint == "does it end with `return ...`?"
    assert task.judge(None).hint == f"def {task.signature}: ..."


@pytest.mark.parametrize(
    ("task", "answer", "reason"),
    [
        (tasks.LINE, lambda *given: ["--node-rank=1", *tasks._line(*given)], "numbers the machines by hand"),
        (tasks.LINE, lambda *given: ["--nodes=2"], "which torchrun does not take"),
        (tasks.LINE, lambda *given: tasks._line(*given)[:-1], "which torchrun does not take"),
        (tasks.SAVE_EVERY, lambda *given: 5, "right, but wasteful: 75% of the time is spent on saving"),
        (tasks.SAVE_EVERY, lambda *given: 10**6, "too much is computed again"),
        (tasks.SAVE_EVERY, lambda *given: 2.5, "a whole number"),
        (tasks.SAVE_EVERY, lambda *given: 0, "must be 1 at least"),
    ],
)
def test_wasteful_answers_and_such_of_another_form(task: Any, answer: Any, reason: str) -> None:
    assert reason in task.judge(answer).reason


def test_goodput_is_best_near_youngs_interval_and_one_where_nothing_fails() -> None:
    assert tasks.goodput(100, 0, 0, 1e9) == pytest.approx(1, abs=1e-6)
    between = tasks.young(60, 36000)
    assert between == pytest.approx(math.sqrt(2 * 60 * 36000))
    best = max(range(100, 10000, 10), key=lambda work: tasks.goodput(work, 60, 600, 36000))
    assert abs(best / between - 1) < 0.05


def test_the_trace_of_a_gpu_is_opened_with_its_phases() -> None:
    trace = Trace.from_kineto(gpu_trace.step())
    assert Counter(ins.op for ins in trace.program.ranks[0]) == {
        Op.FETCH: 2, Op.FORWARD: 12, Op.BACKWARD: 14, Op.STEP: 4,
    }  # fmt: skip
    assert trace.busy[0] == pytest.approx(48e-6)  # (copies are on a stream of their own)
    for _, _, called, _, start, length in gpu_trace.LAUNCHED:
        assert gpu_trace.STEP[0] < called < start < start + length < sum(gpu_trace.STEP)
