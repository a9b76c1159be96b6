"""Lesson 00: solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from typing import Any

import pytest

from minipar.strategies.plan import Plan
from minipar_course.exercise import check
from minipar_course.exercises.start import FIRST_PLAN, SHARES, WHO_AM_I


def fair(rows: int, parts: int) -> list[int]:
    even, more = divmod(rows, parts)
    return [even + (part < more) for part in range(parts)]


def stub(*_: Any) -> Any:
    raise NotImplementedError("your code here")


def test_solutions_pass() -> None:
    assert check(lambda rank, dp, pp: (rank // pp, rank % pp), WHO_AM_I)
    assert check(fair, SHARES)
    verdict = check(lambda: "dp=2 pp=2 microbatches=8", FIRST_PLAN)
    assert verdict
    assert verdict.reason.startswith("`dp=2 pp=2 schedule=1f1b microbatches=8`: 1.82 s of at most 2 s, 40.7 MiB of")
    assert check(lambda: Plan(dp=4, microbatches=4, zero=1), FIRST_PLAN)
    assert check("dp=2 pp=2 microbatches=8 zero=1", FIRST_PLAN), "a plan itself is an answer, too"


@pytest.mark.parametrize("task", [WHO_AM_I, SHARES, FIRST_PLAN])
def test_a_stub_is_told_that_nothing_is_written(task: Any) -> None:
    assert check(stub, task).reason == "nothing is written here yet"
    assert "your code here" not in repr(check(stub, task))


@pytest.mark.parametrize(
    ("answer", "task", "reason", "hint"),
    [
        (lambda rank, dp, pp: (rank % pp, rank // pp), WHO_AM_I, "right is (0, 1)", "first the replica"),
        (
            lambda: "dp=4 microbatches=4",
            FIRST_PLAN,
            "needs 68.8 MiB on rank 0; the target is 48.0 MiB",
            "optimizer: shared out by zero=1",
        ),
        (lambda: 1 / 0, FIRST_PLAN, "your function raised ZeroDivisionError", "mend that line"),
    ],
)
def test_wrong_answers(answer: Any, task: Any, reason: str, hint: str) -> None:
    verdict = check(answer, task)
    assert not verdict
    assert reason in verdict.reason
    assert "\n" not in verdict.reason
    assert hint in verdict.hint
