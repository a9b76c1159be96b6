"""Fewer cores than ranks: equal to the plain simulation if there are enough cores, and exact if the answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar import Plan, PlanError, simulate
from minipar.costs.unit import UnitCosts
from minipar.prediction.oversubscription import best_way, walk_shared


@given(
    st.sampled_from(["naive", "gpipe", "1f1b", "eager-1f1b"]),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 5),
    st.lists(st.sampled_from([0.5, 1.0, 2.5]), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.25, 2.0]),
)
def test_with_cores_enough_it_is_the_plain_simulation(schedule, pp, dp, microbatches, factors, latency):
    program = Plan(schedule=schedule, pp=pp, dp=dp, microbatches=microbatches, bucket="none").compile(layers=5)
    costs = UnitCosts(program, latency=latency, stage_factors=tuple(factors[:pp]))
    plain = simulate(program, costs)
    starts, ends = walk_shared(program, costs, pp * dp)
    for mine, expected in ((starts, plain.starts), (ends, plain.ends)):
        for a, b in zip(mine, expected, strict=True):
            assert a == pytest.approx(b)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "naive"])
def test_one_core_does_all_the_work_in_a_row(schedule):
    program = Plan(schedule=schedule, pp=4, microbatches=8).compile(layers=4)
    assert simulate(program, forward=1, backward=2, cores=1).time == pytest.approx(4 * 8 * 3)


def test_two_ranks_on_one_core_run_at_half_speed():
    program = Plan(dp=2, microbatches=1).compile(layers=1)
    trace = simulate(program, forward=1, backward=2, cores=1)
    assert [trace.ends[rank][0] for rank in range(2)] == pytest.approx([2, 2])
    assert trace.time == pytest.approx(6)


@pytest.mark.parametrize(
    "words", ["dp=2", "dp=4 microbatches=2 bucket=none", "dp=4 zero=3", "tp=2 dp=2 microbatches=2"]
)
@pytest.mark.parametrize("cores", [1, 1.5, 2, 2.5])
def test_ranks_that_do_the_same_need_no_clock(words, cores):
    program = Plan.parse(words).compile(layers=6, steps=2)
    costs = UnitCosts(program, latency=0.3)
    trace = simulate(program, costs, cores=cores)
    for mine, expected in zip((trace.starts, trace.ends), walk_shared(program, costs, cores), strict=True):
        for a, b in zip(mine, expected, strict=True):
            assert a == pytest.approx(b)


def test_no_core_is_refused():
    with pytest.raises(PlanError, match="cores=0"):
        simulate(Plan(dp=2).compile(layers=1), cores=0)


def test_ranks_that_outnumber_the_cores_keep_to_one_each():
    """Ranks 0 and 3 share a core, and so do 1 and 2; where one core is done, its ranks do not help the other."""
    program = Plan(pp=4, microbatches=1).compile(layers=4)
    _, ends = walk_shared(program, UnitCosts(program, stage_factors=(1, 1, 1, 1)), 2)
    assert max(max(row) for row in ends) == pytest.approx(12), "one after another: nobody shares"
    program = Plan(dp=4, microbatches=1).compile(layers=1)
    slow = UnitCosts(program, stage_factors=(1, 3, 3, 1))
    _, ends = walk_shared(program, slow, 2)
    assert [row[0] for row in ends] == pytest.approx([2, 6, 6, 2])


def test_ranks_in_each_others_way_get_less_done():
    program = Plan(dp=4, microbatches=1).compile(layers=1)
    _, ends = walk_shared(program, UnitCosts(program), 1.6)
    assert [row[0] for row in ends] == pytest.approx([2 / 0.8] * 4)
    program = Plan(pp=4, microbatches=1).compile(layers=4)
    assert simulate(program, cores=1.6).time == pytest.approx(12), "one at a time is in nobody's way"


@pytest.mark.parametrize(("schedule", "way"), [("gpipe", 1), ("1f1b", 0), ("interleaved", 0), ("chimera", 1)])
def test_ranks_are_dealt_to_cores_in_the_faster_way(schedule, way):
    """Of Chimera both ends begin at once: not on one core. With GPipe it is a matter of when messages come."""
    program = Plan(pp=4, schedule=schedule, microbatches=8).compile(layers=16)
    costs = UnitCosts(program, latency=0.05)
    times = [max(max(row) for row in walk_shared(program, costs, 2, k)[1]) for k in range(2)]
    assert best_way(program, 2) == way == times.index(min(times))
    assert simulate(program, costs, cores=2).time == times[way]
    if schedule == "chimera":
        assert times == pytest.approx([60.5, 48.1], abs=0.1), "48 units of work a core"


def test_where_nothing_is_sent_or_cores_are_enough_ranks_are_dealt_as_ever():
    assert best_way(Plan(dp=4).compile(layers=4), 2) == 0
    assert best_way(Plan(pp=4, schedule="gpipe", microbatches=8).compile(layers=4), 4) == 0
    assert best_way(Plan(pp=4, schedule="gpipe", microbatches=8).compile(layers=4), 3) == 0
