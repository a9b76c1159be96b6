"""Tasks of lesson 11b: references pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from typing import Any

import pytest

from minipar.costs.slicing import best_slices
from minipar_course.exercise import check
from minipar_course.exercises.both_ends import HELD, SLICED_TIME, SLICES


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


def test_the_formulas() -> None:
    assert check(lambda times, stages: sum(times) + (stages - 1) * max(times), SLICED_TIME)
    assert check(lambda rank, stages: sorted({rank, stages - 1 - rank}), HELD)


@pytest.mark.parametrize("task", [SLICED_TIME, HELD])
def test_mistakes_are_recognised(task: Any) -> None:
    assert check(stub, task).reason == "nothing is written here yet"
    for answer, hint in task.mistakes:
        verdict = check(answer, task)
        assert not verdict
        assert verdict.hint == hint
    assert task.hint in check(lambda *case: [7], task).hint


# slices


def test_the_dynamic_program_cuts_a_sequence() -> None:
    assert check(best_slices, SLICES)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (lambda tokens, stages, time: [tokens, 1], "sum to 13; the sequence has 12 tokens", "try every value"),
        (lambda tokens, stages, time: best_slices(tokens, stages, time)[::-1], "slices that take", "try every value"),
    ],
)
def test_wrong_slices(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, SLICES)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
