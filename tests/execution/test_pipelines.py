"""Every synchronous pipeline: its programs mean what they should, and what each of them has of its own is executed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minipar import Backward, BackwardInput, BackwardWeight, Forward, Plan, PlanError, ProgramError, simulate
from minipar.execution.execution import Execution
from minipar.program import Op, saved_weight
from minipar.strategies import schedule, schedules
from minipar.strategies.schedules import registry
from tests import comparing
from tests.fuzz.fingerprints import judge
from tests.toys import rows, toy

pytestmark = pytest.mark.many(6)

MODEL = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))  # 9 layers
NEW = ["interleaved", "interleaved chunks=1", "looped-bfs", "looped-bfs chunks=1", "zb-h1", "zb-h2", "zb-v"]
NEW += ["chimera", "chimera doubling=true", "dualpipe", "dualpipe-v"]


def check(clusters, text: str, model=MODEL, count: int = 17) -> Execution:
    return comparing.check(clusters, Plan.parse(text), model, rows(count))


def reused() -> torch.nn.Sequential:
    """One Linear, used twice in a row: a piece of the graph in which the halves cannot be told apart."""
    same = torch.nn.Linear(6, 6)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), same, torch.nn.ReLU(), same)


def test_a_layer_used_twice_in_one_stage(clusters):
    check(clusters, "pp=2 dp=2 schedule=zb-h1 microbatches=3 split=1,4 zero=2", reused, 8)


# programs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.many(6)
@pytest.mark.parametrize("name", sorted({*NEW, *(one.name for one in schedules())}))
def test_the_largest_sizes_verify(name, pytestconfig):
    """32 stages and 128 micro-batches or slices; in `make thorough` twice as many of both."""
    more = 2 if pytestconfig.getoption("--thorough") else 1
    cuts = {"terapipe": "slices={}", "seq1f1b": "slices=4 microbatches={}"}.get(name, "microbatches={}")
    parts = 128 * more // (4 if name == "seq1f1b" else 1)
    plan = Plan.parse(f"pp={32 * more} {cuts.format(parts)} schedule={name}")
    plan.compile(layers=96 * more if "slices" in cuts else 1 + max(map(max, plan.placement())))


def test_what_an_input_half_leaves_is_read_once():
    program = Plan.parse("pp=2 schedule=zb-h1 microbatches=3").compile(layers=4)
    row = program.ranks[1]
    halves = [ins for ins in row if ins.op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    assert [str(ins) for ins in halves] == [
        "I 2:4 mb0",
        "I 2:4 mb1",
        "W 2:4 mb0",
        "I 2:4 mb2",
        "W 2:4 mb1",
        "W 2:4 mb2",
    ]
    assert {saved_weight(2, 0), saved_weight(3, 0)} == {v for v in halves[0].writes if v.kind == "saved_weight"}
    assert halves[2].frees == (saved_weight(3, 0), saved_weight(2, 0))


# placements ----------------------------------------------------------------------------------------------------------


def test_gradients_of_copies_are_summed_as_soon_as_they_are_complete():
    """On both ranks in one order, however large a bucket."""

    def ends(text: str, rank: int) -> list[str]:
        row = Plan.parse(text).compile(layers=8).ranks[rank]
        return [str(ins) for ins in row if ins.op in (Op.BACKWARD, Op.ALL_REDUCE, Op.STEP)][-5:]

    assert ends("pp=4 microbatches=4 schedule=chimera", 1) == [
        "B 4:6 mb3", "ALL_REDUCE 5,4 over 1,2", "B 2:4 mb1", "ALL_REDUCE 3,2 over 1,2", "STEP 2:6"
    ]  # fmt: skip
    assert ends("pp=4 microbatches=4 schedule=chimera overlap=none", 1) == [
        "B 2:4 mb0", "B 4:6 mb3", "B 2:4 mb1", "ALL_REDUCE 2:6 over 1,2", "STEP 2:6"
    ]  # fmt: skip
    assert ends("pp=2 dp=2 microbatches=2 schedule=chimera bucket=none", 3) == [
        "B 1 mb1", "ALL_REDUCE 1 over 0,1,2,3", "B 0 mb1", "ALL_REDUCE 0 over 0,1,2,3", "STEP 0:8"
    ]  # fmt: skip


@pytest.mark.usefixtures("own_schedules")
def test_copies_that_complete_in_another_order_on_each_rank(clusters):
    """Rank 0 ends with stage 0, rank 1 with stage 1; their collectives have one order nevertheless."""

    @schedule("unlike", placement=both_ways, chunks=2)
    def unlike(rank, ranks, microbatches):
        yield Forward(0, 0)
        yield Forward(1, 1)
        yield Backward(1, 1)
        yield Backward(0, 0)

    program = check(clusters, "pp=2 microbatches=2 schedule=unlike split=4,5 bucket=flat").program
    late, early = "ALL_REDUCE 8,7,6,5,4 over 0,1", "ALL_REDUCE 3,2,9,0 over 0,1"
    ends = [[str(ins) for ins in row if ins.op in (Op.BACKWARD, Op.ALL_REDUCE)][-3:] for row in program.ranks]
    assert ends == [[late, "B 0:4 mb0", early], ["B 4:9 mb0", late, early]]


@pytest.fixture
def own_schedules(monkeypatch):
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))


def both_ways(rank, ranks, chunks):
    """Two copies of every stage, the second in the opposite order."""
    return rank, ranks - 1 - rank


@pytest.mark.usefixtures("own_schedules")
def test_two_copies_of_every_stage(clusters):
    """Even micro-batches go down the ranks, odd ones up; the copies' gradients are summed."""

    @schedule("both-ways", placement=both_ways, chunks=2)
    def both(rank, ranks, microbatches):
        for i in range(microbatches):
            yield Forward(i, i % 2)
        for i in range(microbatches):
            yield Backward(i, i % 2)

    for text in ("pp=4 microbatches=3", "pp=2 dp=2 microbatches=2 bucket=none checkpoint=1"):
        program = check(clusters, f"{text} schedule=both-ways").program
        assert judge(program) == ""
    program = Plan.parse("pp=2 microbatches=4 schedule=both-ways").compile(layers=4)
    assert program.placement == ((0, 1, 2, 3), (0, 1, 2, 3))
    trace = simulate(program, forward=1, backward=2)
    assert sum(trace.busy) == 2 * 4 * 3  # a copy is a rank's whole share of one micro-batch
    assert trace.in_flight() == [4, 4]
    with pytest.raises(PlanError, match=r"no micro-batch goes through chunk 1 of rank 0, a copy of stage 1; possible"):
        Plan.parse("pp=2 schedule=both-ways").compile(layers=4)


@pytest.mark.usefixtures("own_schedules")
@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (lambda rank, ranks, chunks: (rank,), "its placement gives rank 0 1 stage, not chunks=2"),
        (lambda rank, ranks, chunks: (rank, rank + 3), "its placement puts stage 2 on no rank; stages count from 0"),
    ],
)
def test_placements_that_cannot_be(placement, says):
    schedule("mine", placement=placement, chunks=2)(lambda rank, ranks, m: iter(()))
    with pytest.raises(PlanError) as error:
        Plan(pp=2, schedule="mine").compile(layers=8)
    assert str(error.value) == f"schedule=mine: {says}"


# refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pp=4 chunks=2", "chunks=2: schedule=1f1b has 1 a rank; possible with interleaved, looped-bfs"),
        ("pp=4 group=4", "group=4: schedule=1f1b has none; possible with interleaved"),
        ("schedule=interleaved chunks=0", "chunks=0: must be a whole number of at least 1"),
        (
            "pp=4 schedule=interleaved chunks=4 microbatches=4",
            "pp=4 chunks=4: 16 stages, more than layers (9); possible are chunks=1 to 2 where",
        ),
        (
            "pp=4 schedule=interleaved microbatches=10 group=3",
            "schedule=interleaved: group=3 with pp=4 microbatches=10: groups are of 4 to 10, the last one of",
        ),
        (
            "pp=4 schedule=interleaved microbatches=3",
            "schedule=interleaved: group=4 with pp=4 microbatches=3: a group needs at least 4 micro-batches; possible",
        ),
        (
            "pp=4 schedule=zb-h2 microbatches=6",
            "schedule=zb-h2: microbatches=6 cannot fill pp=4; possible are 7 or more, or schedule=zb-h1",
        ),
        ("pp=2 schedule=zb-v split=4,5", "split=4,5: 2 stages, but pp=2 chunks=2 has 4"),
        (
            "pp=3 schedule=chimera microbatches=3",
            "schedule=chimera: pp=3 is odd, and two ways need it even; possible are pp=2, 4",
        ),
        (
            "pp=4 schedule=chimera microbatches=9",
            "schedule=chimera: microbatches=9 is no multiple of pp=4; possible are 8, 12",
        ),
        (
            "pp=4 schedule=chimera microbatches=4 doubling=true",
            "doubling=true: microbatches=4 are less than two for each of pp=4; possible are microbatches=8 or more, or",
        ),
        ("pp=4 schedule=chimera doubling=2", "doubling=2: must be true or false"),
        (
            "pp=4 schedule=dualpipe microbatches=7",
            "schedule=dualpipe: microbatches=7 cannot fill pp=4; possible are 8 or more, or schedule=1f1b",
        ),
        (
            "pp=4 schedule=dualpipe microbatches=9",
            "schedule=dualpipe: microbatches=9 is odd, and each way takes half of them; possible are 8, 10",
        ),
        (
            "pp=2 dp=2 schedule=chimera microbatches=2 zero=2",
            "zero=2: not together with schedule=chimera (the copies of a stage work at different times",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(text, says):
    with pytest.raises(PlanError) as error:
        Plan.parse(text).compile(layers=9)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("own_schedules")
def test_a_weight_half_without_its_input_half_is_refused():
    @schedule("mine")
    def mine(rank, ranks, microbatches):
        for i in range(microbatches):
            yield Forward(i)
            yield BackwardWeight(i)
            yield BackwardInput(i)

    with pytest.raises(ProgramError, match=r"weight half before input half: rank 0 .* needs saved_weight\(1\) mb0"):
        Plan(schedule="mine").compile(layers=2)
