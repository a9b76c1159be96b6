"""Lesson 17: solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minipar_course.exercise import check
from minipar_course.exercises.selection import CLUSTERS, LARGE, STATES, TASK

SOLVED = {
    "small model": "dp=4 microbatches=4",
    "fast links": "dp=4 microbatches=4 zero=3",
    "slow links": "pp=4 microbatches=16 split=3,2,2,3",
    "two devices": "pp=2 microbatches=16 offload=optimizer",
}


def states(parameters: float, dp: int, pp: int, zero: int) -> float:
    part = [4 / (dp if zero >= 3 else 1), 4 / (dp if zero >= 2 else 1), 8 / (dp if zero >= 1 else 1)]
    return parameters / pp * sum(part)


def instead(**other: str) -> Callable[[str], str]:
    return lambda cluster: {**SOLVED, **{name.replace("_", " "): plan for name, plan in other.items()}}[cluster]


def stub(*_: Any) -> Any:
    raise NotImplementedError("your code here")


def test_solutions_pass() -> None:
    assert check(states, STATES)
    assert "agrees with ZeRO's table in all 7 cases" in check(states, STATES).reason
    assert check(instead(), CLUSTERS)
    assert check(lambda: "pp=8 microbatches=64 checkpoint=selective precision=bf16", LARGE)


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


@pytest.mark.parametrize("task", [STATES, CLUSTERS, LARGE])
def test_a_stub_is_told_that_nothing_is_written(task: Any) -> None:
    assert check(stub, task).reason == "nothing is written here yet"


def test_no_plan_is_right_everywhere() -> None:
    for plan in SOLVED.values():
        assert not check(lambda cluster, plan=plan: plan, CLUSTERS)


@pytest.mark.parametrize(
    ("answer", "task", "reason", "hint"),
    [
        (lambda n, dp, pp, zero: 16 * n, STATES, "3.2e+10, ZeRO's table 1.6e+10", "which of these does a plan divide"),
        (lambda n, dp, pp, zero: 16 * n / pp, STATES, "ZeRO's table", "shares out some of the 16 bytes"),
        (lambda n, dp, pp, zero: 16 * n / dp / pp, STATES, "1.6e+10", "zero=1 shares one kind"),
        (
            lambda n, dp, pp, zero: 16 * n / pp / (dp if zero else 1),
            STATES,
            "your function gives 2e+09, ZeRO's table 9e+09",
            "only zero=3 shares out all of it",
        ),
        (lambda n, dp, pp, zero: n * (16 - 4 * zero * (1 - 1 / dp)) / pp, STATES, "ZeRO's table 9e+09", "8 bytes"),
        (instead(small_model="pp=4 microbatches=16"), CLUSTERS, "small model: ", "cut the layers more evenly"),
        (instead(small_model="dp=4"), CLUSTERS, "small model: `dp=4 pp=1` needs 8.3 MiB", "smaller micro-batches"),
        (
            instead(fast_links="pp=4 microbatches=16 split=3,2,2,3"),
            CLUSTERS,
            "fast links: ",
            "for other stages (more micro-batches)",
        ),
        (instead(fast_links="dp=4 microbatches=4 zero=1"), CLUSTERS, "needs 47.7 MiB", "shared out by zero=3"),
        (instead(slow_links="pp=4 microbatches=16"), CLUSTERS, "needs 34.5 MiB on rank 1", "activations"),
        (instead(slow_links="dp=4 microbatches=4 zero=3"), CLUSTERS, "slow links: ", "14.1 MiB too much"),
        (instead(two_devices="pp=2 microbatches=16"), CLUSTERS, "two devices: ", "offload=optimizer"),
        (instead(two_devices="pp=4 microbatches=16"), CLUSTERS, "needs 4 devices", "there are 2"),
        (lambda cluster: {}[cluster], CLUSTERS, 'choose("small model") raised KeyError', "mend that line"),
        ("dp=4", CLUSTERS, "'dp=4' is no function", "def choose(cluster)"),
        (
            lambda: "pp=8 microbatches=64 precision=bf16",
            LARGE,
            "needs 46.3 GiB on rank 1",
            "recomputed by checkpoint=1",
        ),
        (
            lambda: "pp=8 microbatches=64 checkpoint=1 precision=bf16",
            LARGE,
            "but takes 8.9",
            "recomputing takes 1.8",
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
