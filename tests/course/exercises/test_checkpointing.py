"""The exercises of lesson 03: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import pytest

from minipar.costs.recomputation import time
from minipar.costs.reversal import rotor
from minipar_course.exercise import check
from minipar_course.exercises import checkpointing as tasks
from minipar_course.exercises.kinds.order import B, F, MiB, R, ms


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


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (
            lambda n, s: backward_in(n, range(0, n, s), lambda k: True),
            "takes 2560 ms; the target is 2480 ms",
            "right after its own forward",
        ),
        (lambda n, s: [*segments(n, s)][:-1], "cannot run", "(B, 0) comes 0 times"),
    ],
)
def test_wrong_segments(answer, reason, hint):
    verdict = check(answer, tasks.SEGMENTS)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def test_equal_segments_need_more_than_twelve():
    verdict = check(lambda n: segments(n, 8), tasks.TWELVE)
    assert not verdict
    assert "needs 16 MiB; the target is 12 MiB" in verdict.reason


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
