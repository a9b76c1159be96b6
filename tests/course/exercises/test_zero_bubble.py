"""Tasks of lesson 11: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

import minipar
from minipar import BackwardInput, BackwardWeight, Forward
from minipar.program import Action
from minipar.strategies.schedules.list_scheduler import list_schedule
from minipar_course.exercise import check
from minipar_course.exercises.zero_bubble import HALVES, TWO_CHUNKS, ZB_H1

Generator = Callable[..., Any]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Generator]:
    """`@minipar.schedule`, undone after the test."""
    from minipar.strategies.schedules import registry

    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    return lambda answer, **options: minipar.schedule("answer", **options)(answer)


# halves


def input_half(w: Tensor, y: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    left = grad_y * (1 - y**2)
    return left @ w, left


def weight_half(x: Tensor, left: Tensor) -> Tensor:
    return left.T @ x


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        ((lambda w, y, g: (g * (1 - y**2)) @ w, weight_half), "gives no pair", "return grad_x, left"),
        ((input_half, lambda x, left: left.T @ x * float("nan")), "other numbers than autograd's", "grad_z.T @ x"),
    ],
)
def test_wrong_halves(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, HALVES)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# ZB-H1


def in_halves(waiting: Callable[[int, int], int]) -> Generator:
    def answer(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
        ahead, late = min(stages - 1 - rank, microbatches), waiting(rank, microbatches)
        yield from map(Forward, range(ahead))
        for i in range(microbatches):
            if ahead + i < microbatches:
                yield Forward(ahead + i)
            yield BackwardInput(i)
            if i >= late:
                yield BackwardWeight(i - late)
        yield from map(BackwardWeight, range(max(0, microbatches - late), microbatches))

    return answer


def weights_missing(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    return (a for a in in_halves(lambda d, m: d)(rank, stages, microbatches) if not isinstance(a, BackwardWeight))


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (
            in_halves(lambda d, m: m),
            "it can run, but takes 30 units; the target is 27",
            "weight halves of 5 micro-batches could run there",
        ),
        (weights_missing, "", "yields BackwardWeight(0) never"),
    ],
)
def test_wrong_zero_bubbles(register: Callable[..., Generator], answer: Generator, reason: str, hint: str) -> None:
    verdict = check(register(answer), ZB_H1)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# two chunks


def without_limits(rank: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    found = list_schedule(stages, microbatches, ahead=lambda _: 99, waiting=lambda _: 99, chunks=chunks)
    return iter(found[rank])


@pytest.mark.parametrize(
    ("answer", "chunks", "reason"),
    [
        (without_limits, 2, "activations; the target is 5"),
        (in_halves(lambda d, m: d), 1, "it can run, but takes 27 units; the target is 26"),
    ],
)
def test_wrong_limits(register: Callable[..., Generator], answer: Generator, chunks: int, reason: str) -> None:
    verdict = check(register(answer, chunks=chunks), TWO_CHUNKS)
    assert not verdict
    assert reason in verdict.reason
