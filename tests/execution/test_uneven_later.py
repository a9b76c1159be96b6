"""Losses that are a mean only while batches are even are found in the step in which they are not, before its update."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minipar import Plan, PlanError, train

pytestmark = pytest.mark.many(4)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOKENS, PADDING = 6, 0


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 9))


def by_padding(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=PADDING)


def counts_itself(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=PADDING, reduction="sum")
    return losses, (y != PADDING).sum()


def over_rows(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output[:, -1], y[:, 0].clamp_min(1) + 0 * y[:, 1])


class Sorted:
    """Whole sequences until step `first`; then rows are padded, all rows of a micro-batch alike or each by its own."""

    def __init__(self, first: int, alike: int) -> None:
        self.first, self.alike = first, alike

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randint(1, 9, (size, TOKENS), generator=generator) for _ in range(2))
        if step >= self.first:
            for row in range(size):
                y[row, TOKENS - 1 - row // self.alike % (TOKENS - 1) :] = PADDING
        return x, y


def run(clusters, plan, data, loss, **more):
    return train(model, data, plan, cluster=clusters(Plan.parse(plan).ranks), steps=16, batch=8, loss=loss,
                 dtype=torch.float64, progress=False, **more)  # fmt: skip


@pytest.mark.parametrize("plan", ["dp=2", "microbatches=4", "pp=2 microbatches=2 checkpoint=1", "pp=2 microbatches=4"])
@pytest.mark.parametrize("alike", [1, 2, 4])
@pytest.mark.parametrize("first", [1, 3, 13])
def test_the_step_is_named(clusters, plan, first, alike):
    with pytest.raises(
        PlanError, match=rf"loss: in step {first}, of \d+ rows .* weighted by target elements.*losses.we"
    ):
        run(clusters, plan, Sorted(first, alike), by_padding)


@pytest.mark.parametrize(("plan", "loss"), [
    ("microbatches=1", by_padding),
    ("dp=2 microbatches=2", counts_itself),
    ("pp=2 microbatches=4", partial(F.cross_entropy, ignore_index=PADDING)),
])  # fmt: skip
def test_what_is_a_mean_of_its_parts_goes_on(clusters, plan, loss):
    data = Sorted(2, 1)
    given = (lambda output, y: loss(output.transpose(1, 2), y)) if isinstance(loss, partial) else loss
    if isinstance(loss, partial):
        given.ignore_index = PADDING  # type: ignore[attr-defined]
    found = run(clusters, plan, data, given, check=True)
    assert found.max_error() <= 1e-12
