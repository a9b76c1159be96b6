"""Tasks of lesson 11: references pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

import minipar
from minipar import BackwardInput, BackwardWeight, Forward, strategies
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


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


# halves


def input_half(w: Tensor, y: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    left = grad_y * (1 - y**2)
    return left @ w, left


def weight_half(x: Tensor, left: Tensor) -> Tensor:
    return left.T @ x


def test_what_is_left_may_have_any_form() -> None:
    assert check((lambda w, y, g: (input_half(w, y, g)[0], [(g * (1 - y**2)).T]), lambda x, left: left[0] @ x), HALVES)


def test_two_halves_are_the_backward() -> None:
    verdict = check((input_half, weight_half), HALVES)
    assert verdict
    assert verdict.reason == "both halves together are autograd's backward, in 3 sizes"


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        ((stub, stub), "nothing is written here yet", "in the place of the `raise`"),
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


def in_halves(waiting: Callable[[int, int], int], warm_up: int = 1) -> Generator:
    def answer(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
        ahead, late = min(warm_up * (stages - 1 - rank), microbatches), waiting(rank, microbatches)
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


def test_zb_h1(register: Callable[..., Generator]) -> None:
    verdict = check(register(in_halves(lambda d, m: d)), ZB_H1)
    assert verdict
    assert "time 27 of at most 27, 4 activations of at most 4" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
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


def with_limits(ahead: Callable[[int], int], waiting: Callable[[int], int] | None) -> Generator:
    def answer(rank: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
        late = None if waiting is None else (lambda _: waiting(stages))
        found = list_schedule(stages, microbatches, ahead=lambda _: ahead(stages), waiting=late, chunks=chunks)
        return iter(found[rank])

    return answer


def more(stages: int) -> int:
    return max(2, 2 * stages - 1)


def test_two_chunks_and_halves(register: Callable[..., Generator]) -> None:
    verdict = check(register(with_limits(more, lambda p: p - 1), chunks=2), TWO_CHUNKS)
    assert verdict
    assert "time 26 of at most 26, 4.5 activations of at most 5" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "chunks", "reason"),
    [
        (stub, 2, "nothing is written here yet"),
        (with_limits(lambda p: 99, lambda p: 99), 2, "activations; the target is 5"),
        (in_halves(lambda d, m: d), 1, "it can run, but takes 27 units; the target is 26"),
    ],
)
def test_wrong_limits(register: Callable[..., Generator], answer: Generator, chunks: int, reason: str) -> None:
    verdict = check(register(answer, chunks=chunks), TWO_CHUNKS)
    assert not verdict
    assert reason in verdict.reason


def test_minipars_own_is_no_answer() -> None:
    assert "is minipar's own" in check(strategies.find("zb-v").generate, TWO_CHUNKS).reason
