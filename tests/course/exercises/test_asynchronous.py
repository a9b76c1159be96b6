"""Tasks of lesson 12: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from minipar import Forward, strategies
from minipar_course.exercise import check
from minipar_course.exercises.asynchronous import LATE_SGD, NO_SCHEDULE, VERSION_OF_2BW

# the version of a forward


def newest_there(rank: int, ranks: int, i: int, m: int, newest: int) -> int:
    return newest


@pytest.mark.parametrize(
    ("rule", "reason", "hint"),
    [
        (lambda d, p, i, m, newest: max(0, i // m - 2), "gradients are up to 2 updates late", "one update late"),
        (7, "7 is no function", "def version("),
    ],
)
def test_wrong_rules_of_versions(rule: Any, reason: str, hint: str) -> None:
    verdict = check(rule, VERSION_OF_2BW)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def test_a_rule_of_versions_changes_nothing_that_is_registered() -> None:
    before = strategies.schedules()
    check(newest_there, VERSION_OF_2BW)
    assert strategies.schedules() == before


# late gradients by hand

Gradient = Callable[[Tensor, int], Tensor]


def late_sgd(gradient: Gradient, w: Tensor, lr: float, late: int, updates: int) -> Tensor:
    history = [w]
    for i in range(updates):
        history.append(history[-1] - lr * gradient(history[max(0, i - late)], i))
    return history[-1]


def plain_sgd(gradient: Gradient, w: Tensor, lr: float, late: int, updates: int) -> Tensor:
    return late_sgd(gradient, w, lr, 0, updates)


def one_batch(gradient: Gradient, w: Tensor, lr: float, late: int, updates: int) -> Tensor:
    return late_sgd(lambda w, i: gradient(w, 0), w, lr, late, updates)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (one_batch, "your weights are not the pipeline's", "each once and in this order"),
        (lambda gradient, w, lr, late, updates: plain_sgd(gradient, w, lr, 0, updates) * float("nan"), "not the", ""),
    ],
)
def test_wrong_late_gradients(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, LATE_SGD)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# no schedule


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda *state: None, "everybody waits: rank 0 has done 0 of 60", "first and last too"),
        (lambda d, p, n, k, f, b, o, g: Forward(f) if f < n and (d or f - b < k) else None, "has not arrived", "None"),
    ],
)
def test_wrong_rules_for_a_rank(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, NO_SCHEDULE)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint
