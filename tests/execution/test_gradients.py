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
from tests.odd_layers import ODD
from tests.odd_layers import model as odd
from tests.toys import rows, toy, two_ties

pytestmark = pytest.mark.many(3)

cross_entropy = torch.nn.functional.cross_entropy


@pytest.mark.parametrize("text", ["pp=4 microbatches=8", "dp=4 microbatches=2 zero=3", "pp=2 dp=2 microbatches=4"])
@pytest.mark.parametrize("count", [60, 7, 1])
def test_uneven_and_missing_rows(clusters, text, count):
    """60 rows in 8 micro-batches; 7 in 8, so that one has none; a single row."""
    check(clusters, Plan.parse(text), partial(toy, ("linear", "tuples", "dropout"), tied=True), rows(count))


FROZEN = [
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


def test_a_micro_batch_in_which_no_target_counts_enters_no_other_graph(clusters):
    check(
        clusters,
        Plan.parse("dp=2 microbatches=4"),
        twice_in_place,
        rows(16, classes=True, ignored=9),
        loss=of_the_first,
    )


def test_targets_that_do_not_count(clusters):
    """The mean is over the targets that count: micro-batches with more of them weigh more, some weigh nothing."""
    model, data = partial(toy, ("linear", "dropout")), rows(16, classes=True, ignored=9)
    check(clusters, Plan.parse("pp=2 dp=2 microbatches=4"), model, data, loss=cross_entropy)


def test_float32_within_its_own_bound(clusters):
    check(clusters, Plan.parse("pp=2 dp=2 microbatches=4"), partial(toy, ("linear", "tuples")), rows(16),
          dtype=torch.float32, bound=1e-5)  # fmt: skip


def test_two_tied_sets_across_stages_in_opposite_order(clusters):
    check(clusters, Plan.parse("pp=2 dp=2 microbatches=3 bucket=0.0001"), two_ties, rows(8))


def test_another_target_that_does_not_count(clusters):
    x, y = rows(16, classes=True)
    loss = partial(cross_entropy, ignore_index=2)
    check(clusters, Plan.parse("pp=2 dp=2 microbatches=3"), partial(toy, ("linear",)), (x, y), loss=loss)
    module = torch.nn.CrossEntropyLoss(ignore_index=2)
    check(clusters, Plan.parse("pp=2 microbatches=5"), partial(toy, ("linear",)), (x, y), loss=module)


class Root(torch.nn.Module):
    """Its derivative at 0, which it always meets, is infinite: 0 times it would be no number."""

    def forward(self, x):
        return torch.sqrt(x - x.detach()) + x.detach()


class Cut(torch.nn.Module):
    def forward(self, x):
        return x.detach()


def cut_off() -> torch.nn.Sequential:
    front = [torch.nn.Linear(6, 6), Root(), torch.nn.Linear(6, 6), Cut()]
    return torch.nn.Sequential(*front, torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))


@pytest.mark.parametrize(
    "text",
    ["dp=2 zero=3", "pp=2 microbatches=3 split=5,2 schedule=zb-h1", "pp=2 dp=2 microbatches=2 split=3,4 checkpoint=1"],
)
def test_no_gradient_passes_a_detach(clusters, text):
    """Layers in front of it have no backward: none with zeros is computed for them, in a rank or from rank to rank."""
    check(clusters, Plan.parse(text), cut_off, rows(11), steps=3)


PLANS = (
    "pp=2 schedule=1f1b microbatches=3 split=3,4",
    "pp=2 schedule=zb-v microbatches=4 split=1,2,2,2",
)


@pytest.mark.many(5)
@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("name", ODD)
def test_layers_with_hooks_and_with_graphs_of_odd_shapes(clusters, name, text):
    """With backwards whole and in halves."""
    check(clusters, Plan.parse(text), partial(odd, name), rows(11))
