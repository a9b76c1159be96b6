"""The exercises of lesson 09: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import pytest

from minipar_course.exercise import check
from minipar_course.exercises import heterogeneous as tasks
from minipar_course.exercises.kinds.order import FETCH, OFFLOAD, B, F, R

# activations


def away(which, again=lambda layer, layers: False):
    """Offloads the layers of `which(layers)`, and fetches each one backward ahead."""

    def mine(layers):
        chosen = which(layers)
        for layer in range(layers):
            yield F, layer
            yield from [(OFFLOAD, layer)] * (layer in chosen)
        for layer in reversed(range(layers)):
            yield from [(FETCH, layer - 1)] * (layer - 1 in chosen)
            yield from [(R, layer)] * again(layer, layers)
            yield B, layer

    return mine


def all_but_two(layers):
    return range(layers - 2)


def run_again(layer, layers):
    return layer < layers - 1


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (away(lambda n: ()), "needs 33 MiB; the target is 15 MiB", "activations 33 MiB"),
        (away(lambda n: (), again=run_again), "takes 310 ms", "70 ms are forwards that run again"),
    ],
)
def test_too_late_or_too_much(answer, reason, hint):
    verdict = check(answer, tasks.OFFLOADED)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (away(all_but_two), "needs 27 MiB; the target is 15 MiB"),
        (away(lambda n: (), again=run_again), "takes 310 ms; the target is 280 ms"),
    ],
)
def test_a_slow_link_alone_or_recomputation_alone(answer, reason):
    verdict = check(answer, tasks.SLOW_LINK)
    assert not verdict
    assert reason in verdict.reason
