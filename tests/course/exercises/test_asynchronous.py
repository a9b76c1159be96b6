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
        (lambda s, d, p: (d, d + 1), "late('pipedream', 0, 4) gives (0, 1); right is (3, 4)", "the first rank"),
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


Rule = Callable[[int, int, int, int, int], Any]


def newest_there(rank: int, ranks: int, i: int, m: int, newest: int) -> int:
    return newest


@pytest.mark.parametrize(
    ("rule", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (newest_there, "micro-batch 7 of step 1 uses version 1 on rank 0", "the same version"),
        (lambda d, p, i, m, newest: i // m, "asks for version 1; there are 0 updates", "cannot wait for an update"),
        (lambda d, p, i, m, newest: 0, "uses version 0 on rank 0; gradients are up to 3 updates late", "two versions"),
        (lambda d, p, i, m, newest: max(0, i // m - 2), "gradients are up to 2 updates late", "one update late"),
        (lambda d, p, i, m, newest: -1, "your rule gives -1", "counts updates"),
        (lambda d, p, i, m, newest: None, "your rule raised TypeError", ""),
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


def updates_the_old(gradient: Gradient, w: Tensor, lr: float, late: int, updates: int) -> Tensor:
    history = [w]
    for i in range(updates):
        old = history[max(0, i - late)]
        history.append(old - lr * gradient(old, i))
    return history[-1]


def one_later(gradient: Gradient, w: Tensor, lr: float, late: int, updates: int) -> Tensor:
    return late_sgd(gradient, w, lr, late + 1, updates)


def one_batch(gradient: Gradient, w: Tensor, lr: float, late: int, updates: int) -> Tensor:
    return late_sgd(lambda w, i: gradient(w, 0), w, lr, late, updates)


def test_late_gradients_by_hand_are_those_of_a_pipeline() -> None:
    assert check(late_sgd, LATE_SGD)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (plain_sgd, "with 3 ranks, so gradients 2 late, and 8 updates, your weights are not the", "no update has come"),
        (updates_the_old, "your weights are not the pipeline's", "is applied to the newest ones"),
        (one_later, "your weights are not the pipeline's", "after max(0, i - late) updates"),
        (one_batch, "your weights are not the pipeline's", "each once and in this order"),
        (lambda gradient, w, lr, late, updates: None, "gives no weights", "return w"),
        (lambda gradient, w, lr, late, updates: w * float("nan"), "your weights are not the pipeline's", "each once"),
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


def forwards_first(rank: int, ranks: int, total: int, in_flight: int, f: int, b: int, o: int, g: int) -> Action | None:
    if f < total and (f - b < min(in_flight, ranks) if rank == 0 else f < o):
        return Forward(f)
    return Backward(b) if b < f and (rank == ranks - 1 or b < g) else None


def no_end(rank: int, ranks: int, total: int, in_flight: int, f: int, b: int, o: int, g: int) -> Action | None:
    """The last rank waits for gradients that nobody sends."""
    return rule(rank, ranks + 1, total, in_flight, f, b, o, g)


def too_few(rank: int, ranks: int, total: int, in_flight: int, f: int, b: int, o: int, g: int) -> Action | None:
    return rule(rank, ranks, total, min(2, in_flight), f, b, o, g)


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
        (choose, "that is minipar's own rule", "write it yourself"),
        (lambda *state: choose(*state), "keep up to [8, 8, 5, 1] activations and are up to [7, 7, 4, 0]", "may* have"),
        (forwards_first, "it takes 103 units, of which ranks idle", "who waits although something is there?"),
        (no_end, "everybody waits: rank 0 has done 5 of 60", "first and last too"),
        (too_few, "the target is 99", "who waits"),
        (lambda *state: None, "everybody waits: rank 0 has done 0 of 60", "first and last too"),
        (lambda *state: Forward(state[4]) if state[0] == 0 else None, "8 are under way already", "if fewer are"),
        (lambda *state: Backward(state[5]), "Backward(0) before its forward", "compare backwards with forwards"),
        (lambda *state: Forward(3), "its next forward is 0, not 3", "links keep their order"),
        (lambda *state: "F0", "your rule gives 'F0'", "Forward(i), Backward(i), or None"),
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
