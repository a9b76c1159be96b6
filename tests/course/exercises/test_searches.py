"""Lesson 16: what is asked for passes (tests/course/test_solutions.py); stubs and mistakes are told what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minipar.planner.chain import chain
from minipar.planner.intra import ilp
from minipar_course.exercise import check
from minipar_course.exercises import searches as tasks
from tests.course.exercises.test_building import is_told, stub


@pytest.mark.parametrize(
    "task", [tasks.PLAN_TIME, tasks.BEST_CHAIN, tasks.WITHIN, tasks.UPDATE, tasks.TWO_LEVELS], ids=range(5)
)
def test_a_stub_is_told_that_nothing_is_written(task: Any) -> None:
    assert "nothing is written here yet" in check(stub, task).reason
    assert "is no function" in check(3, task).reason


@pytest.mark.parametrize(
    ("answer", "task", "reason", "hint"),
    [
        (lambda costs, moves, choices: sum(map(lambda own, i: own[i], costs, choices)), tasks.PLAN_TIME,
         "right is", "the work alone"),
        (lambda costs, moves, choices: tasks.plan_time(costs, [list(zip(*m, strict=True)) for m in moves], choices),
         tasks.PLAN_TIME, "right is", "the choice of node k first"),
        (tasks.cheapest_alone, tasks.BEST_CHAIN, "which takes", "the moves between them"),
        (tasks.cheapest_next, tasks.BEST_CHAIN, "which takes", "cannot know what comes"),
        (lambda costs, moves: [0], tasks.BEST_CHAIN, "gives 1 choices; there are 2 nodes", "best[j]"),
        (lambda costs, moves: [9 for _ in costs], tasks.BEST_CHAIN, "its choices are 0 to 1", "best[j]"),
        (lambda costs, moves, memory, budget: chain(tasks.graph_of(costs, moves)).choices, tasks.WITHIN,
         "the budget is", "without a budget"),
        (lambda costs, moves, memory, budget: [min(range(len(own)), key=own.__getitem__) for own in memory],
         tasks.WITHIN, "a plan that fits and takes", "there is room for a faster one"),
        (lambda logits, drawn, times: logits, tasks.UPDATE, "the target is", "learns next to nothing"),
        (lambda logits, drawn, times: None, tasks.UPDATE, "gives NoneType", "same shape"),
        (lambda times, devices, microbatches: [(len(times[1]), devices)], tasks.TWO_LEVELS, "[(2, 2), (2, 2)] takes",
         "intra-operator parallelism alone"),
        (lambda times, devices, microbatches: [(len(times[1]), 1)], tasks.TWO_LEVELS,
         "all 4 must be used", "try every"),
    ],
)  # fmt: skip
def test_mistakes(answer: Any, task: Any, reason: str, hint: str) -> None:
    is_told(check(answer, task), reason, hint)


def reinforce(sign: float = 1.0, baseline: bool = True) -> Any:
    def update(logits: Any, drawn: Any, times: Any) -> Any:
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        reward = (times.mean() - times) / times.std() if baseline else -times
        picked = np.eye(logits.shape[1])[drawn]
        return logits + sign * 0.5 * np.einsum("s,snc->nc", reward, picked - chances) / len(times)

    return update


def test_a_policy_that_learns_the_wrong_thing() -> None:
    is_told(check(reinforce(sign=-1.0), tasks.UPDATE), "the target is", "it learns what is slow")
    is_told(check(reinforce(baseline=False), tasks.UPDATE), "the target is", "the mean of all that were drawn|nothing")


def test_the_planner_itself_passes() -> None:
    assert check(lambda *given: ilp(tasks.graph_of(*given)).choices, tasks.WITHIN)
    assert check(tasks.best_division, tasks.TWO_LEVELS)
