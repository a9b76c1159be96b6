"""Recomputation on real tensors: gradients equal plain torch's, forwards are counted, and the peak is the program's."""

from __future__ import annotations

from functools import partial

import pytest

from minipar import Plan
from minipar.program import Op
from tests.comparing import check, trained
from tests.toys import rows, toy

pytestmark = pytest.mark.many(6)

CHOICES = ["1", "2", "sqrt", "1,3"]
PLANS = [
    "microbatches=3",
    "microbatches=2 accumulate=2",
    "dp=2 bucket=0.0001 microbatches=2",
    "pp=2 schedule=gpipe microbatches=3",
    "pp=4 schedule=1f1b microbatches=8",
    "pp=2 dp=2 schedule=eager-1f1b microbatches=3 bucket=flat",
    "pp=2 schedule=naive microbatches=2",
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("text", PLANS)
def test_gradients_are_those_of_plain_torch(clusters, text, choice):
    model = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))
    run = check(clusters, Plan.parse(f"{text} checkpoint={choice}"), model, rows(17))
    if choice == "1" and "schedule" not in text:
        assert any(ins.op is Op.RECOMPUTE for row in run.program.ranks for ins in row)


@pytest.mark.parametrize("budget", ["4KiB", "6KiB", "20KiB"])
def test_a_budget_too(clusters, budget):
    model = partial(toy, ("linear", "dropout", "linear", "dropout", "linear", "linear"))
    trained(clusters, Plan.parse(f"pp=2 microbatches=2 schedule=gpipe checkpoint={budget}"), model, rows(16))
