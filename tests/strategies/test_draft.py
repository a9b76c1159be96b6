"""A user's own passes: their place among the passes, what they may do, and the errors for their mistakes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import minipar
from minipar import Draft, Plan, PlanError, ProgramError, simulate
from minipar.program import Op
from minipar.strategies import draft as drafts
from minipar.strategies.passes.checkpoint import recompute
from minipar.strategies.segments import schedules
from tests.comparing import check
from tests.toys import rows, toy


@pytest.fixture(autouse=True)
def own_passes(monkeypatch):
    """Passes registered in a test are forgotten after it."""
    monkeypatch.setattr(drafts, "_passes", {})


def some_microbatches(count: int):
    """Megatron's partial checkpointing: layers run forward again for the first micro-batches only."""

    @minipar.pass_("some-microbatches", after="layers")
    def some(draft: Draft) -> Draft:
        moves = schedules(1, draft.layout, draft.actions)

        def again(rank, row):
            chunks = [(draft.layout.trained(s), moves[s]) for s in draft.layout.placement[rank]]
            return recompute(row, chunks, microbatches=range(count))

        return draft.each(again)

    return some


def test_some_microbatches_run_forward_again(clusters):
    some_microbatches(2)
    plan = Plan(pp=2, schedule="gpipe", microbatches=4, extra_passes="some-microbatches")
    program = plan.compile(layers=6)
    again = {ins.microbatch for row in program.ranks for ins in row if ins.op is Op.RECOMPUTE}
    assert again == {0, 1}
    keys = {"pp": 2, "schedule": "gpipe", "microbatches": 4}
    plans = [Plan(**keys, checkpoint=1), plan, Plan(**keys)]
    peaks = [max(simulate(each.compile(layers=6), forward=1.0, backward=2.0).peak_memory()) for each in plans]
    assert peaks[0] < peaks[1] < peaks[2]
    check(clusters, plan, partial(toy, ("linear", "tuples", "dropout"), tied=True), rows(11), steps=4)


@pytest.mark.parametrize("text", ["dp=2 sync=ps", "dp=2 sync=ps mode=async", "pp=2 schedule=pipedream"])
def test_one_of_ones_own_works_on_workers_of_servers_and_without_flushes(clusters, text):
    some_microbatches(2)
    plan = Plan.parse(f"{text} microbatches=4 extra_passes=some-microbatches")
    model = partial(toy, ("linear", "tuples", "dropout"))
    keys = {"loss": torch.nn.functional.mse_loss, "dtype": torch.float64, "check": True, "progress": False}
    run = minipar.train(model, rows(11), plan, cluster=clusters(plan.ranks), steps=3, **keys)
    found = [(ins.step, ins.microbatch) for row in run.program.ranks for ins in row if ins.op is Op.RECOMPUTE]
    assert {i for _, i in found} <= {0, 1}
    assert {step for step, _ in found} == {0, 1, 2}
    assert run.max_gradient_error() < 1e-12


@pytest.mark.parametrize("after", drafts.PLACES)
def test_a_pass_stands_where_it_was_told_to(after):
    seen = []

    @minipar.pass_("look", after=after)
    def look(draft):
        seen.append((draft.step, {ins.op for row in draft.ranks for ins in row}))
        return draft

    keys = {"pp": 2, "dp": 2, "microbatches": 2, "checkpoint": 1}
    mine, plain = (plan.compile(layers=4, steps=2) for plan in (Plan(**keys, extra_passes="look"), Plan(**keys)))
    assert mine.ranks == plain.ranks
    assert [step for step, _ in seen] == [0, 1]
    for _, ops in seen:
        place = drafts.PLACES.index(after)
        assert (Op.RECOMPUTE in ops) == (place >= drafts.PLACES.index("checkpoint"))
        assert (Op.ALL_REDUCE in ops) == (place >= drafts.PLACES.index("data_parallel"))
        assert (Op.SEND in ops) == (place >= drafts.PLACES.index("transfers"))
        assert (Op.STEP in ops) == (place >= drafts.PLACES.index("update"))


def test_several_stand_in_the_order_of_the_plan():
    seen = []
    for name in ("a", "b"):
        minipar.pass_(name)(lambda draft, name=name: seen.append(name) or draft)
    Plan(extra_passes="b,a").compile(layers=2)
    assert seen == ["b", "a"]
    assert str(Plan(extra_passes=("b", "a"))) == "dp=1 pp=1 extra_passes=b,a"
    assert Plan.parse(str(Plan(extra_passes="b,a"))) == Plan(extra_passes=["b", "a"])


def test_a_program_that_a_pass_broke_names_the_pass():
    @minipar.pass_("forgetful")
    def forgetful(draft):
        return draft.each(lambda rank, row: row[1:])

    with pytest.raises(ProgramError, match="the plan's own passes rewrote this program: forgetful"):
        Plan(pp=2, extra_passes="forgetful").compile(layers=4)


@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        (lambda draft: None, "pass 'mine': gave None; it must return a Draft"),
        (lambda draft: draft.ranks, "it must return a Draft"),
        (lambda draft: Draft(draft.plan, draft.layout, draft.step, draft.ranks[:1]), "gave 1 ranks for 2"),
        (lambda draft: draft.each(lambda rank, row: ["F0"]), "rank 0 has 'F0', which is no Instruction"),
    ],
)
def test_what_a_pass_may_not_give(rewrite, words):
    minipar.pass_("mine")(rewrite)
    with pytest.raises(PlanError) as raised:
        Plan(pp=2, extra_passes="mine").compile(layers=4)
    assert words in str(raised.value)


def test_unknown_names_and_places():
    with pytest.raises(PlanError, match="extra_passes=mine: unknown; none is registered"):
        Plan(extra_passes="mine")
    with pytest.raises(PlanError, match=r"after='between' is no place; possible are layers, bucket, checkpoint"):
        minipar.pass_("mine", after="between")
    with pytest.raises(PlanError, match="must be one word"):
        minipar.pass_("my pass")
    minipar.pass_("mine")(lambda draft: draft)
    with pytest.raises(PlanError, match="extra_passes=other: unknown; possible are mine"):
        Plan(extra_passes="other")
    with pytest.raises(PlanError, match="named twice"):
        Plan(extra_passes="mine,mine")
