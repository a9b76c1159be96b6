"""Gradients equal plain torch's where memory may be freed too early: layers so wide that freed memory is used again,
for several steps.

Every way to cut a backward into pieces (buckets smaller than a segment, split backwards, copies to the host, a message
in between) is combined with recomputation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minipar import Plan
from tests.comparing import check
from tests.toys import rows

pytestmark = pytest.mark.many(4)

WIDTH = 192

PIECEWISE = [
    "dp=2 bucket=none",
    "dp=2 bucket=0.3 microbatches=2",
    "dp=2 zero=3 bucket=none",
    "dp=2 zero=1 bucket=0.3",
    "offload=optimizer microbatches=2",
    "pp=2 schedule=zb-h1 microbatches=4",
    "pp=2 schedule=zb-v microbatches=4",
    "pp=2 schedule=dualpipe microbatches=4",
    "pp=2 dp=2 schedule=1f1b microbatches=3 bucket=none",
]


def plain(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


@pytest.mark.parametrize("text", [f"{PIECEWISE[0]} checkpoint=1,3", *(f"{text} checkpoint=2" for text in PIECEWISE)])
def test_a_backward_in_pieces_of_what_was_recomputed(clusters, text):
    check(clusters, Plan.parse(text), plain, rows(40, WIDTH), steps=4)


def test_freed_memory_of_the_ranks_is_poisoned(clusters):
    """What the other tests rely on: memory that was freed, or is not filled yet, holds no plausible numbers."""
    assert clusters(2).run(freed) == [True, True]


def freed() -> bool:
    torch.ones(1000, dtype=torch.float64)
    return bool((torch.empty(1000, dtype=torch.float64) > 1e300).all())
