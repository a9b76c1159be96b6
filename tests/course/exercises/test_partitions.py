"""Tasks of lesson 13: references pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

from minipar import Plan
from minipar.costs.partition import partition
from minipar_course.exercise import check
from minipar_course.exercises.partitions import CUT, FIT, SEARCH, STEP_TIME


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


# the time of unequal stages


def test_the_time_of_unequal_stages() -> None:
    assert check(lambda times, m: sum(times) + (m - 1) * max(times), STEP_TIME)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (lambda t, m: (m + len(t) - 1) * max(t), "step_time([9.0, 32.0, 6.0, 2.0], 8) gives 352.0", "less to fill"),
        (lambda t, m: 33, "gives 33; right is 273", "how long after it"),
    ],
)
def test_wrong_times(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, STEP_TIME)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# the best cut


def by_trying(costs: Sequence[float], stages: int) -> list[int]:
    n = len(costs)
    splits = ([b - a for a, b in pairwise((0, *places, n))] for places in combinations(range(1, n), stages - 1))
    return min(splits, key=lambda split: slowest(costs, split))


def slowest(costs: Sequence[float], split: Sequence[int]) -> float:
    left = list(costs)
    return max(sum(left.pop(0) for _ in range(n)) for n in split)


def test_the_best_cut() -> None:
    assert check(lambda costs, stages: partition(costs, stages, 10**6).split, CUT)
    assert check(by_trying, CUT)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (lambda costs, stages: [1] * stages, "gives [1, 1, 1], 3 layers together; there are 6", "A(k, j)"),
        (lambda costs, stages: None, "gives None", "return"),
    ],
)
def test_wrong_cuts(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, CUT)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# a search

Time = Callable[[Sequence[int]], float]


def climb(time: Time, nodes: int, ranks: int, calls: int, random: random.Random) -> list[int]:
    best: list[int] = []
    best_time = now_time = float("inf")
    now: list[int] = []
    failures = 0
    for _ in range(calls):
        if not now or failures > 5 * nodes:
            now, now_time, failures = [random.randrange(ranks) for _ in range(nodes)], float("inf"), 0
            other = now
        else:
            other = list(now)
            other[random.randrange(nodes)] = random.randrange(ranks)
        found = time(other)
        failures = 0 if found < now_time else failures + 1
        if found <= now_time:
            now, now_time = other, found
        if found < best_time:
            best, best_time = other, found
    return best


def test_hill_climbing_finds_good_placements() -> None:
    verdict = check(climb, SEARCH)
    assert verdict
    assert "the target is 86.5" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
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


def test_a_plan_that_fits() -> None:
    verdict = check(lambda: words((2, 4, 3, 3)), FIT)
    assert verdict
    assert verdict.reason == "it takes 158 units, and rank 0 keeps 64; the targets are 158 units and room for 64"
    assert check(lambda: Plan.parse(words((2, 4, 3, 3))), FIT), "a Plan is as good as its words"


def test_the_target_is_what_1f1b_can_reach() -> None:
    splits = [tuple(b - a for a, b in pairwise((0, *places, 12))) for places in combinations(range(1, 12), 3)]
    measured = [FIT.measure(words(split)) for split in splits]
    assert min(time for time, kept in measured if max(kept) <= 64) == pytest.approx(158)
    time, kept = min(measured)
    assert (time, max(kept)) == (pytest.approx(139 + 1 / 3), 128)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (lambda: words((2, 3, 3, 4)), "and rank 0 keeps 64; the target is 158 units", "Which of those that fit"),
        (lambda: "pp=4 dp=2 microbatches=8 split=2,4,3,3", "what was asked for: one pipeline", "you gave `dp=2"),
    ],
)
def test_plans_that_do_not_fit(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, FIT)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
