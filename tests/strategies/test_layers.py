"""From actions to instructions: what each reads, writes and frees; how they are sent, and fused."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given

from minipar import Backward, Forward, Plan, PlanError, simulate, verify
from minipar.program import Instruction, Op, Part, grad, grad_output, output, param, saved
from minipar.program.shape import Shape
from minipar.strategies.layout import Layout
from minipar.strategies.passes.fuse import FUSIBLE, fuse
from minipar.strategies.passes.layers import expand
from minipar.strategies.passes.transfers import beside, insert_transfers
from tests.fuzz.fingerprints import judge
from tests.interpreters import compiled, programs, shape


def layout(model, split=None, dp=1, microbatches=2):
    split = split or (model.layers,)
    return Layout(model, dp, len(split), tuple(split), microbatches)


def test_a_layer_reads_what_the_one_before_hands_on():
    (row,) = expand([[Forward(1)]], layout(shape(3)))
    assert [str(ins) for ins in row] == ["F 0 mb1", "F 1 mb1", "F 2 mb1"]
    assert [ins.reads for ins in row] == [(param(0),), (output(0, 1), param(1)), (output(1, 1), param(2))]
    assert [ins.writes for ins in row] == [(output(k, 1), saved(k, 1)) for k in range(3)]
    assert all(ins.frees == () for ins in row)  # backward needs them


def test_backward_runs_from_the_last_layer_and_frees_all_it_used():
    (row,) = expand([[Backward(0)]], layout(shape(3)))
    assert [str(ins) for ins in row] == ["B 2 mb0", "B 1 mb0", "B 0 mb0"]
    last, middle, first = row
    assert set(last.reads) == {saved(2, 0), output(2, 0), output(1, 0), param(2)}  # (its output is the loss)
    assert set(middle.reads) == {saved(1, 0), grad_output(1, 0), output(0, 0), param(1)}
    assert set(first.reads) == {saved(0, 0), grad_output(0, 0), param(0)}
    assert [set(ins.writes) for ins in row] == [{grad_output(1, 0), grad(2)}, {grad_output(0, 0), grad(1)}, {grad(0)}]
    for ins in row:
        assert set(ins.frees) == {value for value in ins.reads if value.kind != "param"}


def test_a_frozen_prefix_has_no_backward_and_keeps_nothing():
    (row,) = expand([[Forward(0), Backward(0)]], layout(shape(4, frozen=[0, 1])))
    assert [str(ins) for ins in row] == ["F 0 mb0", "F 1 mb0", "F 2 mb0", "F 3 mb0", "B 3 mb0", "B 2 mb0"]
    assert row[0].writes == (output(0, 0),)
    assert row[1].writes == (output(1, 0),)
    assert row[1].frees == (output(0, 0),)
    assert row[2].writes == (output(2, 0), saved(2, 0))
    assert row[2].frees == ()
    assert row[5].writes == (grad(2),)  # no gradient for the frozen layers
    assert output(1, 0) in row[5].frees


def test_a_frozen_layer_in_the_middle_passes_the_gradient_on():
    (row,) = expand([[Forward(0), Backward(0)]], layout(shape(3, frozen=[1])))
    middle = row[4]
    assert str(middle) == "B 1 mb0"
    assert middle.writes == (grad_output(0, 0),)
    assert param(1) in middle.reads


def test_a_tied_set_is_one_gradient_of_two_layers():
    model = shape(3, tied=[(0, 2)])
    (row,) = expand([[Forward(0), Backward(0)]], layout(model))
    assert [set(ins.reads) & {param(3)} for ins in row[:3]] == [{param(3)}, set(), {param(3)}]
    assert [grad(3) in ins.writes for ins in row[3:]] == [True, False, True]
    tied = layout(model, (1, 1, 1), dp=2)
    assert tied.holders(3) == (0, 2, 3, 5)
    assert tied.holders(1) == (1, 4)
    assert tied.groups(2) == (2, 3)


def test_a_frozen_tied_set_has_no_gradient_but_is_held():
    model = shape(3, frozen_sets=[(0, 2)])
    assert layout(model, (1, 1, 1)).groups(0) == (0, 3)
    assert layout(model, (1, 1, 1)).trainable(0) == (0,)
    program = compiled("pp=3", model)
    assert param(3) in program.state[0]
    assert grad(3) not in {value for row in program.ranks for ins in row for value in ins.writes}


def test_ranks_of_a_pipeline_are_neighbours():
    here = layout(shape(5), (2, 1, 2), dp=2)
    assert [here.rank(replica, stage) for replica in range(2) for stage in range(3)] == [0, 1, 2, 3, 4, 5]
    assert [list(here.layers(stage)) for stage in range(3)] == [[0, 1], [2], [3, 4]]
    program = Plan(pp=3, dp=2, split=(2, 1, 2)).compile(layers=5)
    assert [program.replica(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert program.placement == ((0, 1), (2,), (3, 4)) * 2


@pytest.mark.parametrize("action", [Forward(2), Forward(-1), Backward(0, chunk=1)])
def test_actions_on_what_is_not_there(action):
    with pytest.raises(PlanError, match="rank 0 has micro-batches 0 to 1 and only chunk 0"):
        expand([[action]], layout(shape(2)))


# Sends and receives: their places in the program, and what they free --------------------------------------------------


def work(reads=(), writes=(), frees=(), microbatch=0):
    return Instruction(Op.FORWARD, (0,), microbatch, 0, tuple(reads), tuple(writes), tuple(frees))


def texts(row):
    return [str(ins) for ins in row]


X, Y = output(0, 0), output(0, 1)


def test_a_value_read_elsewhere_is_sent_and_received():
    make, use = work(writes=[X]), work(reads=[X], frees=[X])
    moved = insert_transfers({0: [make], 1: [use]})
    assert texts(moved[0]) == ["F 0 mb0", "SEND output(0) mb0 -> 1"]
    assert texts(moved[1]) == ["RECV output(0) mb0 <- 0", "F 0 mb0"]
    send, receive = moved[0][1], moved[1][0]
    assert (send.reads, send.writes, send.frees, send.stream) == ((X,), (), (X,), "send 1")
    assert (receive.reads, receive.writes, receive.frees, receive.stream) == ((), (X,), (), "recv 0")
    assert (send.microbatch, send.step, send.layers) == (0, 0, (0,))


def test_a_value_read_on_two_ranks_is_sent_to_each():
    moved = insert_transfers({0: [work(writes=[X])], 1: [work(reads=[X])], 2: [work(reads=[X])]})
    assert texts(moved[0]) == ["F 0 mb0", "SEND output(0) mb0 -> 1", "SEND output(0) mb0 -> 2"]
    assert [ins.frees for ins in moved[0][1:]] == [(), (X,)]


def test_what_is_made_beside_something_else_is_sent_after_it():
    other = output(1, 0)
    rows = {0: [work(writes=[X]), work(reads=[other]), work(reads=[other]), work()], 1: [work(reads=[X])]}
    assert texts(insert_transfers(rows, {X: other})[0]) == [*["F 0 mb0"] * 3, "SEND output(0) mb0 -> 1", "F 0 mb0"]
    assert texts(insert_transfers(rows, {X: Y})[0])[1] == "SEND output(0) mb0 -> 1"  # nobody reads that one here


def test_a_forward_beside_a_backward():
    """Both go to the same rank at once: one message, which is received before the first of its readers there."""
    program = compiled("pp=4 microbatches=8 schedule=dualpipe", 4)
    row = texts(program.ranks[1])
    k = row.index("F 1 mb3")
    assert row[k + 1 : k + 3] == ["B 2 mb5", "SEND output(1) mb3, grad_output(1) mb5 -> 2"]
    row = texts(program.ranks[2])
    k = row.index("RECV output(1) mb3, grad_output(1) mb5 <- 1")
    assert row[k + 1] in ("F 2 mb3", "B 1 mb5")
    layout = Plan(pp=2, microbatches=2).layout(shape(2))
    for after in (Forward(1), None):
        row = [Forward(0, beside=True), *([after] if after else [])]
        with pytest.raises(
            PlanError, match=r"chunk=0\) on rank 0: beside=True, but .* comes next; possible are Backward"
        ):
            beside([row, []], layout, 0)


def test_a_late_reader_does_not_change_the_order_of_the_link():
    makes = [work(writes=[X]), work(writes=[Y], microbatch=1)]
    uses = [work(reads=[Y], microbatch=1), work(reads=[X])]  # the other way round
    moved = insert_transfers({0: makes, 1: uses})
    assert texts(moved[0]) == ["F 0 mb0", "SEND output(0) mb0 -> 1", "F 0 mb1", "SEND output(0) mb1 -> 1"]
    assert texts(moved[1]) == ["RECV output(0) mb0 <- 0", "RECV output(0) mb1 <- 0", "F 0 mb1", "F 0 mb0"]


# Fusion: fewer instructions have the same effect, and keep their parts ------------------------------------------------


@pytest.fixture
def unfused(monkeypatch):
    """Plans compile without the last pass."""
    monkeypatch.setattr("minipar.strategies.passes.fuse.fuse", lambda instructions, *_: list(instructions))


def single(op, layer, i=0, step=0):
    return Instruction(op, (layer,), i, step)


def test_neighbouring_layers_of_one_microbatch_become_one():
    program = compiled("pp=1 microbatches=2", 3)
    assert [str(ins) for ins in program.ranks[0]] == ["F 0:3 mb0", "B 0:3 mb0", "F 0:3 mb1", "B 0:3 mb1", "STEP 0:3"]
    forward, backward = program.ranks[0][:2]
    assert forward.parts == tuple(Part(Op.FORWARD, k) for k in (0, 1, 2))
    assert backward.parts == tuple(Part(Op.BACKWARD, k) for k in (2, 1, 0))
    assert backward.layers == (0, 1, 2)


@pytest.mark.parametrize(
    "row",
    [
        [single(Op.FORWARD, 0), single(Op.FORWARD, 2)],  # a gap
        [single(Op.FORWARD, 1), single(Op.FORWARD, 0)],  # downwards
        [single(Op.BACKWARD, 0), single(Op.BACKWARD, 1)],  # upwards
        [single(Op.FORWARD, 0), single(Op.FORWARD, 1, i=1)],  # another micro-batch
        [single(Op.FORWARD, 0), single(Op.FORWARD, 1, step=1)],  # another step
        [single(Op.FORWARD, 1), single(Op.BACKWARD, 1)],  # another direction
        [single(Op.FORWARD, 0), single(Op.SEND, 0), single(Op.FORWARD, 1)],  # something between
        [single(Op.STEP, 0), single(Op.STEP, 1)],
    ],
)
def test_what_is_not_fused(row):
    assert fuse(row) == row


def effect(instructions):
    """What a sequence needs from outside, leaves behind, and takes away, one instruction after the other."""
    needs, made, gone = set(), set(), set()
    for ins in instructions:
        needs |= set(ins.reads) - made
        made |= set(ins.writes)
        gone |= set(ins.frees) - made
        made -= set(ins.frees)
    return needs, made, gone


@given(programs(most_microbatches=3))
def test_a_fused_instruction_has_the_net_effect_of_its_parts(program):
    plan = Plan.parse(program.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minipar.strategies.passes.fuse.fuse", lambda instructions, *_: list(instructions))
        long = plan.compile(
            Shape(program.layers, program.groups, carries=program.carries), steps=program.steps, check=False
        )
    for before, after in zip(long.ranks, program.ranks, strict=True):
        assert all(len(ins.layers) == 1 for ins in before if ins.op in FUSIBLE)
        rest = iter(before)
        for ins in after:
            count = max(1, len(ins.parts)) if ins.op in FUSIBLE else 1
            run = [next(rest) for _ in range(count)]
            if count > 1:
                assert [(one.op, one.layers[0]) for one in run] == [(part.op, part.layer) for part in ins.parts]
            else:
                assert run == [ins]
            assert effect(run) == effect([ins])
        assert next(rest, None) is None
        # nothing that could be fused is left: two neighbours of the same kind and micro-batch do not touch
        for (op, _, _), same in groupby(after, key=lambda ins: (ins.op, ins.microbatch, ins.step)):
            edges = [ins.layers for ins in same]
            if op is Op.FORWARD:
                assert all(b[0] != a[-1] + 1 for a, b in pairwise(edges))


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("plan", ["pp=2 dp=2 microbatches=3 schedule=gpipe", "dp=3 checkpoint=2"])
def test_fusing_changes_neither_time_nor_memory_nor_gradients(plan, monkeypatch):
    model = shape(6, tied=[(0, 5)], frozen=[2])
    long = compiled(plan, model)
    monkeypatch.undo()
    short = compiled(plan, model)
    assert len(long) > len(short)
    verify(long)
    assert judge(long) == judge(short) == ""
    for latency in (0.0, 0.5):
        a, b = simulate(long, latency=latency), simulate(short, latency=latency)
        assert a.time == pytest.approx(b.time, abs=1e-9)
        assert a.busy == pytest.approx(b.busy, abs=1e-9)
        assert a.in_flight() == b.in_flight()
