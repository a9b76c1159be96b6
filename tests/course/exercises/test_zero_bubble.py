"""Tasks of lesson 11: references pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

import minipar
from minipar import Backward, BackwardInput, BackwardWeight, Forward, strategies
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


def without_tanh(w: Tensor, y: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    return grad_y @ w, grad_y


def leaves_grad_y(w: Tensor, y: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    return input_half(w, y, grad_y)[0], grad_y


def everything_left(w: Tensor, y: Tensor, grad_y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return input_half(w, y, grad_y)[0], {"y": y, "grad_y": grad_y}


def weight_half_again(x: Tensor, left: dict[str, Tensor]) -> Tensor:
    return (left["grad_y"] * (1 - left["y"] ** 2)).T @ x


def leaves_more(w: Tensor, y: Tensor, grad_y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    grad_x, left = input_half(w, y, grad_y)
    return grad_x, (left, w)


def weight_half_twice(x: Tensor, left: tuple[Tensor, Tensor]) -> Tensor:
    return left[0].T @ x + 0 * (x @ left[1].T).sum()


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
        ((input_half, stub), "nothing is written here yet", "in the place of the `raise`"),
        (input_half, "that is not a pair of functions", "exercise.check((input_half, weight_half), ...)"),
        ((without_tanh, weight_half), "grad_x has the right shape, but other numbers", "its derivative is 1 - y ** 2"),
        ((leaves_grad_y, weight_half), "grad_w has the right shape, but other numbers", "that was made of grad_y"),
        ((input_half, lambda x, left: x.T @ left), "grad_w has the shape (3, 4); it must be (4, 3)", "its transpose"),
        ((lambda w, y, g: (g * (1 - y**2)) @ w, weight_half), "gives no pair", "return grad_x, left"),
        ((lambda w, y, g: (0, 0), weight_half), "grad_x is 0, not a tensor", "grad_z @ w"),
        ((lambda w, y, g: (w @ g, g), weight_half), "your input half raised RuntimeError", "mend that line"),
        ((everything_left, weight_half_again), "computes again what your input half knew", "leave the gradient behind"),
        ((leaves_more, weight_half_twice), "computes again what your input half knew", "one product is all"),
        ((input_half, lambda x, left: None), "grad_w is None, not a tensor", "grad_z.T @ x"),
        ((input_half, lambda x, left: left * float("nan")), "grad_w has the shape (5, 4)", "grad_z.T @ x"),
        ((input_half, lambda x, left: left.T @ x * float("nan")), "other numbers than autograd's", "grad_z.T @ x"),
    ],
)  # fmt: skip
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


def whole(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    ahead = min(stages - 1 - rank, microbatches)
    yield from map(Forward, range(ahead))
    for i in range(microbatches):
        if ahead + i < microbatches:
            yield Forward(ahead + i)
        yield Backward(i)


def test_zb_h1(register: Callable[..., Generator]) -> None:
    verdict = check(register(in_halves(lambda d, m: d)), ZB_H1)
    assert verdict
    assert "time 27 of at most 27, 4 activations of at most 4" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", ""),
        (in_halves(lambda d, m: 0), "it can run, but takes 30 units; the target is 27", "weight halves come too early"),
        (
            in_halves(lambda d, m: m),
            "it can run, but takes 30 units; the target is 27",
            "weight halves of 5 micro-batches could run there",
        ),
        (
            in_halves(lambda d, m: 2 * d, warm_up=2),
            "holds 7 activations; the target is 4",
            "the first forward too many",
        ),
        (
            whole,
            "it can run, but takes 33 units; the target is 27",
            "rank 0 waits 3 units more than it must before `B 0 mb0`",
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
        (with_limits(more, None), 2, "units; the target is 26"),
        (with_limits(lambda p: 99, lambda p: 99), 2, "activations; the target is 5"),
        (with_limits(lambda p: 1, lambda p: 0), 2, "its limits stop it"),
        (in_halves(lambda d, m: d), 1, "it can run, but takes 27 units; the target is 26"),
    ],
)
def test_wrong_limits(register: Callable[..., Generator], answer: Generator, chunks: int, reason: str) -> None:
    verdict = check(register(answer, chunks=chunks), TWO_CHUNKS)
    assert not verdict
    assert reason in verdict.reason


def test_minipars_own_is_no_answer() -> None:
    assert "is minipar's own" in check(strategies.find("zb-v").generate, TWO_CHUNKS).reason
