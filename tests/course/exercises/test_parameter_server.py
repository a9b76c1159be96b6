"""The exercises of lesson 07: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import pytest

from minipar_course.exercise import check
from minipar_course.exercises import parameter_server as tasks

# who may pull


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda w, c, b: True, "worker 0 may pull, though it is 2 ahead of the slowest one", "the bound is 1"),
        (lambda w, c, b: max(c.values()) - min(c.values()) <= b, "worker 1 must wait, though it is only 2 ahead", ""),
    ],
)
def test_other_rules_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.MAY_PULL)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# a straggler


@pytest.mark.parametrize(
    ("words", "reason", "hint"),
    [
        ("dp=4 sync=ps servers=2", "3.11 s, staleness 0", "for whom do the quick workers wait?"),
        ("dp=4 sync=ps mode=k-of-n:1/4 servers=2", "45 gradients dropped", "take more of the gradients"),
    ],
)
def test_other_plans_are_told_why(words, reason, hint):
    verdict = check(words, tasks.STRAGGLER)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
