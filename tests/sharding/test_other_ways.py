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
from minipar.execution.execution import Job, execute
from minipar.models.parameter_groups import shape_of
from minipar.program import COPIES, Op, repartitions, tier
from minipar.program.shape import uniform
from minipar.trace.recorded_order import order_of
from minipar.training.plainly import train_reference as replay
from minipar.training.reference import gradient_error
from minipar.training.training import Run, resume
from tests.interpreters import RandomCosts
from tests.sharding import by_hand
from tests.sharding.test_models import TOKENS, gpt, perceptron, right, run, texts, trained

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


@pytest.mark.many(4)
@pytest.mark.parametrize(
    ("words", "choice"),
    [
        ("dp=2 tp=2 sequence_parallel=true microbatches=2", "topk"),
        ("dp=2 context_parallel=2 bucket=none overlap=none", "topk"),
        ("dp=2 ep=2 bucket=flat", "topk"),
        ("dp=2 tp=2 sequence_parallel=true", "powersgd:1"),
        ("dp=2 context_parallel=2", "bf16"),
    ],
)
def test_what_is_made_smaller_is_the_sum_over_replicas_alone(clusters: Any, words: str, choice: str) -> None:
    """With all numbers sent it is exact; with some of them left out the ranks that share layers stay alike."""
    model, options = (MIXTURE, {"loss": models.mixture_loss}) if "ep" in words else (partial(gpt, tied=True), {})
    if choice == "topk":
        whole = trained(clusters, model, f"{words} compress=topk:1", **options)
        assert whole.max_gradient_error() < 1e-10
    some = f"{words} compress={'topk:0.1' if choice == 'topk' else choice}"
    found = trained(clusters, model, some, check=False, **options)
    for ins in found.program.ranks[0]:
        if ins.op is Op.ALL_REDUCE and ins.reads[0].kind == "grad":
            kept = any(value.kind == "residual" for value in ins.reads)
            assert (ins.group == (0, 2)) == found.program.compresses(ins)
            assert kept == (found.program.compresses(ins) and choice != "bf16")


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


def test_layers_on_the_host_keep_their_parameters_there(clusters: Any) -> None:
    found = trained(clusters, gpt, "tp=2 host_layers=0", steps=1)
    program = found.program
    away = {value for value in program.state[0] if tier(value) == "host"}
    assert {value.kind for value in away} >= {"host param"}
    copied = {value.index for ins in program.ranks[0] if ins.op in COPIES for value in ins.reads + ins.writes}
    assert copied == {node for node, name in enumerate(program.names) if name.startswith("0.")}
    right(found)


# Without flushes ------------------------------------------------------------------------------------------------------

STALE = ()


def replayed(found: Run) -> None:
    assert found.max_gradient_error() < 1e-10
    assert found.max_parameter_error() < 1e-10
    assert found.losses == pytest.approx(found.reference.losses, rel=1e-10)
    assert found.predicted.staleness() == found.trace.staleness()
    assert max(found.trace.staleness()) > 0


@pytest.mark.many(4)
@pytest.mark.parametrize("words", STALE)
def test_a_run_equals_the_replay_of_its_order(clusters: Any, words: str) -> None:
    replayed(trained(clusters, gpt, words, optimizer=partial(torch.optim.SGD, lr=0.3, momentum=0.9)))


def test_replicas_of_ranks_that_share_layers(clusters: Any) -> None:
    """Partial gradients are summed over these ranks, and then in shards over the replicas."""
    words = "dp=2 tp=2 schedule=pipedream microbatches=2 sequence_parallel=true"
    for more in ("zero=1", "bucket=flat"):
        found = trained(clusters, gpt, f"{words} {more}", optimizer=ADAM)
        assert found.max_gradient_error() < 1e-10
        assert found.max_parameter_error() < 1e-10


def test_experts_without_flushes(clusters: Any) -> None:
    words = "pp=2 ep=2 schedule=pipedream microbatches=3"
    replayed(trained(clusters, MIXTURE, words, loss=models.mixture_loss, optimizer=ADAM))


def test_tied_layers_within_a_stage(clusters: Any) -> None:
    found = trained(clusters, partial(gpt, tied=True), "tp=4 schedule=pipedream-2bw microbatches=3", optimizer=ADAM)
    assert found.max_gradient_error() < 1e-10
    with pytest.raises(PlanError, match="layers 0, 3 share weights, but are on ranks 0, 1"):
        trained(clusters, partial(gpt, tied=True), "pp=2 tp=2 schedule=pipedream microbatches=3")


@pytest.mark.parametrize("model", [by_hand.model, by_hand.sequence_model], ids=["megatron", "sequence"])
def test_the_replay_can_fail(clusters: Any, model: Any) -> None:
    """With gradients that are summed over sharing ranks, too: an order with other versions gives other numbers."""
    tokens = (4,) if model is by_hand.sequence_model else ()
    data = numbers(*tokens, 8), numbers(*tokens, 8)
    job = Job(model, data, 12, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.5), dtype=torch.float64)
    shared = job.share(job.build(), 0, 2)
    plan = Plan.parse("pp=2 tp=2 schedule=pipedream microbatches=4")
    done = execute(plan.compile(shape_of(shared), steps=2), job, cluster=clusters(4))
    order = order_of(done.program, shared.nodes)
    assert order.layers == ((0, 1, 2), (3, 4))
    plain = replay(job, order)
    assert max(gradient_error(a, b) for a, b in zip(done.gradients, plain.gradients, strict=True)) < 1e-10
    older = [
        e._replace(version=0) if (e.rank, e.version) == (0, 1) and e.what != "update" else e for e in order.entries
    ]
    other = replay(job, order._replace(entries=tuple(older)))
    assert max(gradient_error(a, b) for a, b in zip(done.gradients, other.gradients, strict=True)) > 1e-6


@pytest.mark.extra("training/test_asynchronous_runs.py::test_the_newest_versions_are_saved_wherever_they_are")
def test_a_stale_run_is_saved_and_goes_on_under_another_mesh(clusters: Any, tmp_path: Any) -> None:
    options = {"optimizer": ADAM, "dtype": torch.float64, "progress": False, "check": True}
    trained(clusters, gpt, STALE[0], optimizer=ADAM, save=str(tmp_path))
    for words in ("pp=2", STALE[2]):
        plan = Plan.parse(words)
        again = resume(tmp_path, gpt, texts(), plan, cluster=clusters(plan.ranks), steps=1, **options)
        assert again.first_step == 2
        assert again.max_gradient_error() < 1e-10


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


@pytest.mark.parametrize("words", ["tp=2 dp=2", "tp=2 pp=2 schedule=gpipe", "tp=2 sequence_parallel=true"])
def test_copies_take_less_time_where_collectives_cost_some(words: str) -> None:
    plans = [f"{words} bucket=none microbatches=4 batch_copies={copies}" for copies in (1, 2)]
    apart, together = (simulate(Plan.parse(plan).compile(layers=4), Costs(0)).time for plan in plans)
    assert together < apart


def test_a_piece_ends_where_another_rank_must_give_something() -> None:
    """Rank 1 starts the second micro-batch in its layer before it ends the first one, and rank 0 has both ends."""
    places = "pp=2 place=0,1,0 schedule=gpipe", "pp=2 chunks=2 schedule=looped-bfs"
    for words in places:
        for more in ("", "sequence_parallel=true"):
            Plan.parse(f"tp=2 microbatches=2 batch_copies=2 {words} {more}").compile(layers=3 + ("chunks" in words))


def test_copies_without_effect_are_refused() -> None:
    with pytest.raises(PlanError, match="batch_copies=2: is of ranks that share layers, with several micro-batches"):
        Plan(tp=2, batch_copies=2)
    with pytest.raises(PlanError, match="a micro-batch begins with what the update of the one before it makes"):
        Plan.parse("tp=2 schedule=pipedream microbatches=2 batch_copies=2")


def test_partial_gradients_go_in_buckets() -> None:
    """Where replicas sum them again, they lie in the buckets of that sum already."""

    def sums(words: str) -> list[tuple[int, ...]]:
        row = Plan.parse(words).compile(layers=3).ranks[0]
        return [ins.layers for ins in row if ins.op is Op.ALL_REDUCE and not repartitions(ins)]

    assert sums("context_parallel=2") == [(2, 1, 0)]
    assert sums("context_parallel=2 bucket=none") == [(2,), (1,), (0,)]
    assert sums("context_parallel=2 bucket=1,") == [(2, 1), (0,)]
    assert sums("context_parallel=2 dp=2") == [(2,), (1,), (0,), (2, 1, 0)]


def test_places_and_hosts_are_named_by_layers_and_not_by_nodes() -> None:
    program = Plan.parse("tp=2 pp=2 place=0,1,0 host_layers=1").compile(layers=3)
    assert [sorted({node // 5 for node in held}) for held in program.placement] == [[0, 2], [0, 2], [1], [1]]
    assert {ins.stream for ins in program.ranks[2] if ins.op is Op.FORWARD} == {"host"}
    for words, says in (("tp=2 pp=2 place=0,1", "place=0,1: of 2 layers, but the model has 3"),):
        with pytest.raises(PlanError, match=says):
            Plan.parse(words).compile(layers=3)


def test_ranks_that_share_a_layer_use_and_make_the_same_versions() -> None:
    plan = Plan.parse("pp=2 tp=2 schedule=pipedream microbatches=3")
    program = plan.compile(uniform(4), steps=2)
    for rank in (0, 2):
        mine, other = program.ranks[rank : rank + 2]
        assert [(ins.op, ins.reads, ins.writes, ins.frees) for ins in mine] == [
            (ins.op, ins.reads, ins.writes, ins.frees) for ins in other
        ]
