"""The exercises of lesson 09: reference solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from minipar_course.exercise import check
from minipar_course.exercises import heterogeneous as tasks
from minipar_course.exercises.kinds.order import FETCH, OFFLOAD, B, F, R


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


@pytest.mark.parametrize("task", [tasks.HOST_LAYERS, tasks.OFFLOADED, tasks.SLOW_LINK])
def test_a_stub_is_told_that_nothing_is_written(task):
    verdict = check(stub, task)
    assert not verdict
    assert "nothing is written here yet" in verdict.reason


# layers on the host


def host(parameters, operations, outputs, capacity):
    layers = range(len(parameters))
    choices = [set(chosen) for k in range(len(parameters) + 1) for chosen in combinations(layers, k)]
    fits = [one for one in choices if sum(parameters[l] for l in layers if l not in one) <= capacity]
    return min(fits, key=lambda one: tasks.step_time(operations, outputs, one))


def test_the_best_layers():
    assert check(host, tasks.HOST_LAYERS)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda p, o, out, c: set(), "take 1120 on the device, which holds 700", "does what is left fit?"),
        (tasks._by_size, "ms are possible", "large is not enough"),
        (lambda p, o, out, c: 1, "cannot be read as an answer", "try them all"),
    ],
)
def test_wrong_layers(answer, reason, hint):
    verdict = check(answer, tasks.HOST_LAYERS)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# activations


def away(which, ahead=1, again=lambda layer, layers: False):
    """Offloads the layers of `which(layers)`, and fetches each so many backwards ahead."""

    def mine(layers):
        chosen = which(layers)
        for layer in range(layers):
            yield F, layer
            yield from [(OFFLOAD, layer)] * (layer in chosen)
        for layer in reversed(range(layers)):
            yield from [(FETCH, layer - ahead)] * (layer - ahead in chosen)
            yield from [(R, layer)] * again(layer, layers)
            yield B, layer

    return mine


def all_but_two(layers):
    return range(layers - 2)


def run_again(layer, layers):
    return layer < layers - 1


def test_offloaded_in_time():
    verdict = check(away(all_but_two), tasks.OFFLOADED)
    assert verdict
    assert "240 ms, at most 15 MiB" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (away(lambda n: ()), "needs 33 MiB; the target is 15 MiB", "activations 33 MiB"),
        (away(lambda n: (), again=run_again), "takes 310 ms", "70 ms are forwards that run again"),
        (away(lambda n: range(n), ahead=9), "cannot run", "goes to the host 1 times, and comes back 0 times"),
    ],
)
def test_too_late_or_too_much(answer, reason, hint):
    verdict = check(answer, tasks.OFFLOADED)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def every_other(layers):
    return range(0, layers - 2, 2)


def between(layer, layers):
    return layer not in every_other(layers) and layer < layers - 1


def test_a_slow_link():
    verdict = check(away(every_other, again=between), tasks.SLOW_LINK)
    assert verdict
    assert "280 ms, at most 15 MiB" in verdict.reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (away(all_but_two), "needs 27 MiB; the target is 15 MiB"),
        (away(lambda n: (), again=run_again), "takes 310 ms; the target is 280 ms"),
        (away(every_other), "needs 27 MiB"),
    ],
)
def test_a_slow_link_alone_or_recomputation_alone(answer, reason):
    verdict = check(answer, tasks.SLOW_LINK)
    assert not verdict
    assert reason in verdict.reason
