"""Models and batches with which plain torch's gradients are easily missed. (Plans: tests/fuzz/test_core.py.)

The reference is the whole batch in one process without the executor; float64, so that 1e-12 leaves no room for a
wrong scale, a lost micro-batch, or a doubled one.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minipar import Plan
from tests.comparing import check
from tests.toys import rows, toy, two_ties

pytestmark = pytest.mark.many(3)

cross_entropy = torch.nn.functional.cross_entropy


@pytest.mark.parametrize("text", ["pp=4 microbatches=8", "dp=4 microbatches=2", "pp=2 dp=2 microbatches=4"])
@pytest.mark.parametrize("count", [60, 7, 1])
def test_uneven_and_missing_rows(clusters, text, count):
    """60 rows in 8 micro-batches; 7 in 8, so that one has none; a single row."""
    check(clusters, Plan.parse(text), partial(toy, ("linear", "tuples", "dropout"), tied=True), rows(count))


FROZEN = [
    "pp=4 microbatches=3",
    "dp=2 pp=2 microbatches=2 zero=2 bucket=none",
    "pp=2 schedule=zb-v microbatches=4",
    "dp=2 zero=3 offload=activations,optimizer,parameters offload_to=disk",
]


@pytest.mark.parametrize("frozen", [(0, 1, 2), (-1,), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("text", FROZEN)
def test_frozen_layers(clusters, text, frozen):
    """Also a whole first stage without gradients, and a model in which nothing is trained."""
    check(clusters, Plan.parse(text), partial(toy, ("tuples", "linear", "linear"), frozen=frozen), rows(9))


class OnlyItsWeight(torch.nn.Module):
    """What the loss reads leads to this layer's weight alone; the layers before it, which plain torch therefore never
    enters, could not be: one relu_ writes into what the other has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        return x.detach() * self.weight, x


def twice_in_place():
    torch.manual_seed(0)
    relu = torch.nn.ReLU(inplace=True)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), relu, relu, OnlyItsWeight())


def of_the_first(output, y):
    return cross_entropy(output[0], y)


@pytest.mark.parametrize("text", ["microbatches=8", "dp=2 microbatches=4"])
def test_a_micro_batch_in_which_no_target_counts_enters_no_other_graph(clusters, text):
    check(clusters, Plan.parse(text), twice_in_place, rows(16, classes=True, ignored=9), loss=of_the_first)


@pytest.mark.parametrize("text", ["pp=4 microbatches=4", "dp=4", "pp=2 dp=2 microbatches=4"])
@pytest.mark.parametrize("ignored", [0, 5, 9])
def test_targets_that_do_not_count(clusters, text, ignored):
    """The mean is over the targets that count: micro-batches with more of them weigh more, some weigh nothing."""
    model = partial(toy, ("linear", "dropout"))
    check(clusters, Plan.parse(text), model, rows(16, classes=True, ignored=ignored), loss=cross_entropy)


def test_float32_within_its_own_bound(clusters):
    check(clusters, Plan.parse("pp=2 dp=2 microbatches=4"), partial(toy, ("linear", "tuples")), rows(16),
          dtype=torch.float32, bound=1e-5)  # fmt: skip


def test_two_tied_sets_across_stages_in_opposite_order(clusters):
    check(clusters, Plan.parse("pp=4 dp=1 microbatches=3 bucket=none"), two_ties, rows(8))
    check(clusters, Plan.parse("pp=2 dp=2 microbatches=3 bucket=0.0001"), two_ties, rows(8))


def reused() -> torch.nn.Sequential:
    """One ReLU and one Linear, each used twice."""
    act, same = torch.nn.ReLU(), torch.nn.Linear(6, 6)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), act, same, act, same, torch.nn.Linear(6, 6))


@pytest.mark.parametrize("text", ["microbatches=2", "pp=2 microbatches=3", "pp=4 microbatches=2", "dp=2"])
def test_a_layer_that_is_used_twice(clusters, text):
    check(clusters, Plan.parse(text), reused, rows(8))


def complex_parts() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(6, 6), FFT(), Abs(), torch.nn.Linear(6, 6))


class FFT(torch.nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)


class Abs(torch.nn.Module):
    def forward(self, x):
        return x.real**2 + x.imag**2


def test_complex_values_between_ranks(clusters):
    check(clusters, Plan.parse("pp=4 microbatches=3"), complex_parts, rows(8))


def test_another_target_that_does_not_count(clusters):
    x, y = rows(16, classes=True)
    loss = partial(cross_entropy, ignore_index=2)
    check(clusters, Plan.parse("pp=2 dp=2 microbatches=3"), partial(toy, ("linear",)), (x, y), loss=loss)
    module = torch.nn.CrossEntropyLoss(ignore_index=2)
    check(clusters, Plan.parse("pp=2 microbatches=5"), partial(toy, ("linear",)), (x, y), loss=module)
