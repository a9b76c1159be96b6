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
        (lambda rank, dp, pp: divmod(rank, dp), WHO_AM_I, "right is", "the next pipeline begin?"),
        (lambda rank, dp, pp: (rank % dp, rank // dp), WHO_AM_I, "right is", "neighbours, not replicas"),
        (lambda rank, dp, pp: (0, rank), WHO_AM_I, "right is (1, 0)", "replica 0 has the first"),
        (lambda rank, dp, pp: rank, WHO_AM_I, "gives 0; right is (0, 0)", "replica 0"),
        (lambda rows, parts: [rows // parts] * parts, SHARES, "8 rows together", "left over?"),
        (
            lambda rows, parts: [rows // parts] * (parts - 1) + [rows - rows // parts * (parts - 1)],
            SHARES,
            "may differ by one row",
            "give one row of it",
        ),
        (lambda rows, parts: fair(rows, parts)[::-1], SHARES, "lets the first ones have the row more", "divmod"),
        (lambda rows, parts: rows / parts, SHARES, "not a list of whole numbers", "divmod"),
        (lambda rows, parts: [rows], SHARES, "gives 1 numbers for 4 parts", "divmod"),
        (
            lambda: "dp=4 microbatches=4",
            FIRST_PLAN,
            "needs 68.8 MiB on rank 0; the target is 48.0 MiB",
            "optimizer: shared out by zero=1",
        ),
        (
            lambda: "pp=4 microbatches=16",
            FIRST_PLAN,
            "fits, 34.5 MiB, but takes 2.43 s; the target is 2 s",
            "cut the layers more evenly",
        ),
        (
            lambda: "pp=4 microbatches=16 schedule=gpipe",
            FIRST_PLAN,
            "needs 93.0 MiB",
            "activations: fewer with smaller",
        ),
        (lambda: "dp=4 microbatches=4 zero=1 checkpoint=1", FIRST_PLAN, "but takes 2.29 s", "recomputing takes 0.5"),
        (lambda: "pp=2 microbatches=16", FIRST_PLAN, "but takes 3", "the busiest rank"),
        (lambda: "dp=8", FIRST_PLAN, "needs 8 devices", "there are 4"),
        (lambda: "dp=4 microbatches=8", FIRST_PLAN, "cannot be", "fewer rows than the 32 micro-batches"),
        (lambda: "dp=4 microbatch=4", FIRST_PLAN, "cannot be", "microbatches"),
        (lambda: 4, FIRST_PLAN, "4 is no plan", "return its words"),
        (lambda: None, FIRST_PLAN, "None is no plan", "return its words"),
        (lambda: 1 / 0, FIRST_PLAN, "your function raised ZeroDivisionError", "mend that line"),
    ],
)
def test_wrong_answers(answer: Any, task: Any, reason: str, hint: str) -> None:
    verdict = check(answer, task)
    assert not verdict
    assert reason in verdict.reason
    assert "\n" not in verdict.reason
    assert hint in verdict.hint
