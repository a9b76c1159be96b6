"""Tasks of lesson 10: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import minipar
from minipar import Backward, Forward
from minipar.program import Action
from minipar.strategies.schedules.one_f_one_b import warm_up_then_alternate
from minipar_course.exercise import check
from minipar_course.exercises.pipelines import BREADTH_FIRST, SLOW_LINKS

Generator = Callable[..., Any]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Generator]:
    """`@minipar.schedule`, undone after the test."""
    from minipar.strategies.schedules import registry

    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    return lambda answer, **options: minipar.schedule("answer", **options)(answer)


# two chunks


def one_chunk_only(rank: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    yield from map(Forward, range(microbatches))
    yield from map(Backward, range(microbatches))


def chunk_by_chunk(rank: int, stages: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """Micro-batch by micro-batch through both chunks: rank 0 waits for each to come round."""
    yield from (Forward(i, c) for i in range(microbatches) for c in range(chunks))
    yield from (Backward(i, c) for i in range(microbatches) for c in reversed(range(chunks)))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (one_chunk_only, "rank 0 never yields Forward(0, 1)"),
        (chunk_by_chunk, "units; the target is 28.5"),
    ],
)
def test_wrong_orders_of_chunks(register: Callable[..., Generator], answer: Generator, reason: str) -> None:
    verdict = check(register(answer, chunks=2), BREADTH_FIRST)
    assert not verdict
    assert reason in verdict.reason


# slow links


def with_warm_up(warm_up: Callable[[int, int], int]) -> Generator:
    return lambda rank, stages, microbatches: warm_up_then_alternate(warm_up(rank, stages), microbatches)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (with_warm_up(lambda d, p: 2 * (p - 1 - d)), "it can run, but rank 0 holds 7 activations; the target is 5"),
        (with_warm_up(lambda d, p: min(2 * (p - 1 - d), p)), "it can run, but takes 44 units; the target is 37"),
    ],
)
def test_too_little_or_too_much_slack(register: Callable[..., Generator], answer: Generator, reason: str) -> None:
    verdict = check(register(answer), SLOW_LINKS)
    assert not verdict
    assert reason in verdict.reason
    assert verdict.hint
