"""The exercises of lesson 04: plausible mistakes fail, and the reason is given."""

from __future__ import annotations

import pytest

from minipar.errors import MiniparError
from minipar_course.exercise import check
from minipar_course.exercises import accumulation as tasks

# gradients of a batch in parts


def weighted(weight):
    """Goes through the parts with `weight(rows, all rows, parts)`."""

    def accumulate(model, loss, parts):
        rows, total = sum(len(x) for x, _ in parts), 0.0
        for x, y in parts:
            value = loss(model(x), y) * weight(len(x), rows, len(parts))
            value.backward()
            total += value.item()
        return total

    return accumulate


@pytest.mark.parametrize(
    ("answer", "reason", "hint"),
    [
        (weighted(lambda n, rows, parts: 1), "parts of 4, 4 rows the gradients are not", "these are the sums"),
        (weighted(lambda n, rows, parts: 3 * n / rows), "the gradients are not", "what must it be multiplied by"),
    ],
)
def test_wrong_accumulation(answer, reason, hint):
    verdict = check(answer, tasks.ACCUMULATE)
    assert not verdict
    assert reason in verdict.reason
    assert hint in verdict.hint


# a plan for a small device


def test_what_a_plan_is_predicted_to_need():
    # 8 layers: 24 + 8 MiB of states and gradients each; 32 rows leave 4 MiB on each layer
    assert tasks.predict("dp=1", 32) == pytest.approx((8 * 3 * 3.7, 8 * 32 + 8 * 4 * 32))
    with pytest.raises(MiniparError, match="one device"):
        tasks.predict("pp=2", 32)
