"""Tasks of lesson 12: references pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from minipar import Backward, Forward, strategies
from minipar.program import Action
from minipar.strategies.schedules.ampnet import choose
from minipar_course.exercise import check
from minipar_course.exercises.asynchronous import LATE, LATE_SGD, NO_SCHEDULE, VERSION_OF_2BW, LocalRule


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


# how late


def late(schedule: str, rank: int, ranks: int) -> tuple[int, int]:
    if schedule == "pipedream-2bw":
        return 1, 2
    ahead = ranks - 1 if schedule == "pipedream-vertical" else ranks - 1 - rank
    return ahead, ahead + 1


def test_how_late_and_how_many_versions() -> None:
    assert check(late, LATE)
    assert check(lambda *case: list(late(*case)), LATE)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (lambda s, d, p: (p - 1 - d, p - d), "late('pipedream-vertical', 1, 4) gives (2, 3)", "the version of rank 0"),
        (lambda s, d, p: late(s, d, p)[0], "late('pipedream', 0, 4) gives 3; right is (3, 4)", "which version does F"),
    ],
)
def test_wrong_staleness(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, LATE)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# the version of a forward


def of_2bw(rank: int, ranks: int, microbatch: int, microbatches: int, newest: int) -> int:
    return max(0, microbatch // microbatches - 1)


def test_the_rule_of_2bw() -> None:
    verdict = check(of_2bw, VERSION_OF_2BW)
    assert verdict
    assert "every gradient is one update late, with two versions on each rank" in verdict.reason


def newest_there(rank: int, ranks: int, i: int, m: int, newest: int) -> int:
    return newest


@pytest.mark.parametrize(
    ("rule", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
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


def test_late_gradients_by_hand_are_those_of_a_pipeline() -> None:
    assert check(late_sgd, LATE_SGD)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
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


def rule(
    rank: int, ranks: int, total: int, in_flight: int, forwards: int, backwards: int, outputs: int, gradients: int
) -> Action | None:
    if backwards < forwards and (rank == ranks - 1 or backwards < gradients):
        return Backward(backwards)
    if forwards < total and (
        forwards - backwards < min(in_flight, ranks) if rank == 0 else forwards < outputs
    ):  # fmt: skip
        return Forward(forwards)
    return None


def test_a_rule_for_a_rank() -> None:
    verdict = check(rule, NO_SCHEDULE)
    assert verdict
    assert "at most 99 units, 4 activations on a rank, 3 updates late" in verdict.reason
    loose = LocalRule(ranks=4, total=30, in_flight=8, time=99, activations=8, late=7)
    assert check(lambda *state: choose(*state), loose), "minipar's own, which starts as many as it may"


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (lambda *state: None, "everybody waits: rank 0 has done 0 of 60", "first and last too"),
        (lambda d, p, n, k, f, b, o, g: Forward(f) if f < n and (d or f - b < k) else None, "has not arrived", "None"),
    ],
)
def test_wrong_rules_for_a_rank(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, NO_SCHEDULE)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def test_a_rule_must_end_in_other_sizes_too() -> None:
    def only_four(rank: int, ranks: int, *state: int) -> Action | None:
        return rule(rank, 4, *state)  # type: ignore[call-arg]

    verdict = check(only_four, NO_SCHEDULE)
    assert "with 2 ranks, 5 micro-batches and in_flight=1, everybody waits" in verdict.reason
