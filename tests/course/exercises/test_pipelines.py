"""Tasks of lesson 10: references pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import minipar
from minipar import Backward, Forward
from minipar.program import Action
from minipar.strategies.schedules.one_f_one_b import warm_up_then_alternate
from minipar_course.exercise import check
from minipar_course.exercises.pipelines import BREADTH_FIRST, FEWEST, SLOW_LINKS

Generator = Callable[..., Any]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Generator]:
    """`@minipar.schedule`, undone after the test."""
    from minipar.strategies.schedules import registry

    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    return lambda answer, **options: minipar.schedule("answer", **options)(answer)


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


# how many micro-batches


def fewest(stages: int, bubble: float) -> int:
    return max(1, math.ceil((stages - 1) * (1 - bubble) / bubble))


def test_the_fewest_microbatches() -> None:
    assert check(fewest, FEWEST)
    assert check(lambda p, b: float(fewest(p, b)), FEWEST), "a whole number, whatever its type"


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (stub, "nothing is written here yet", "in the place of the `raise`"),
        (lambda p, b: 1, "gives 1; with so many the bubble is 75.0% of the total, more than 25.0%", "solve that for m"),
        (9, "9 is no function", "def fewest(stages, bubble)"),
    ],
)
def test_wrong_numbers_of_microbatches(answer: Any, reason: str, hint: str) -> None:
    verdict = check(answer, FEWEST)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# two chunks


def breadth_first(order: Callable[[range], Any]) -> Generator:
    def answer(rank: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
        for c in range(chunks):
            yield from (Forward(i, c) for i in range(microbatches))
        for c in order(range(chunks)):
            yield from (Backward(i, c) for i in range(microbatches))

    return answer


def one_chunk_only(rank: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    yield from map(Forward, range(microbatches))
    yield from map(Backward, range(microbatches))


def chunk_by_chunk(rank: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Micro-batch by micro-batch through both chunks: rank 0 waits for each to come round."""
    yield from (Forward(i, c) for i in range(microbatches) for c in range(chunks))
    yield from (Backward(i, c) for i in range(microbatches) for c in reversed(range(chunks)))


def test_breadth_first(register: Callable[..., Generator]) -> None:
    verdict = check(register(breadth_first(reversed), chunks=2), BREADTH_FIRST)
    assert verdict
    assert "time 28.5 of at most 28.5" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (stub, "nothing is written here yet"),
        (one_chunk_only, "rank 0 never yields Forward(0, 1)"),
        (chunk_by_chunk, "units; the target is 28.5"),
    ],
)
def test_wrong_orders_of_chunks(register: Callable[..., Generator], answer: Generator, reason: str) -> None:
    verdict = check(register(answer, chunks=2), BREADTH_FIRST)
    assert not verdict
    assert reason in verdict.reason


def test_without_chunks_it_is_too_slow(register: Callable[..., Generator]) -> None:
    def gpipe(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
        return one_chunk_only(rank, stages, microbatches, 1)

    assert check(register(gpipe), BREADTH_FIRST).reason == "it can run, but takes 33 units; the target is 28.5"


# slow links


def with_warm_up(warm_up: Callable[[int, int], int]) -> Generator:
    return lambda rank, stages, microbatches: warm_up_then_alternate(warm_up(rank, stages), microbatches)


def test_one_forward_more_hides_a_hop(register: Callable[..., Generator]) -> None:
    verdict = check(register(with_warm_up(lambda d, p: p - d if d < p - 1 else 0)), SLOW_LINKS)
    assert verdict
    assert "time 37 of at most 37, 5 activations of at most 5" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (stub, "nothing is written here yet"),
        (with_warm_up(lambda d, p: 2 * (p - 1 - d)), "it can run, but rank 0 holds 7 activations; the target is 5"),
        (with_warm_up(lambda d, p: min(2 * (p - 1 - d), p)), "it can run, but takes 44 units; the target is 37"),
    ],
)
def test_too_little_or_too_much_slack(register: Callable[..., Generator], answer: Generator, reason: str) -> None:
    verdict = check(register(answer), SLOW_LINKS)
    assert not verdict
    assert reason in verdict.reason
    assert verdict.hint
