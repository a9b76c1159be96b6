"""The exercises of lesson 06: reference solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from minipar_course.exercise import check
from minipar_course.exercises import data_parallel as tasks


def stub(*arguments: object) -> Any:
    raise NotImplementedError("your code here")


@pytest.mark.parametrize("task", [tasks.STEP_TIME, tasks.SHARES, tasks.BUCKETS, tasks.FOUR_DEVICES])
def test_a_stub_is_told_that_nothing_is_written(task):
    verdict = check(stub, task)
    assert not verdict
    assert verdict.reason == "nothing is written here yet"


# the time of a step


def test_the_time_of_a_step():
    assert check(lambda p, c, n, a, b: c / p + 2 * (p - 1) * (a + n / p * b), tasks.STEP_TIME)
    for formula, hint in tasks.STEP_TIME.mistakes:
        assert check(formula, tasks.STEP_TIME).hint == hint


# rows


def in_runs(rank: int, ranks: int, size: int) -> range:
    return range(size * rank // ranks, size * (rank + 1) // ranks)


def test_rows_in_runs_or_dealt_out_pass():
    assert check(in_runs, tasks.SHARES)
    assert check(lambda rank, ranks, size: list(range(rank, size, ranks)), tasks.SHARES)


def rounded_down(rank, ranks, size):
    return range(rank * (size // ranks), (rank + 1) * (size // ranks))


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (rounded_down, "10 rows on 4 ranks: nobody trains row 8", "that do not divide evenly"),
        (lambda rank, ranks, size: in_runs(rank, 4, 10), "7 rows on 1 rank: nobody trains row 2", "evenly"),
        (3, "3 is no function", "def my_rows"),
    ],
)
def test_other_shares_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.SHARES)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# buckets


def best_buckets(sizes, backward, alpha, beta):
    count = len(sizes)
    ready = [sum(backward[k:]) for k in range(count)]
    ends: list[tuple[float, list[list[int]]]] = [(0.0, [])] * (count + 1)
    for k in range(count - 1, -1, -1):
        ends[k] = min(
            (max(ends[j][0], ready[k]) + alpha + sum(sizes[k:j]) * beta, [*ends[j][1], list(range(j - 1, k - 1, -1))])
            for j in range(k + 1, count + 1)
        )
    return ends[0][1]


def test_the_reference_buckets_pass():
    assert check(best_buckets, tasks.BUCKETS)


@pytest.mark.parametrize("case", tasks.BUCKETS.cases)
def test_the_best_time_is_that_of_all_ways_to_cut(case):
    """By the simulator, for every way."""
    layers = list(range(len(case[0]) - 1, -1, -1))
    times = []
    for count in range(len(layers)):
        for places in combinations(range(1, len(layers)), count):
            ends = [0, *places, len(layers)]
            times.append(tasks.time_with([layers[a:b] for a, b in zip(ends, ends[1:])], *case))  # noqa: B905, RUF007
    assert min(times) == pytest.approx(tasks.best_time(*case), rel=1e-12)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda sizes, *_: [[k] for k in reversed(range(len(sizes)))], "latencies alone are 18 ms", "costs alpha"),
        (lambda sizes, *_: [list(range(len(sizes)))], "from layer 5 down to 0", ""),
        (lambda sizes, *_: None, "gives None", "return"),
    ],
)
def test_other_buckets_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.BUCKETS)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# a plan


def test_the_reference_plan_passes():
    verdict = check(lambda: "dp=4 microbatches=2 bucket=1 overlap=priority", tasks.FOUR_DEVICES)
    assert verdict
    assert "0.569 s of at most 0.6 s, 156.8 MiB of at most 160.0 MiB" in verdict.reason
    assert check("dp=4 microbatches=2 bucket=1 overlap=priority", tasks.FOUR_DEVICES)


@pytest.mark.parametrize(
    ("words", "reason", "hint"),
    [
        ("dp=4", "needs 257.3 MiB on rank 0", "too much of: activations 201.1 MiB"),
        ("dp=2 pp=2", "cannot be", "pp=1"),
        (4, "4 is no plan", "return its words"),
    ],
)
def test_other_plans_are_told_why(words, reason, hint):
    verdict = check(lambda: words, tasks.FOUR_DEVICES)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
