"""The exercises of lesson 03: reference solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minipar.costs.recomputation import time
from minipar.costs.reversal import rotor
from minipar_course.exercise import check
from minipar_course.exercises import checkpointing as tasks
from minipar_course.exercises.kinds.order import B, F, MiB, R, ms


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


@pytest.mark.parametrize("task", [tasks.LENGTH, tasks.SEGMENTS, tasks.TWELVE])
def test_a_stub_is_told_that_nothing_is_written(task):
    verdict = check(stub, task)
    assert not verdict
    assert "nothing is written here yet" in verdict.reason


def length(layers, output, saved):
    return max(1, min(layers, round(math.sqrt(layers * output / (output + saved)))))


def test_the_best_length():
    assert check(length, tasks.LENGTH)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda n, output, saved: round(math.sqrt(n)), "gives 8, with a peak of 40 MiB; segments of 4", "`saved`"),
        (lambda n, output, saved: n, "gives 64, with a peak of 65 MiB", "where is that least?"),
        (lambda n, output, saved: 0, "gives 0; a length", "least"),
    ],
)
def test_wrong_lengths(answer, reason, hint):
    verdict = check(answer, tasks.LENGTH)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def backward_in(layers, starts, again=lambda start: start > 0):
    """Forward, then segments from `starts`, the last one first; `again(k)`: the k-th from the end runs again."""
    for layer in range(layers):
        yield F, layer
    end = layers
    for k, start in enumerate(reversed(starts)):
        if again(k):
            yield from ((R, layer) for layer in range(start, end))
        yield from ((B, layer) for layer in reversed(range(start, end)))
        end = start


def segments(layers, length):
    return backward_in(layers, range(0, layers, length))


def test_segments():
    verdict = check(segments, tasks.SEGMENTS)
    assert verdict
    assert "2480 ms, at most 16 MiB (and 3 other sizes)" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (
            lambda n, s: backward_in(n, range(0, n, s), lambda k: True),
            "takes 2560 ms; the target is 2480 ms",
            "right after its own forward",
        ),
        (lambda n, s: backward_in(n, range(n)), "can run, but", "MiB"),
        (lambda n, s: [*segments(n, s)][:-1], "cannot run", "(B, 0) comes 0 times"),
    ],
)
def test_wrong_segments(answer, reason, hint):
    verdict = check(answer, tasks.SEGMENTS)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def triangle(layers):
    k = 1
    while k * (k + 1) // 2 < layers:
        k += 1
    starts, start = [], 0
    while start < layers:
        starts.append(start)
        start, k = start + k, k - 1
    return backward_in(layers, starts)


def test_twelve():
    assert check(triangle, tasks.TWELVE)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda n: segments(n, 8), "needs 16 MiB; the target is 12 MiB"),
        (lambda n: backward_in(n, [0]), "needs 65 MiB"),
        (lambda n: backward_in(n, range(0, n, 11)), "needs 16 MiB"),
    ],
)
def test_wrong_ways_to_twelve(answer, reason):
    verdict = check(answer, tasks.TWELVE)
    assert not verdict
    assert reason in verdict.reason


def test_in_twelve_by_running_layers_three_times_is_too_slow():
    def halves(start, stop):
        if stop - start <= 8:
            yield from ((R, layer) for layer in range(start, stop))
            yield from ((B, layer) for layer in reversed(range(start, stop)))
            return
        middle = (start + stop) // 2
        yield from ((R, layer) for layer in range(start, middle))
        yield from halves(middle, stop)
        yield from halves(start, middle)

    verdict = check(lambda n: [*((F, k) for k in range(n)), *halves(0, n)], tasks.TWELVE)
    assert not verdict
    assert "the target is 2550 ms" in verdict.reason


def test_the_target_is_what_optimal_schedules_take():
    case = tasks.TWELVE.cases[0]
    chain = case.device.layers.chain(0, 64)
    assert time(chain, rotor(chain, 12 * MiB)) == pytest.approx(case.time, abs=10.1 * ms)
    assert time(chain, rotor(chain, 11 * MiB)) > case.time
