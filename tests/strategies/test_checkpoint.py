"""The checkpoint pass: what a forward keeps and a recomputation makes; its programs verify, and have the right cost."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minipar import Backward, Forward, Plan, Program, ProgramError, simulate, verify
from minipar.costs.recomputation import LayerCosts, in_segments
from minipar.prediction.plain_simulator import start_and_end
from minipar.program import Op, output, param, saved
from minipar.program.shape import Shape
from minipar.strategies.layout import Layout
from minipar.strategies.passes.checkpoint import recompute
from minipar.strategies.passes.layers import expand
from minipar.strategies.segments import budget_of
from tests.fuzz.fingerprints import judge
from tests.interpreters import (
    SIMPLE,
    RandomCosts,
    compiled,
    programs,
    shape,
)
from tests.recomputing import ByLayer

pytestmark = pytest.mark.many(3)


@pytest.fixture
def unfused(monkeypatch):
    """Plans compile without the last pass."""
    monkeypatch.setattr("minipar.strategies.passes.fuse.fuse", lambda instructions, *_: list(instructions))


def text(row):
    return " | ".join(str(ins) for ins in row)


def stage(actions, layers=4, microbatches=2, frozen=(), segments=(range(2), range(2, 4))):
    """The unfused instructions of one device, in segments."""
    layout = Layout(shape(layers, frozen=frozen), 1, 1, (layers,), microbatches)
    (row,) = expand([actions], layout)
    return recompute(row, [(layout.trained(0), in_segments(layers - len(frozen), segments))])


# what each instruction reads, writes and frees -----------------------------------------------------------------------


def test_the_picture():
    row = stage([Forward(0), Backward(0)])
    assert text(row).replace(" mb0", "") == "F 0 | F 1 | F 2 | F 3 | B 3 | B 2 | R 0 | R 1 | B 1 | B 0"
    assert [ins.writes for ins in row[:4]] == [
        (output(0, 0),), (output(1, 0),), (output(2, 0), saved(2, 0)), (output(3, 0), saved(3, 0)),
    ]  # fmt: skip
    assert [ins.frees for ins in row[:4]] == [(), (output(0, 0),), (), ()]
    assert row[6].reads == (param(0),)  # the input rows are at hand
    assert row[6].writes == (output(0, 0), saved(0, 0))
    assert row[7].reads == (output(0, 0), param(1))
    assert row[7].writes == (saved(1, 0),)  # its output was needed by B 2 alone
    assert output(1, 0) in row[5].frees  # the checkpoint


def test_a_forward_whose_backward_comes_later_keeps_nothing_of_any_segment():
    row = stage([Forward(0), Forward(1), Backward(1), Backward(0)])
    assert text(row[:4]) == "F 0 mb0 | F 1 mb0 | F 2 mb0 | F 3 mb0"
    assert all(value.kind == "output" for ins in row[:4] for value in ins.writes)
    assert text(row[8:]).startswith(
        "B 3 mb1 | B 2 mb1 | R 0 mb1 | R 1 mb1 | B 1 mb1 | B 0 mb1 | R 2 mb0 | R 3 mb0 | B 3"
    )
    last = next(ins for ins in row if ins.op is Op.RECOMPUTE and ins.layers == (3,))
    assert last.writes == (saved(3, 0),)  # the loss is there already
    assert last.reads == (output(2, 0), param(3))


def test_a_schedule_without_recomputation_changes_nothing():
    (row,) = expand([[Forward(0), Backward(0)]], Layout(shape(3), 1, 1, (3,), 1))
    assert recompute(row, [(range(3), in_segments(3, ()))]) == row
    assert recompute(row, [(range(3), ())]) == row
    everything = compiled("pp=2 microbatches=3 checkpoint=none", 5)
    assert everything.ranks == compiled("pp=2 microbatches=3", 5).ranks


def test_recomputation_runs_while_the_gradient_is_on_its_way():
    first, second = compiled("pp=2 checkpoint=1 microbatches=2", 4).ranks
    assert text(first) == (
        "F 0:2 mb0 | SEND output(1) mb0 -> 1 | F 0:2 mb1 | SEND output(1) mb1 -> 1 | "
        "R 1 mb0 | RECV grad_output(1) mb0 <- 1 | B 1 mb0 | R 0 mb0 | B 0 mb0 | "
        "R 1 mb1 | RECV grad_output(1) mb1 <- 1 | B 1 mb1 | R 0 mb1 | B 0 mb1 | STEP 0:2"
    )
    assert "F 2:4 mb1 | B 3 mb1 | R 2 mb1 | B 2 mb1 | SEND" in text(second)


# everything composes -------------------------------------------------------------------------------------------------

CHOICES = ["none", "sqrt", 1, 2, 3, (1,), (2, 3), "1KiB"]


def checkpointed(program: Program, choice: object) -> Program:
    """The program of the same plan and model with another `checkpoint=`."""
    plan = replace(Plan.parse(program.name), checkpoint=choice)
    costs = LayerCosts.equal(program.layers, output=3, saved=5)
    return plan.compile(
        Shape(program.layers, program.groups, carries=program.carries), steps=program.steps, check=False, costs=costs
    )


def fits(program: Program, choice: object) -> object:
    """A choice that the model allows."""
    if isinstance(choice, int):
        return min(choice, program.layers)
    if isinstance(choice, tuple):
        return tuple(layer for layer in choice if layer < program.layers) or "none"
    if budget_of(choice) is not None and Plan.parse(program.name).schedule not in SIMPLE:
        return "sqrt"  # (a budget is refused)
    return choice


@given(programs(), st.sampled_from(CHOICES[1:]))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_every_plan_with_checkpoints_verifies_and_is_right(plain, choice):
    program = checkpointed(plain, fits(plain, choice))
    verify(program)
    assert judge(program) == ""
    costs = RandomCosts(len(program))
    trace = simulate(program, costs)
    assert (trace.starts, trace.ends) == start_and_end(program, costs)


def test_gradients_are_sent_as_early_as_without_checkpoints():
    program = compiled("dp=2 bucket=none checkpoint=2", 4)
    assert text(program.ranks[0]) == (
        "F 0:4 mb0 | B 3 mb0 | ALL_REDUCE 3 over 0,1 | B 2 mb0 | ALL_REDUCE 2 over 0,1 | R 0:2 mb0 | "
        "B 1 mb0 | ALL_REDUCE 1 over 0,1 | B 0 mb0 | ALL_REDUCE 0 over 0,1 | STEP 0:4"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: [ins for ins in row if ins.op is not Op.RECOMPUTE], "backward before forward: "),
        (
            lambda row: [i._replace(reads=()) if i.op is Op.RECOMPUTE else i for i in row],
            "needs param(0), but does not",
        ),
        (
            lambda row: [i._replace(writes=(param(0),)) if i.op is Op.RECOMPUTE else i for i in row],
            "cannot make param(0)",
        ),
        (
            lambda row: [i._replace(microbatch=7, writes=()) if i.op is Op.RECOMPUTE else i for i in row],
            "works on a layer, micro-batch or step that is not there",
        ),
        (lambda row: [k for i in row for k in [i] * (1 + (i.op is Op.RECOMPUTE))], "is written twice"),
    ],
)
def test_wrong_recomputation_is_refused(change, says):
    program = compiled("checkpoint=1", 2)
    assert text(program.ranks[0]) == "F 0:2 mb0 | B 1 mb0 | R 0 mb0 | B 0 mb0 | STEP 0:2"
    with pytest.raises(ProgramError, match=r".*") as error:
        verify(program.with_rank(0, change(list(program.ranks[0]))))
    assert says in str(error.value)


# costs ---------------------------------------------------------------------------------------------------------------


def peak_and_time(plan, layers, costs):
    program = Plan.parse(plan).compile(layers=layers, costs=costs)
    trace = replace(simulate(program, ByLayer(costs)), data=[costs.output[0]] * len(program.ranks))
    return trace.peak_memory()[0], trace.time


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("length", [1, 2, 4, 8, 16, 32, 64])
def test_64_layers_of_one_tensor_need_n_over_s_plus_s_plus_1_units(length):
    costs = LayerCosts.equal(64)
    peak, spent = peak_and_time(f"checkpoint={length}", 64, costs)
    assert peak == 64 / length + length + 1
    assert spent == 64 * 3 + (64 - length)  # each layer but those of the last segment once more
    assert peak_and_time("checkpoint=none", 64, costs) == (66, 192)


@pytest.mark.usefixtures("unfused")
def test_segments_of_8_need_17_units_where_plain_needs_66_and_measured_sizes_find_the_minimum():
    assert peak_and_time("checkpoint=sqrt", 64, LayerCosts.equal(64)) == (17, 248)
    blocks = LayerCosts.equal(64, saved=3)
    found = {s: peak_and_time(f"checkpoint={s}", 64, blocks)[0] for s in (1, 2, 4, 8, 16, 32, 64)}
    assert peak_and_time("checkpoint=sqrt", 64, blocks)[0] == min(found.values()) == found[4]


@pytest.mark.parametrize(
    "plan", ["pp=1 microbatches=3", "pp=4 microbatches=6", "pp=2 dp=2 microbatches=4 accumulate=2"]
)
@pytest.mark.parametrize("schedule", SIMPLE)
def test_extra_forwards_are_counted_exactly(plan, schedule):
    """Every layer runs again once per micro-batch, except the last segment where backward follows at once."""
    program = compiled(f"{plan} schedule={schedule} checkpoint=2", 16)
    for row in program.ranks:
        compute = [ins for ins in row if ins.stream == "compute"]
        at_once = sum(
            a.op is Op.FORWARD and b.op in (Op.BACKWARD, Op.RECOMPUTE) and a.microbatch == b.microbatch
            for a, b in pairwise(compute)
        )
        held = len({layer for ins in compute if ins.op is Op.FORWARD for layer in ins.layers})
        again = sum(len(ins.layers) for ins in compute if ins.op is Op.RECOMPUTE)
        assert again == held * program.microbatches - 2 * at_once
    last = [ins.microbatch for ins in program.ranks[-1] if ins.op is Op.RECOMPUTE]
    assert last  # (also on the last rank, of its other segments)
