"""The list of a plan's passes: its members and their order; no pass uses another one. A user's own passes."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest

import minipar
from minipar import Draft, Plan, PlanError, ProgramError, simulate
from minipar.program import Op, grad, optimizer_shard, optimizer_state, param
from minipar.strategies import draft as drafts
from minipar.strategies import passes
from minipar.strategies.passes.checkpoint import recompute
from minipar.strategies.segments import schedules
from tests.comparing import check
from tests.toys import rows, toy

LISTS = {
    "dp=1": "layers update fuse",
    "pp=2": "layers data_parallel transfers update fuse",  # (tied layers may be on two ranks)
    "dp=2 checkpoint=sqrt": "layers checkpoint data_parallel update fuse",
    "dp=2 checkpoint=selective": "layers data_parallel update fuse",  # (inside a layer)
    "dp=2 bucket=auto": "layers bucket data_parallel update fuse",
    "dp=2 overlap=priority": "layers priority update fuse",
    "host_layers=0": "layers host_layers update fuse",
    "dp=2 zero=2 clip=1": "layers zero data_parallel clip update fuse",
    "zero=2": "layers update fuse",  # (nobody to share with)
    "dp=2 local_steps=3": "layers local_steps update fuse",
    "dp=2 compress=bf16 offload=activations": "layers data_parallel compress offload update fuse",
    "tp=2": "layers forms parts update fuse",
    "tp=2 dp=2 sequence_parallel=true clip=1": "layers data_parallel forms parts clip update fuse",
    "context_parallel=2 pp=2 zero=1": "layers data_parallel forms parts transfers update fuse",
    "ep=2 checkpoint=1": "layers checkpoint forms parts update fuse",
    "tp=2 batch_copies=2 microbatches=2": "layers forms parts copies update fuse",
    "tp=2 inference=true": "layers forms fuse",  # (no gradients)
    "pp=2 schedule=terapipe slices=4": "layers slices data_parallel transfers update fuse",
    "dp=2 sync=ps checkpoint=2": "layers checkpoint parameter_server fuse",  # (servers update)
    "pp=2 schedule=pipedream checkpoint=1": "layers checkpoint versions transfers fuse",
    "dp=2 pp=2 zero=1 clip=1 inference=true": "layers transfers fuse",  # (nothing is trained)
}


@pytest.fixture(autouse=True)
def own_passes(monkeypatch):
    """Passes registered in a test are forgotten after it."""
    monkeypatch.setattr(drafts, "_passes", {})


def names(plan: Plan) -> list[str]:
    return [each.name for each in plan.passes()]


@pytest.mark.parametrize(("words", "found"), LISTS.items())
def test_what_a_plan_needs_and_nothing_else(words, found):
    assert names(Plan.parse(words)) == found.split()


def test_places_are_all_passes_in_their_order():
    seen = set()
    for words in LISTS:
        found = names(Plan.parse(words))
        assert found == sorted(found, key=drafts.PLACES.index)
        seen.update(found)
    assert seen == set(drafts.PLACES)


def test_each_says_in_a_line_what_it_does():
    lines = [str(each) for each in Plan(dp=2, zero=1).passes()]
    assert lines[1] == f"zero             {minipar.strategies.passes.zero.shard.__doc__.splitlines()[0]}"
    for words in LISTS:
        for each in Plan.parse(words).passes():
            assert each.summary.endswith(".")
            assert "\n" not in str(each)
            assert len(str(each)) <= 120


@pytest.mark.parametrize("after", drafts.PLACES)
def test_passes_of_ones_own_stand_behind_their_place(after):
    @minipar.pass_("mine", after=after)
    def mine(draft: Draft) -> Draft:
        """Nothing."""
        return draft

    minipar.pass_("silent", after=after)(lambda draft: draft)
    for words in ("pp=1", "dp=2 pp=2 zero=1 checkpoint=2 clip=1"):
        plan = Plan.parse(f"{words} extra_passes=silent,mine")
        found = names(plan)
        place = found.index("mine")
        assert found[place - 1] == "silent"
        before = [name for name in found[: place - 1] if name in drafts.PLACES]
        assert before == [n for n in names(Plan.parse(words)) if drafts.PLACES.index(n) <= drafts.PLACES.index(after)]
        assert str(plan.passes()[place]) == "mine             Nothing."
        assert str(plan.passes()[place - 1]) == "silent           A pass of your own."


def test_a_pass_finds_in_the_draft_what_those_before_it_did():
    """With zero=1, STEP reads a slice of a gradient: nothing is left to sum whole, and the slice of the state stays."""
    seen = {}
    for after in ("layers", "zero", "data_parallel"):

        @minipar.pass_(f"look-{after}", after=after)
        def look(draft: Draft, after=after) -> Draft:
            seen[after] = draft
            return draft

    extra = ",".join(f"look-{after}" for after in ("layers", "zero", "data_parallel"))
    program = Plan.parse(f"dp=2 zero=1 extra_passes={extra}").compile(layers=1)
    assert seen["layers"].state == (frozenset([param(0), optimizer_state(0)]),)
    assert seen["layers"].update[0][0].reads[0] == grad(0)
    assert seen["zero"].state == (frozenset([param(0), optimizer_shard(0)]),) == program.state[:1]
    assert grad(0) not in seen["zero"].update[0][0].reads
    assert seen["data_parallel"].ranks == seen["zero"].ranks
    assert not any(ins.op is Op.ALL_REDUCE for row in program.ranks for ins in row)
    Plan.parse(f"dp=2 extra_passes={extra}").compile(layers=1)
    assert seen["data_parallel"].state == (frozenset([param(0), optimizer_state(0), grad(0)]),)  # a buffer that stays
    assert seen["data_parallel"].update[0][0].frees == ()


def test_no_pass_imports_another():
    folder = Path(passes.__file__).parent
    modules = sorted(folder.glob("*.py"))
    assert len(modules) > 10
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("minipar.strategies.passes") for name in imported), path.name


# Passes of one's own --------------------------------------------------------------------------------------------------


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
