"""Lesson 17: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minipar_course.exercise import check
from minipar_course.exercises.selection import CLUSTERS, LARGE, TASK

SOLVED = {
    "small model": "dp=4 microbatches=4",
    "fast links": "dp=4 microbatches=4 zero=3",
    "slow links": "pp=4 microbatches=16 split=3,2,2,3",
    "two devices": "pp=2 microbatches=16 offload=optimizer",
}


def instead(**other: str) -> Callable[[str], str]:
    return lambda cluster: {**SOLVED, **{name.replace("_", " "): plan for name, plan in other.items()}}[cluster]


def test_the_lessons_own_task_can_be_met_in_three_ways() -> None:
    """As lesson 17 says: two pipelines, offload, or one pipeline of even stages."""
    for plan in (
        "dp=2 pp=2 microbatches=8 zero=1",
        "dp=4 microbatches=4 offload=optimizer,activations",
        "pp=4 microbatches=16 split=3,2,2,3",
    ):
        assert check(plan, TASK), plan
    for plan in ("dp=4 microbatches=4", "dp=4 microbatches=4 zero=1", "pp=4 microbatches=16"):
        assert not check(plan, TASK), plan


@pytest.mark.parametrize("word", ["schedule=pipedream", "schedule=pipedream-2bw", "precision=bf16"])
def test_a_plan_that_trains_otherwise_is_no_answer(word: str) -> None:
    verdict = check(f"pp=4 microbatches=16 split=3,2,2,3 {word}", TASK)
    assert not verdict
    assert word.partition("=")[2] in verdict.reason
    assert "trains" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "task", "reason", "hint"),
    [
        (instead(small_model="pp=4 microbatches=16"), CLUSTERS, "small model: ", "cut the layers more evenly"),
        (instead(two_devices="pp=4 microbatches=16"), CLUSTERS, "needs 4 devices", "there are 2"),
        (
            lambda: "pp=8 microbatches=64 precision=bf16",
            LARGE,
            "needs 56.4 GiB on rank 0",
            "recomputed by checkpoint=1",
        ),
        (
            lambda: "dp=8 microbatches=8 zero=3 checkpoint=1 precision=bf16",
            LARGE,
            "but takes 26 s",
            "fewer bytes, or less often",
        ),
    ],
)
def test_wrong_answers(answer: Any, task: Any, reason: str, hint: str) -> None:
    verdict = check(answer, task)
    assert not verdict
    assert reason in verdict.reason
    assert "\n" not in verdict.reason
    assert hint in verdict.hint
