"""Lesson 01, with formulas and schedules: plausible mistakes fail with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import minipar
from minipar import Backward, Forward, strategies
from minipar.program import Action
from minipar_course.exercise import GPIPE_TIME, Target, Verdict, check
from minipar_course.exercises import programs

TASK = programs.TURNS
SMALL = programs.SMALL_DEVICES
Generator = Callable[[int, int, int], Any]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Generator], Generator]:
    """`@minipar.schedule`, undone after the test."""
    from minipar.strategies.schedules import registry

    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    return minipar.schedule("answer")


def alternating(warm_up: Callable[[int, int], int]) -> Generator:
    def answer(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
        first = min(warm_up(rank, stages), microbatches)
        for i in range(first):
            yield Forward(i)
        for i in range(first, microbatches):
            yield Forward(i)
            yield Backward(i - first)
        for i in range(microbatches - first, microbatches):
            yield Backward(i)

    return answer


def waves(width: int) -> Generator:
    def answer(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
        for start in range(0, microbatches, width):
            wave = range(start, min(start + width, microbatches))
            yield from map(Forward, wave)
            yield from map(Backward, wave)

    return answer


# verdicts


def test_a_verdict_shows_itself_and_is_true_only_if_passed() -> None:
    assert Verdict(True, "all right")
    assert repr(Verdict(True, "all right")) == "passed: all right"
    wrong = Verdict(False, "too slow", "look at rank 0", "a\nb")
    assert not wrong
    assert repr(wrong) == "not yet: too slow\n  a\n  b\nhint: look at rank 0"


# formulas


def test_a_wrong_formula_is_shown_the_smallest_case_that_it_misses() -> None:
    verdict = check(lambda p, m, f, b: m * p**2 * (f + b), GPIPE_TIME)
    assert verdict.reason == (
        "for stages=3, microbatches=1, forward=1, backward=1 your function gives 18, the simulator 6"
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (33, "33 is one number; the answer is a function"),
        (lambda p, m, f, b: "33", "gives '33'"),
        (lambda p, m, f, b: 1 / 0, "raised ZeroDivisionError: division by zero"),
    ],
)
def test_answers_that_are_no_formula(answer: Any, words: str) -> None:
    verdict = check(answer, GPIPE_TIME)
    assert not verdict
    assert words in verdict.reason
    assert verdict.hint


# schedules


def test_a_target_may_leave_time_or_memory_open(register: Callable[[Generator], Generator]) -> None:
    everything = register(waves(8))
    assert check(everything, Target(4, 8))
    assert check(everything, Target(4, 8, time=33))
    assert not check(everything, Target(4, 8, activations=7))
    assert not check(everything, Target(4, 8, time=33, backward=3))  # now a step takes 44
    assert check(everything, Target(4, 8, time=44, backward=3))


def test_too_slow_names_the_longest_wait(register: Callable[[Generator], Generator]) -> None:
    verdict = check(register(waves(4)), TASK)
    assert not verdict
    assert verdict.reason == "it can run, but takes 42 units; the target is 33"
    assert verdict.hint.startswith("rank 0 waits longest, 9 units before `B 0 mb0`")
    verdict = check(register(alternating(lambda rank, stages: min(1, stages - 1 - rank))), SMALL)
    assert verdict.reason == "it can run, but takes 69 units; the target is 60"


def test_too_much_memory_names_the_forward(register: Callable[[Generator], Generator]) -> None:
    verdict = check(register(alternating(lambda rank, stages: 2 * (stages - 1 - rank))), TASK)
    assert not verdict
    assert verdict.reason == "it can run, but rank 0 holds 7 activations; the target is 4"
    assert verdict.hint.startswith("`F 0 mb4` is the first forward too many")


def only(*actions: Action) -> Generator:
    return lambda rank, stages, microbatches: iter(actions)


def unknown_name(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    for i in range(microbatch):  # type: ignore[name-defined]  # noqa: F821
        yield Forward(i)


def twice(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
    for i in (*range(microbatches), 0):
        yield Forward(i)
    yield from map(Backward, range(microbatches))


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (only(), "rank 0 never yields Forward(0)", "rank 0 yields nothing"),
        (twice, "rank 0: Forward(0) comes twice, as actions 0 and 8", "rank 0 yields Forward(0) 2 times"),
        (alternating(lambda rank, stages: rank), "wait for each other in a circle, 0 -> 1 -> 0", "read each line"),
    ],
)
def test_schedules_that_cannot_run(
    register: Callable[[Generator], Generator], answer: Generator, reason: str, hint: str
) -> None:
    verdict = check(register(answer), TASK)
    assert not verdict
    assert reason in verdict.reason
    assert "\n" not in verdict.reason
    assert hint in verdict.hint


def test_what_an_answer_raised_is_shown_with_its_line(register: Callable[[Generator], Generator]) -> None:
    verdict = check(register(unknown_name), TASK)
    assert "for i in range(microbatch)" in verdict.evidence
    assert "line " in verdict.evidence


def test_a_deadlock_shows_the_circle(register: Callable[[Generator], Generator]) -> None:
    verdict = check(register(alternating(lambda rank, stages: rank)), TASK)
    assert "rank 1 instruction" in verdict.evidence
    assert "waits for" in verdict.evidence


def test_a_schedule_for_one_size_only_does_not_pass(register: Callable[[Generator], Generator]) -> None:
    right = alternating(lambda rank, stages: stages - 1 - rank)
    verdict = check(register(lambda rank, stages, microbatches: right(rank, 4, 8)), TASK)
    assert not verdict
    assert "right for 4 stages and 8 micro-batches, but with 1 stage and 1 micro-batch" in verdict.reason
    assert "use `stages` and `microbatches`, not 4 and 8" in verdict.hint


def test_what_is_not_a_registered_schedule(register: Callable[[Generator], Generator]) -> None:
    def unregistered(rank: int, stages: int, microbatches: int) -> Iterator[Action]:
        yield Forward(0)

    for answer, words in [
        (unregistered, "a function is not a registered schedule function"),
        ("1f1b", "schedule '1f1b' is not a registered schedule function"),
        (None, "a NoneType is not"),
        (strategies.find("1f1b").generate, "1f1b is minipar's own"),
    ]:
        verdict = check(answer, TASK)
        assert not verdict
        assert words in verdict.reason


def test_a_check_registers_nothing(register: Callable[[Generator], Generator]) -> None:
    before = [known.name for known in strategies.schedules()]
    check(register(waves(2)), SMALL)
    assert [known.name for known in strategies.schedules()] == [*before, "answer"]


def test_schedules_of_chunks_and_halves(register):
    """Judged like others, and hints know the halves."""

    def mine(rank, stages, microbatches):
        yield from strategies.find("zb-h1").generate(rank, stages, microbatches)

    register(mine)
    for target, passed in ((Target(4, 8, time=27.0), True), (Target(4, 8, time=26.0), False)):
        assert check(mine, target).passed is passed
    assert "holds 4 activations" in check(mine, Target(4, 8, activations=3)).reason

    def half(rank, stages, microbatches):
        for i in range(microbatches):
            yield Forward(i)
            yield minipar.BackwardInput(i)

    register(half)
    assert "yields BackwardWeight(0) never" in check(half, Target(2, 3)).hint

    def loop(rank, stages, microbatches, chunks):
        yield from strategies.find("looped-bfs").generate(rank, stages, microbatches, chunks)

    minipar.schedule("answer", chunks=2)(loop)
    assert check(loop, Target(4, 8, time=28.5)).passed
