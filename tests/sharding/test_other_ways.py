"""Ranks that share layers, where other keys change the order, the place or what is kept: schedules without flushes,
layers on any rank or on the host, attention cores that run again, micro-batches in step.

Synchronous runs equal plain torch; asynchronous ones equal its replay of their recorded order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minipar import Plan, PlanError, models, simulate
from minipar.program import Op, repartitions
from tests.interpreters import RandomCosts
from tests.sharding.test_models import TOKENS, gpt, perceptron, right, run, trained

pytestmark = [pytest.mark.many(3), pytest.mark.usefixtures("captured_for_all_tests")]

ADAM = partial(torch.optim.AdamW, lr=1e-3)
MIXTURE = partial(models.build, "gpt-moe-tiny", layers=2, width=16, heads=4, context=TOKENS, experts=4, vocab=32)


# Synchronous ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "pp=2 tp=2 place=1,0,0,1 schedule=looped-bfs microbatches=2 sequence_parallel=true",
        "tp=4 batch_copies=2 microbatches=3 sequence_parallel=true",
    ],
)
def test_gradients_are_plain_torchs(clusters: Any, words: str) -> None:
    right(trained(clusters, partial(gpt, tied=True), words, optimizer=ADAM), 1e-10)


@pytest.mark.parametrize("words", ["ep=2 pp=2 place=0,1,1,0 microbatches=2", "ep=2 pp=2 checkpoint=selective"])
def test_experts(clusters: Any, words: str) -> None:
    right(trained(clusters, MIXTURE, words, loss=models.mixture_loss), 1e-10)


def test_dropout_inside_a_core_that_runs_again(clusters: Any) -> None:
    given = numbers(8), numbers(4)
    right(run(clusters, lambda: nn.Sequential(Dropping(8)), given, "tp=2 checkpoint=selective", **DROPPING))


class Middle(models.Recomputed):
    """Draws, and has two results."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)

    def compute(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        return self.dropout(x.sigmoid()), x.tanh()


class Dropping(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, 4)
        self.middle = Middle()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.middle(self.first(x))
        return self.second(a * b)


def numbers(*shape: int) -> Tensor:
    return torch.randn(12, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


DROPPING: dict[str, Any] = {"loss": nn.functional.mse_loss}


def test_layers_without_a_core_cannot_be_selected(clusters: Any) -> None:
    with pytest.raises(PlanError, match="no layer of this model has a part that derives from .*Recomputed"):
        run(clusters, perceptron, (numbers(8), numbers(4)), "tp=2 checkpoint=selective", **DROPPING)


def test_the_core_keeps_only_what_it_reads(clusters: Any) -> None:
    """Explicit attention keeps the softmax of its scores in every layer; a core that runs again has that of one."""
    model = partial(gpt, fused=False, layers=6, width=16, context=64)
    ids = torch.randint(32, (4, 64), generator=torch.Generator().manual_seed(0))
    kept, again = (
        run(clusters, model, (ids, ids), f"tp=2 checkpoint={words}", memory=True, steps=1, batch=4, check=False)
        for words in ("none", "selective")
    )
    for traces in ((again.trace, kept.trace), (again.predicted, kept.predicted)):
        few, many = (trace.peak_by_kind(0)["activations"] for trace in traces)
        assert few < 0.7 * many


# Programs -------------------------------------------------------------------------------------------------------------


def forwards(words: str, rank: int = 0) -> list[tuple[str, int]]:
    """Micro-batches of the computing instructions of a rank, in their order."""
    row = Plan.parse(words).compile(layers=1).ranks[rank]
    return [(ins.op.name[0], ins.microbatch) for ins in row if ins.op in (Op.FORWARD, Op.BACKWARD)]


def test_micro_batches_go_in_step_where_forward_and_backward_alternate() -> None:
    apart, together = (forwards(f"tp=2 microbatches=2{more}") for more in ("", " batch_copies=2"))
    assert apart == [("F", 0)] * 3 + [("B", 0)] * 3 + [("F", 1)] * 3 + [("B", 1)] * 3
    assert together == [("F", 0), ("F", 1)] * 3 + [("B", 0), ("B", 1)] * 3


class Costs(RandomCosts):
    """Each node takes 1, each collective 1."""

    def draw(self, *name: object) -> float:
        return 0.0 if "STEP" in str(name[2]) or name[0] in ("bandwidth", "latency") else 1.0


@pytest.mark.parametrize("words", ["tp=2 dp=2", "tp=2 sequence_parallel=true"])
def test_copies_take_less_time_where_collectives_cost_some(words: str) -> None:
    plans = [f"{words} bucket=none microbatches=4 batch_copies={copies}" for copies in (1, 2)]
    apart, together = (simulate(Plan.parse(plan).compile(layers=4), Costs(0)).time for plan in plans)
    assert together < apart


def test_copies_without_effect_are_refused() -> None:
    with pytest.raises(PlanError, match="batch_copies=2: is of ranks that share layers, with several micro-batches"):
        Plan(tp=2, batch_copies=2)
    with pytest.raises(PlanError, match="batch_copies=2: not together with pp=2"):
        Plan.parse("tp=2 pp=2 microbatches=2 batch_copies=2")


def test_partial_gradients_go_in_buckets() -> None:
    """Where replicas sum them again, they lie in the buckets of that sum already."""

    def sums(words: str) -> list[tuple[int, ...]]:
        row = Plan.parse(words).compile(layers=3).ranks[0]
        return [ins.layers for ins in row if ins.op is Op.ALL_REDUCE and not repartitions(ins)]

    assert sums("context_parallel=2") == [(2, 1, 0)]
    assert sums("context_parallel=2 bucket=none") == [(2,), (1,), (0,)]
    assert sums("context_parallel=2 bucket=1,") == [(2, 1), (0,)]
    assert sums("context_parallel=2 dp=2") == [(2,), (1,), (0,), (2, 1, 0)]


def test_places_are_named_by_layers_and_not_by_nodes() -> None:
    program = Plan.parse("tp=2 pp=2 place=0,1,0").compile(layers=3)
    assert [sorted({node // 5 for node in held}) for held in program.placement] == [[0, 2], [0, 2], [1], [1]]
    for words, says in (("tp=2 pp=2 place=0,1", "place=0,1: of 2 layers, but the model has 3"),):
        with pytest.raises(PlanError, match=says):
            Plan.parse(words).compile(layers=3)
