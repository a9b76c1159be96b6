"""The exercises of lesson 04: reference solutions pass; stubs and plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import math
from typing import Any

import pytest

from minipar.errors import MiniparError
from minipar_course.exercise import check
from minipar_course.exercises import accumulation as tasks


def stub(*arguments: Any) -> Any:
    raise NotImplementedError("your code here")


@pytest.mark.parametrize("task", [tasks.ACCUMULATE, tasks.FEWEST, tasks.SMALL_DEVICE])
def test_a_stub_is_told_that_nothing_is_written(task):
    verdict = check(stub, task)
    assert not verdict
    assert "nothing is written here yet" in verdict.reason


# gradients of a batch in parts


def weighted(weight, between=None):
    """Goes through the parts with `weight(rows, all rows, parts)`."""

    def accumulate(model, loss, parts):
        rows, total = sum(len(x) for x, _ in parts), 0.0
        for x, y in parts:
            if between is not None:
                between(model)
            value = loss(model(x), y) * weight(len(x), rows, len(parts))
            value.backward()
            total += value.item()
        return total

    return accumulate


def test_weights_by_rows():
    assert check(weighted(lambda n, rows, parts: n / rows), tasks.ACCUMULATE)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (weighted(lambda n, rows, parts: 1), "parts of 4, 4 rows the gradients are not", "these are the sums"),
        (weighted(lambda n, rows, parts: 3 * n / rows), "the gradients are not", "what must it be multiplied by"),
        (5, "5 is no function", "def accumulate"),
    ],
)
def test_wrong_accumulation(answer, reason, hint):
    verdict = check(answer, tasks.ACCUMULATE)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# how many parts


def fewest(rows, fixed, each, capacity):
    return next((m for m in range(1, rows + 1) if fixed + each * -(-rows // m) <= capacity), 0)


def test_as_few_as_fit():
    assert check(fewest, tasks.FEWEST)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda n, f, a, c: max(1, math.ceil(n * a / (c - f))), "rows are whole"),
        (lambda n, f, a, c: max(1, (n * a) // (c - f)), "rounded down"),
        (lambda n, f, a, c: n, "try m = 1, 2, 3"),
    ],
)
def test_wrong_numbers_of_parts(answer, hint):
    verdict = check(answer, tasks.FEWEST)
    assert not verdict
    assert hint in verdict.hint


# a plan for a small device


def searched(rows, capacity):
    words = [f"microbatches={m} checkpoint={c}" for m in range(1, 9) for c in ("none", 2)]
    return min(
        (one for one in words if tasks.predict(one, rows)[1] <= capacity), key=lambda one: tasks.predict(one, rows)
    )


def test_a_search_finds_a_plan():
    assert check(searched, tasks.SMALL_DEVICE)


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (lambda rows, capacity: "microbatches=1", "needs 1280 MiB; the device has 800", "the fastest where it fits"),
        (lambda rows, capacity: "dp=4", "there is one device", "try many"),
        (lambda rows, capacity: 3, "gives 3: ", "try many"),
    ],
)
def test_wrong_plans(answer, reason, hint):
    verdict = check(answer, tasks.SMALL_DEVICE)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


def test_what_a_plan_is_predicted_to_need():
    # 8 layers: 24 + 8 MiB of states and gradients each; 32 rows leave 4 MiB on each layer
    assert tasks.predict("dp=1", 32) == pytest.approx((8 * 3 * 3.7, 8 * 32 + 8 * 4 * 32))
    with pytest.raises(MiniparError, match="one device"):
        tasks.predict("pp=2", 32)
