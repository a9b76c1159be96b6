"""simulate: exact against closed forms, and against a brute-force interpreter on everything else;
also with fewer cores than ranks.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar import Plan, PlanError, ProgramError, simulate
from minipar.costs.unit import UnitCosts
from minipar.prediction.oversubscription import walk_shared
from minipar.prediction.plain_simulator import start_and_end
from minipar.program import Op
from tests.interpreters import RandomCosts, compiled, programs, shape

SIZES = [(1, 1), (1, 4), (2, 1), (2, 5), (3, 2), (3, 7), (4, 4), (4, 8), (5, 3), (8, 8), (8, 16), (8, 32)]
FLUSHING = ["gpipe", "1f1b", "eager-1f1b"]


def run(schedule, p, m, layers=None, **costs):
    return simulate(Plan(pp=p, microbatches=m, schedule=schedule).compile(layers=layers or p), **costs)


# closed forms --------------------------------------------------------------------------------------------------------


@pytest.mark.many(4)
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (1.0, 1.0), (3.0, 2.0), (0.5, 0.0)])
def test_flushing_pipelines(schedule, p, m, f, b):
    trace = run(schedule, p, m, layers=2 * p, forward=f, backward=b)
    assert trace.time == (m + p - 1) * (f + b)
    assert trace.bubble_of_total() == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert trace.bubble_of_ideal() == pytest.approx((p - 1) / m, abs=1e-12)
    assert trace.window_bubble() == (p - 1) * (f + b)
    assert trace.messages_per_microbatch() == 2 * (p - 1)
    assert trace.weight_versions() == [1] * p
    assert trace.staleness() == [0] * p


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("c", [0, 0.25, 1, 5])
def test_naive(p, m, c):
    trace = run("naive", p, m, latency=c)
    assert trace.time == m * (3 * p + 2 * (p - 1) * c)
    assert trace.messages_per_microbatch() == 2 * (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("c", [0.125, 0.5, 1])
def test_latency(p, m, c):
    """GPipe pays a hop's latency 2(p-1) times in all, classic 1F1B about that often per p micro-batches."""
    ideal = (m + p - 1) * 3
    once = 2 * (p - 1) * c
    assert run("gpipe", p, m, latency=c).time == ideal + once
    assert run("eager-1f1b", p, m, latency=c).time == ideal + once  # c is at most one forward
    assert run("1f1b", p, m, latency=c).time == ideal + once + 2 * c * (m - 1 - ceil((m - 1) / p))


FACTORS = [[1, 1, 1], [1, 2, 4], [4, 2, 1], [1, 5, 2], [3, 3, 1], [2, 0, 2]]


@pytest.mark.parametrize("x", FACTORS)
@pytest.mark.parametrize("m", [1, 2, 7])
def test_unequal_stages(x, m):
    f, b = 1.0, 2.5
    assert run("gpipe", 3, m, forward=f, backward=b, stage_factors=x).time == (f + b) * (sum(x) + (m - 1) * max(x))
    assert run("gpipe", 3, m, forward=f, backward=0, stage_factors=x).time == f * (sum(x) + (m - 1) * max(x))
    assert run("naive", 3, m, forward=f, backward=b, stage_factors=x).time == m * (f + b) * sum(x)


@pytest.mark.parametrize("x", [[1, 1, 1], [1, 2, 4], [2, 1, 4], [4, 1, 4]])
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
def test_1f1b_with_the_slowest_stage_last(schedule, x):
    for m in (1, 2, 3, 8):
        assert run(schedule, 3, m, forward=1, backward=2, stage_factors=x).time == 3 * (sum(x) + (m - 1) * max(x))


def test_a_share_costs_the_same_however_many_layers_it_has():
    uneven = Plan(pp=2, split=(1, 5), microbatches=4).compile(layers=6)
    assert simulate(uneven).time == (4 + 2 - 1) * 3


def test_frozen_stages_have_no_backward():
    program = compiled("pp=3 microbatches=4 schedule=gpipe", shape(3, frozen=[0]))
    trace = simulate(program)
    assert trace.busy == [4, 12, 12]
    assert trace.in_flight() == [0, 4, 4]
    assert trace.time == (4 + 2) * 1 + (4 + 1) * 2
    nothing = simulate(compiled("pp=2 microbatches=3", shape(2, frozen=[0, 1])))
    assert nothing.time == 3 + 1
    assert nothing.messages_per_microbatch() == 1


# costs of one kind at a time -----------------------------------------------------------------------------------------


class Costs:
    """Everything costs nothing but what a test says."""

    def __init__(self, compute=None, transfer=(0.0, 0.0), collective=0.0):
        self._compute, self._transfer, self._collective = compute or {}, transfer, collective

    def compute(self, rank, ins):
        return self._compute.get(ins.op, 0.0)

    def transfer(self, rank, ins):
        return self._transfer

    def collective(self, ins):
        return self._collective

    def size(self, rank, value):
        return 8.0


def test_bytes_occupy_a_link_one_message_after_the_other():
    program = compiled("pp=2 microbatches=4 schedule=gpipe", 2)
    trace = simulate(program, Costs(transfer=(3.0, 0.5)))
    sends = [k for k, ins in enumerate(program.ranks[0]) if ins.op is Op.SEND]
    assert [(trace.starts[0][k], trace.ends[0][k]) for k in sends] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    receives = [k for k, ins in enumerate(program.ranks[1]) if ins.op is Op.RECV]
    assert [trace.ends[1][k] for k in receives] == [3.5, 6.5, 9.5, 12.5]
    #  both directions of a pair are links of their own
    assert trace.time == 12.5 + 12.5


def test_receives_are_posted_ahead_of_the_walk():
    program = compiled("pp=2 microbatches=4 schedule=gpipe", 2)
    assert program.receives_ahead == 2
    trace = simulate(program, Costs({Op.FORWARD: 1.0}))
    receives = [k for k, ins in enumerate(program.ranks[1]) if ins.op is Op.RECV]
    assert [trace.starts[1][k] for k in receives] == [0, 0, 0, 2]  # the third when the walk reaches the first, ...


def test_a_collective_ends_at_its_last_rank_plus_its_cost():
    program = compiled("dp=2 bucket=flat", 1)  # F B ALL_REDUCE STEP

    class Slow(Costs):
        def compute(self, rank, ins):
            return 1.0 + rank

    trace = simulate(program, Slow(collective=10.0))
    assert trace.starts == [[0, 1, 2, 14], [0, 2, 4, 14]]
    assert trace.ends == [[1, 2, 14, 15], [2, 4, 14, 16]]


def test_bad_costs_are_refused():
    program = compiled("pp=2", 2)
    for costs, says in [
        ({"forward": -1.0}, "forward=-1.0: a time must be a finite number of at least 0"),
        ({"latency": float("nan")}, "latency=nan: a time must be a finite number of at least 0"),
        ({"stage_factors": [1, 2, 3]}, "stage_factors: 3 numbers, but there are 2 stages"),
        ({"stage_factors": [1, float("inf")]}, "stage_factors[1]=inf: a time must be a finite number of at least 0"),
    ]:
        with pytest.raises(PlanError) as error:
            simulate(program, **costs)
        assert str(error.value) == says


def test_a_program_that_cannot_end_is_refused():
    program = compiled("pp=2", 2)
    send = next(k for k, ins in enumerate(program.ranks[0]) if ins.op is Op.SEND)
    broken = program.with_rank(0, [ins for k, ins in enumerate(program.ranks[0]) if k != send])
    with pytest.raises(
        ProgramError, match=r"rank 0 stops for ever at instruction 2 `B 0 mb0`; verify\(program\) says why"
    ):
        simulate(broken)


# everything else, against the plain simulator -------------------------------------------------------------------------


def assert_same(program, costs):
    trace = simulate(program, costs)
    starts, ends = start_and_end(program, costs)
    assert [list(row) for row in trace.starts] == starts
    assert [list(row) for row in trace.ends] == ends


@given(programs(shared=True, offload=True), st.integers(0, 10**9), st.integers(0, 3))
def test_any_plan_at_any_costs_agrees_with_the_plain_simulator(program, seed, ahead):
    assert_same(replace(program, receives_ahead=ahead), RandomCosts(seed, longest=24 if seed % 4 else 2))


@given(programs(most_microbatches=3, most_steps=1, shared=True), st.integers(0, 10**9))
def test_as_many_cores_as_ranks_are_as_good_as_devices(program, seed):
    costs = RandomCosts(seed)
    assert walk_shared(program, costs, len(program.ranks)) == start_and_end(program, costs)


def test_messages_do_not_wait_for_the_collectives_of_the_same_two_ranks():
    """Rank 0 sends to rank 1, and both are a group: a link and a group are two streams."""
    for words in ("dp=1", "offload=optimizer"):
        program = Plan.parse(f"pp=2 schedule=chimera microbatches=4 {words}").compile(layers=2)
        assert_same(program, RandomCosts(7))


# Fewer cores than ranks -----------------------------------------------------------------------------------------------


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


def test_ranks_that_outnumber_the_cores_share_them():
    """Where few compute they are as fast as ever; the first to end leave room for the others."""
    program = Plan(pp=4, microbatches=1).compile(layers=4)
    _, ends = walk_shared(program, UnitCosts(program, stage_factors=(1, 1, 1, 1)), 2)
    assert max(max(row) for row in ends) == pytest.approx(12), "one after another: nobody shares"
    program = Plan(dp=4, microbatches=1).compile(layers=1)
    slow = UnitCosts(program, stage_factors=(1, 5, 5, 1))
    _, ends = walk_shared(program, slow, 2)
    assert [row[0] for row in ends] == pytest.approx([2, 8, 8, 2])


def test_ranks_in_each_others_way_get_less_done():
    program = Plan(dp=4, microbatches=1).compile(layers=1)
    _, ends = walk_shared(program, UnitCosts(program), 1.6)
    assert [row[0] for row in ends] == pytest.approx([2 / 0.8] * 4)
    program = Plan(pp=4, microbatches=1).compile(layers=4)
    assert simulate(program, cores=1.6).time == pytest.approx(12), "one at a time is in nobody's way"
