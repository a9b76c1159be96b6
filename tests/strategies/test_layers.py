"""From actions to instructions: what each reads, writes and frees."""

import pytest

from minipar import Backward, Forward, Plan, PlanError
from minipar.program import grad, grad_output, output, param, saved
from minipar.strategies.layout import Layout
from minipar.strategies.passes.layers import expand
from tests.interpreters import compiled, shape


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
