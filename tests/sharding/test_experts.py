"""Experts on real ranks: gradients of plain torch, collectives by number and bytes, what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from minipar import Plan, ProgramError, data, models, train, verify
from minipar.errors import MiniparError, PlanError, RankError
from minipar.models.mixture_gpt import route, total
from minipar.program import Forms, Instruction, Op, Program, repartitions
from minipar.program.shape import uniform
from minipar.sharding import check_rule, unequal
from minipar.training.training import Run
from tests.conftest import Clusters
from tests.sharding.test_mistakes import all_of, on, place, twice, without

pytestmark = [pytest.mark.many(3), pytest.mark.usefixtures("captured_for_all_tests")]

SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "context": 12, "experts": 4}
MODEL = partial(models.build, "gpt-moe-tiny", **SIZES)
TEXT = data.for_model("gpt-moe-tiny", **SIZES)


def run_of(clusters: Clusters, plan: str, ranks: int, **options: Any) -> Run:
    options = {"loss": models.mixture_loss, "dtype": torch.float64, "batch": 16, "steps": 2, **options}
    return train(MODEL, TEXT, plan, cluster=clusters(ranks), check=True, progress=False, **options)


def exchanged(program: Program) -> Counter[str]:
    """All-to-alls of rank 0, by what they exchange."""
    return Counter(ins.reads[0].kind for ins in program.ranks[0] if ins.op is Op.ALL_TO_ALL)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rules(ranks: int) -> None:
    torch.manual_seed(0)
    scores, x, made = torch.randn(4, 5, 8), torch.randn(4, 5, 8), torch.randn(8, 4, 8)
    weights, slots, _ = route(scores, 2, 1)
    assert (slots < 0).any()  # so that dropping is part of what is compared
    operators = torch.ops.minipar
    found = [
        [str(choice) for choice in check_rule(call.default, *given, ranks=ranks)]
        for call, given in (
            (operators.route, (scores, 2, 1)),
            (operators.dispatch, (x, slots, 8, 1)),
            (operators.combine, (made, weights, slots)),
        )
    ]
    assert found[0] == ["S0 -> S0,S0,S0", "I -> I,I,I"]
    assert found[1] == ["S0,S0 -> S1", "S2,R -> S2", "P,R -> P", "I,I -> I"]
    assert found[2] == ["S1,S0,S0 -> S0", "S2,R,R -> S2", "P,R,R -> P", "R,P,R -> P", "I,I,I -> I"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_rules_without_a_capacity(ranks: int) -> None:
    torch.manual_seed(0)
    scores, x = torch.randn(4, 5, 8), torch.randn(4, 5, 8)
    scores[..., 2:4] -= 100  # with 4 ranks nobody chooses the experts of rank 1
    operators = torch.ops.minipar
    weights, slots, _ = route(scores, 2, 5)
    counts = operators.count(slots, 8)
    assert counts.sum(0).eq(0).nonzero().flatten().tolist() == [2, 3]
    sent, up, down = operators.dispatch_all(counts, x, slots), torch.randn(8, 8, 12), torch.randn(8, 12, 8)
    found = [
        [str(choice) for choice in check_rule(call.default, *given, ranks=ranks)]
        for call, given in (
            (operators.count, (slots, 8)),
            (operators.dispatch_all, (counts, x, slots)),
            (operators.feed_experts, (counts, sent, up, down)),
            (operators.combine_all, (counts, torch.randn(40, 8), weights, slots)),
        )
    ]
    assert found[0] == ["S0 -> S0", "I -> I"]
    assert found[1] == ["R,S2,R -> S1", "R,P,R -> P", "S0,S0,S0 -> U0", "I,I,I -> I"]
    assert found[2] == ["R,R,S2,S1 -> P", "S0,U0,R,R -> U0", "R,U1,S0,S0 -> U1", "I,I,I,I -> I"]
    assert found[3] == [
        "R,S1,R,R -> S2", "R,P,R,R -> P", "R,R,P,R -> P", "R,U0,S0,S0 -> S0", "I,I,I,I -> I"
    ]  # fmt: skip


def test_unequal_shards_by_hand() -> None:
    # Two rows, one on each rank; two experts. Row 0 has an entry of expert 0 and two of expert 1, row 1 has 3 and 0.
    table = unequal.table_of(torch.tensor([[1, 2], [3, 0]]), 2)
    whole = torch.arange(6)  # by expert, then by row
    by_row, by_expert = unequal.cut(whole, table, 0), unequal.cut(whole, table, 1)
    assert [part.tolist() for part in by_row] == [[0, 4, 5], [1, 2, 3]]
    assert [part.tolist() for part in by_expert] == [[0, 1, 2, 3], [4, 5]]
    assert unequal.sizes(table, 0) == [[1, 2], [3, 0]]
    assert unequal.sizes(table, 1) == [[1, 3], [2, 0]]
    for of, shards, wanted in ((0, by_row, by_expert), (1, by_expert, by_row)):
        assert torch.equal(unequal.whole(shards, table, of), whole)
        sent = [unequal.parts(shard, table, of, k) for k, shard in enumerate(shards)]
        for k in range(2):
            assert [len(part) for part in sent[k]] == unequal.sizes(table, of)[k]
            assert torch.equal(unequal.joined([own[k] for own in sent], table, 1 - of, k), wanted[k])


def test_gradients_with_a_capacity(clusters: Clusters) -> None:
    run = run_of(clusters, "ep=2 dp=2 zero=1 clip=0.5", 4)
    assert run.max_error() < 1e-10
    assert run.losses == pytest.approx(run.reference.losses, rel=1e-12)


def test_two_all_to_alls_a_layer_and_direction(clusters: Clusters) -> None:
    run = run_of(clusters, "ep=2 microbatches=2", 2, steps=1)
    layers, microbatches = 2, 2
    assert exchanged(run.program) == {"output": 2 * layers * microbatches, "grad_output": 2 * layers * microbatches}
    # Each sends half of its queues: experts * places * rows of its own * width, of 8 bytes.
    queues = 4 * models.preset("gpt-moe-tiny", **SIZES).room * (16 // microbatches // 2) * 16 * 8
    for trace in (run.predicted, run.trace):
        assert {trace.sent(0, ins) for ins in run.program.ranks[0] if ins.op is Op.ALL_TO_ALL} == {queues // 2}


# Without a capacity ---------------------------------------------------------------------------------------------------


def skewed(used: int, **numbers: Any) -> Any:
    """A mixture without a capacity, of whose four experts tokens choose the first `used` only."""
    model = MODEL(capacity=None, **numbers)
    with torch.no_grad():
        for block in (model[1], model[2]):
            block.norm2.bias[0] = 10.0
            for expert, row in enumerate(block.mixture.gate.weight):
                row[0] = 0.1 if expert < used else -5.0
    return model


@pytest.mark.parametrize(
    ("used", "top", "plan", "ranks"),
    [
        (2, 2, "ep=2 pp=2 microbatches=4", 4),  # rank 1 gets no token
        (1, 1, "ep=4 microbatches=2", 4),  # rank 0 gets all
    ],
)
def test_gradients_without_a_capacity(clusters: Clusters, used: int, top: int, plan: str, ranks: int) -> None:
    load = models.mixture_load(skewed(used, top=top), TEXT.batch(0, 16)[0])
    for tokens in load.tokens:
        assert [n > 0 for n in tokens] == [expert < used for expert in range(4)]
    run = train(
        partial(skewed, used, top=top), TEXT, plan, cluster=clusters(ranks), check=True, progress=False, batch=16,
        steps=2, loss=models.mixture_loss, dtype=torch.float64,
    )  # fmt: skip
    assert run.max_error() < 1e-10
    assert run.losses == pytest.approx(run.reference.losses, rel=1e-12)


def test_what_is_sent_without_a_capacity(clusters: Clusters) -> None:
    run = train(
        partial(skewed, 2, top=2), TEXT, "ep=2 microbatches=2", cluster=clusters(2), progress=False, batch=16, steps=1,
        loss=models.mixture_loss, dtype=torch.float64,
    )  # fmt: skip
    layers, microbatches = 2, 2
    for row in run.program.ranks:
        moved = Counter((ins.op, ins.reads[0].kind) for ins in row if repartitions(ins))
        assert moved[Op.ALL_GATHER, "output"] == layers * microbatches  # the counts
        assert moved[Op.ALL_TO_ALL, "output"] == moved[Op.ALL_TO_ALL, "grad_output"] == 2 * layers * microbatches
    choices = 4 * 12 * 2 * 16 * 8  # bytes: of 4 rows of a micro-batch each token twice
    exchanges = [ins for ins in run.program.ranks[0] if ins.op is Op.ALL_TO_ALL and ins.reads[0].kind == "output"]
    assert {run.predicted.sent(rank, ins) for rank in range(2) for ins in exchanges} == {choices // 2}
    gathers = [ins for ins in run.program.ranks[0] if ins.op is Op.ALL_GATHER and repartitions(ins)]
    for trace in (run.predicted, run.trace):
        assert {trace.sent(rank, ins) for rank in range(2) for ins in gathers} == {4 * 4 * 8}  # of 4 rows, 4 counts
    # In fact all tokens go to rank 0, and what it makes of those of rank 1 comes back.
    there, back = exchanges[:2]
    assert [run.trace.sent(rank, there) for rank in range(2)] == [0, choices]
    assert [run.trace.sent(rank, back) for rank in range(2)] == [choices, 0]


def compiled() -> Program:
    """What a mixture without a capacity becomes on two ranks: counts, entries, and what goes along with them."""
    forms = (
        Forms("", "S0,U0,S0", "N,U0,S0", ""),  # dispatches
        Forms("N,U1,S0", "N,U1,S0", "N,U1,S0", "N,U1,S0"),  # the experts
        Forms("N,U0,S0", "", "", "N,U0,S0"),  # combines
    )
    return Plan.parse("ep=2").compile(replace(uniform(3), forms=forms, names=("1.0", "1.1", "1.2")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("ALL_TO_ALL output(0)"), r"1.1\) reads output\(0\).* by dimension 0 of its .*ALL_TO_ALL is missing"),
        (without("ALL_TO_ALL output(1)"), r"1.2\) reads output\(1\).* by dimension 1 of its .*ALL_TO_ALL is missing"),
        (without("ALL_TO_ALL grad_output(1)"), r"1.1\) reads grad_output\(1\).* dimension 0 .*ALL_TO_ALL is missing"),
        (without("ALL_TO_ALL grad_output(0)"), r"1.0\) reads grad_output\(0\).* dimension 1 .*ALL_TO_ALL is missing"),
        (without("ALL_GATHER output(0)"), r"as \(a shard of dimension 0, an unequal shard.*ALL_GATHER is missing"),
        (twice("ALL_TO_ALL output(0)"), r"ALL_TO_ALL output\(0\).*"),
    ],
)
def test_a_missing_or_doubled_collective_is_refused(change: Callable[[list[Instruction]], None], message: str) -> None:
    program = compiled()
    verify(program)
    with pytest.raises(ProgramError, match=message):
        verify(on(program, all_of(program), change))


def test_entries_are_not_exchanged_before_their_counts() -> None:
    program = compiled()

    def swapped(row: list[Instruction]) -> None:
        at = place(row, "ALL_GATHER output(0)")
        gather, exchange = row[at : at + 2]
        (start,), (end,) = gather.reads, exchange.writes
        between = start._replace(form=start.form.replace("U0", "U1"))
        row[at] = exchange._replace(reads=(start,), writes=(between,), frees=(start,))
        row[at + 1] = gather._replace(reads=(between,), writes=(end,), frees=(between,))

    with pytest.raises(ProgramError, match="whose counts are not whole; ALL_GATHER of the counts is missing before it"):
        verify(on(program, all_of(program), swapped))


# In slices of sequences -----------------------------------------------------------------------------------------------


def test_each_slice_exchanges_its_tokens(clusters: Clusters) -> None:
    model = partial(MODEL, capacity=None, balance=False)
    run = train(
        model, TEXT, "ep=2 schedule=seq1f1b slices=8,4 microbatches=2", cluster=clusters(2), check=True, batch=16,
        steps=1, loss=models.mixture_loss, dtype=torch.float64, progress=False,
    )  # fmt: skip
    assert run.max_error() < 1e-10
    layers, slices, microbatches = 2, 2, 2
    assert exchanged(run.program) == dict.fromkeys(("output", "grad_output"), 2 * layers * slices * microbatches)
    # Half of what a slice sends, as far as one can tell before: of 4 rows of a rank each token twice.
    exchanges = [ins for ins in run.program.ranks[0] if ins.op is Op.ALL_TO_ALL]
    assert {run.predicted.sent(0, ins) for ins in exchanges} == {4 * n * 2 * 16 * 8 // 2 for n in (8, 4)}


@pytest.mark.parametrize(
    ("numbers", "what"),
    [
        ({}, "capacity=1.25 and balance=True are"),
        ({"capacity": None}, "balance=True is"),
        ({"balance": False}, r"capacity=1.25 is"),
    ],
)
def test_what_is_of_whole_rows_is_refused_in_slices(clusters: Clusters, numbers: dict[str, Any], what: str) -> None:
    told = rf"layer 1 \(MixtureBlock: {what} about all tokens of a row; without them, capacity=None balance=False, it"
    for plan, ranks in (("ep=2 schedule=terapipe slices=2", 2), ("pp=1 schedule=seq1f1b slices=2", 1)):
        with pytest.raises(PlanError, match=told):
            train(
                partial(MODEL, **numbers), TEXT, plan, cluster=clusters(ranks), steps=1, batch=4,
                loss=models.mixture_loss, progress=False,
            )  # fmt: skip
    shape = models.shape("gpt-moe-tiny", **SIZES, **numbers)
    with pytest.raises(PlanError, match=told):
        Plan.parse("schedule=seq1f1b slices=2").compile(shape)


# How busy the experts are ---------------------------------------------------------------------------------------------


@pytest.mark.many(2)
@pytest.mark.parametrize(
    ("plan", "ranks", "capacity"),
    [
        ("ep=2 dp=2 checkpoint=1", 4, None),
        ("ep=2 pp=2 microbatches=2", 4, 1.0),
        ("tp=2", 2, 1.0),
        ("ep=2 schedule=seq1f1b slices=8,4 microbatches=2", 2, None),
    ],
)
def test_the_load_of_a_run(clusters: Clusters, plan: str, ranks: int, capacity: float | None) -> None:
    x, y = TEXT.batch(0, 16)
    model = partial(MODEL, capacity=capacity, balance=False)
    run = train(
        model, (x, y), plan, cluster=clusters(ranks), progress=False, steps=2, loss=models.mixture_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0), dtype=torch.float64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = models.mixture_load(model().double(), x)
    assert run.expert_load == total([whole, whole])  # two steps
    assert (sum(map(sum, run.expert_load.dropped)) > 0) == (capacity is not None)
    assert sum(run.expert_load.tokens[0]) == 2 * 16 * 12 * 2


def test_no_load_without_experts(clusters: Clusters) -> None:
    run = train(partial(models.build, "mlp-tiny"), data.for_model("mlp-tiny"), cluster=clusters(1), progress=False)
    with pytest.raises(MiniparError, match="expert_load: nothing was counted"):
        print(run.expert_load)


def test_the_balance_loss_is_part_of_the_gradient(clusters: Clusters) -> None:
    without = run_of(clusters, "ep=2", 2, steps=1, loss=partial(models.mixture_loss, balance=0.0))
    heavy = run_of(clusters, "ep=2", 2, steps=1, loss=partial(models.mixture_loss, balance=10.0))
    assert heavy.losses[0] > without.losses[0] + 10
    assert heavy.max_error() < 1e-10


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        (
            "gpt-tiny",
            "ep=2",
            r"ep=2: the model has no experts \(\*.experts.up\); possible are dp=2 or a mixture such as",
        ),
        ("gpt-moe-tiny", "ep=3", "ep=3: must divide the 8 experts of 1.mixture.experts.up; possible are 1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_divided(clusters: Clusters, name: str, plan: str, message: str) -> None:
    with pytest.raises((PlanError, RankError), match=message):
        train(
            partial(models.build, name), data.for_model(name), plan, cluster=clusters(int(plan[-1])), batch=6, steps=1,
            loss=models.loss_of(name), progress=False,
        )  # fmt: skip
