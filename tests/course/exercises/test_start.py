"""Lesson 00: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import pytest

from minipar_course.exercise import check
from minipar_course.exercises.start import FIRST_PLAN


@pytest.mark.parametrize(
    ("words", "reason", "hint"),
    [
        (
            "dp=4 microbatches=4",
            "needs 69.2 MiB on rank 0; the target is 48.0 MiB",
            "optimizer: shared out by zero=1",
        ),
        (
            "pp=4 microbatches=16",
            "fits, 34.9 MiB, but takes 2.43 s; the target is 2 s",
            "cut the layers more evenly",
        ),
    ],
)
def test_wrong_plans(words: str, reason: str, hint: str) -> None:
    verdict = check(lambda: words, FIRST_PLAN)
    assert not verdict
    assert reason in verdict.reason
    assert "\n" not in verdict.reason
    assert hint in verdict.hint
