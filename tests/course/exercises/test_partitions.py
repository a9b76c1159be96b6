"""Tasks of lesson 13: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

from minipar_course.exercise import check
from minipar_course.exercises.partitions import FIT, SEARCH

# a search


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda time, nodes, ranks, calls, random: None, "gives None, which is no placement", "a list of 18 ranks"),
        (lambda time: [0] * 18, "your search raised TypeError", "check its arguments"),
    ],
)
def test_wrong_searches(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, SEARCH)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# a plan that fits


def words(split: Sequence[int]) -> str:
    return f"pp=4 microbatches=8 split={','.join(map(str, split))}"


def test_the_target_is_what_1f1b_can_reach() -> None:
    splits = [tuple(b - a for a, b in pairwise((0, *places, 12))) for places in combinations(range(1, 12), 3)]
    measured = [FIT.measure(words(split)) for split in splits]
    assert min(time for time, kept in measured if max(kept) <= 64) == pytest.approx(158)
    time, kept = min(measured)
    assert (time, max(kept)) == (pytest.approx(139 + 1 / 3), 128)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda: words((2, 3, 3, 4)), "and rank 0 keeps 64; the target is 158 units", "Which of those that fit"),
        (lambda: "pp=4 dp=2 microbatches=8 split=2,4,3,3", "what was asked for: one pipeline", "you gave `dp=2"),
    ],
)
def test_plans_that_do_not_fit(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, FIT)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
