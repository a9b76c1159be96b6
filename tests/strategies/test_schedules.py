"""The built-in schedules: the order of every rank, as their papers draw it."""

import pytest

from minipar import Backward, BackwardInput, BackwardWeight, Forward, Plan, PlanError
from minipar.strategies import find, schedule
from minipar.strategies.schedules import registry
from tests.interpreters import BUILT_IN, COPIED, compiled, enough, even

KINDS = (Forward, Backward, BackwardInput, BackwardWeight)


def order(name, rank, stages, microbatches):
    names = dict(zip(KINDS, "FBIW", strict=True))
    actions = Plan(pp=stages, schedule=name, microbatches=microbatches).actions(rank)
    return " ".join((names[type(a)].lower() if a.chunk else names[type(a)]) + str(a.microbatch) for a in actions)


def test_gpipe_runs_all_forwards_then_all_backwards():
    for rank in range(3):
        assert order("gpipe", rank, 3, 4) == "F0 F1 F2 F3 B0 B1 B2 B3"


def test_naive_runs_one_microbatch_at_a_time():
    for rank in range(3):
        assert order("naive", rank, 3, 3) == "F0 B0 F1 B1 F2 B2"


def test_1f1b_warms_up_less_the_later_the_stage():
    assert [order("1f1b", rank, 3, 4) for rank in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_eager_1f1b_warms_up_twice_as_long():
    assert [order("eager-1f1b", rank, 3, 6) for rank in range(3)] == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_chimera_sends_half_of_the_microbatches_up_the_ranks():
    assert [order("chimera", rank, 4, 4) for rank in range(4)] == [
        "F0 F1 f2 b2 f3 b3 B0 B1",
        "F0 f2 F1 f3 b2 B0 b3 B1",
        "f2 F0 f3 F1 B0 b2 B1 b3",
        "f2 f3 F0 B0 F1 B1 b2 b3",
    ]
    plan = Plan(pp=2, schedule="chimera", microbatches=4, doubling=True)
    assert [(type(a), a.microbatch, a.chunk) for a in plan.actions(0)][:6] == [
        (Forward, 0, 0), (Forward, 2, 0), (Forward, 1, 1), (Forward, 3, 1), (Backward, 1, 1), (Backward, 0, 0)
    ]  # fmt: skip


def test_dualpipe_has_eight_steps():
    assert [order("dualpipe", rank, 4, 8) for rank in (0, 1)] == [
        "F0 F1 F2 f4 i4 w4 f5 F3 b5 f6 B0 b6 f7 B1 b7 I2 W2 I3 W3",
        "F0 f4 F1 f5 F2 b4 f6 B0 F3 b5 f7 B1 b6 B2 i7 I3 w7 W3",
    ]
    for rank in (0, 1):  # what goes down here goes up at the other end
        mirrored = order("dualpipe", 3 - rank, 4, 8).translate(str.maketrans("01234567", "45670123")).swapcase()
        assert mirrored == order("dualpipe", rank, 4, 8)
    assert [order("dualpipe-v", rank, 2, 4) for rank in (0, 1)] == [
        "F0 F1 F2 f0 i0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 I2 W2 I3 W3",
        "F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 i3 I3 w3 W3",
    ]


def test_with_fewer_microbatches_than_stages_1f1b_is_gpipe_at_the_start():
    assert order("1f1b", 0, 5, 2) == order("gpipe", 0, 5, 2) == "F0 F1 B0 B1"
    assert order("1f1b", 3, 5, 2) == "F0 F1 B0 B1"
    assert order("1f1b", 4, 5, 2) == "F0 B0 F1 B1"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_schedule_runs_every_microbatch_once_backward_after_forward(name):
    for stages in (1, 2, 5):
        for m in (1, 2, 3, 7, 12):
            pp = even(name, stages)
            plan = Plan(pp=pp, schedule=name, microbatches=enough(name, pp, m))
            for rank in range(pp):
                actions = plan.actions(rank)
                places = [(i, c) for i in range(plan.microbatches * plan.slice_count) for c in range(find(name).chunks)]
                if name in COPIED:  # each micro-batch goes through one of the copies
                    places = [place for place in places if Forward(*place) in actions]
                    assert len(places) == plan.microbatches
                halves = sum(isinstance(action, BackwardWeight) for action in actions)
                assert len(actions) == 2 * len(places) + halves
                for place in places:
                    order = [actions.index(kind(*place)) for kind in KINDS if kind(*place) in actions]
                    assert order == sorted(order)
                    assert len(order) in (2, 3)


def test_actions_of_different_kinds_differ():
    assert Forward(0) != Backward(0)
    assert Forward(1) == Forward(1, chunk=0)
    assert len({Forward(0), Backward(0), Forward(0)}) == 2
    assert repr(Backward(3)) == "Backward(microbatch=3, chunk=0)"


def test_the_table_of_schedules():
    assert {"gpipe", "naive", "1f1b", "eager-1f1b"} <= set(BUILT_IN)
    for s in (find(name) for name in BUILT_IN):
        assert s.summary
        assert "\n" not in s.summary
        assert s.time
        assert s.peak
        assert s.paper


def test_registering_again_replaces(monkeypatch):
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    for count in (1, 2):

        @schedule("cell")
        def cell(rank, stages, microbatches, count=count):
            """Run again in a notebook."""
            yield from (Forward(i) for i in range(count))

    assert len(list(find("cell").generate(0, 1, 5))) == 2
    assert find("cell").summary == "Run again in a notebook."
    assert find("cell").time == ""
    assert Plan(schedule="cell").schedule == "cell"


def test_an_unknown_schedule():
    with pytest.raises(PlanError, match=r"^schedule=1f1: unknown; possible are "):
        find("1f1")


def test_ranks_of_a_program_follow_the_schedule():
    program = compiled("pp=3 microbatches=4 schedule=1f1b", 6)
    for stage, row in enumerate(program.ranks):
        ran = " ".join(f"{ins.op.value}{ins.microbatch}" for ins in row if ins.op.value in "FB")
        assert ran == order("1f1b", stage, 3, 4)
