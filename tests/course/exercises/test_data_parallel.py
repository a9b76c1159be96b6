"""The exercises of lesson 06: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from itertools import combinations

import pytest

from minipar_course.exercise import check
from minipar_course.exercises import data_parallel as tasks

# rows


def in_runs(rank: int, ranks: int, size: int) -> range:
    return range(size * rank // ranks, size * (rank + 1) // ranks)


def rounded_down(rank, ranks, size):
    return range(rank * (size // ranks), (rank + 1) * (size // ranks))


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (rounded_down, "10 rows on 4 ranks: nobody trains row 8", "that do not divide evenly"),
        (lambda rank, ranks, size: in_runs(rank, 4, 10), "7 rows on 1 rank: nobody trains row 2", "evenly"),
    ],
)
def test_other_shares_are_told_why(answer, reason, hint):
    verdict = check(answer, tasks.SHARES)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# buckets


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


# a plan


@pytest.mark.parametrize(
    ("words", "reason", "hint"),
    [
        ("dp=4", "needs 264.8 MiB on rank 0", "too much of: activations 208.6 MiB"),
        ("dp=2 pp=2", "cannot be", "pp=1"),
        (4, "4 is no plan", "return its words"),
    ],
)
def test_other_plans_are_told_why(words, reason, hint):
    verdict = check(lambda: words, tasks.FOUR_DEVICES)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
