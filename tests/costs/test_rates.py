"""Calibration as numbers: fitted lines, what messages and sums cost, text; without torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar import Plan, PlanError, simulate
from minipar.costs.measured import Profile
from minipar.costs.rates import Calibration, LinearCost, fit
from minipar.prediction.program_costs import ProgramCosts
from minipar.program import Op

FOUND = Calibration(
    device="cpu",
    ranks=4,
    cores=2,
    flops_of_one=2e11,
    flops_of_each=1e11,
    concurrency=1.8,
    links=((0, 1, LinearCost(10e-6, 1e-9)), (1, 2, LinearCost(30e-6, 3e-9)), (2, 3, LinearCost(20e-6, 2e-9))),
    send=LinearCost(2e-6, 1e-10),
    receive=LinearCost(5e-6, 2e-10),
    allreduce=((2, LinearCost(1e-4, 1e-9)), (4, LinearCost(3e-4, 2e-9))),
    exchange=((2, LinearCost(5e-5, 1e-9), LinearCost(3e-5, 1e-9)), (4, LinearCost(1e-4, 2e-9), LinearCost(2e-4, 2e-9))),
    uncontended=LinearCost(4e-5, 8e-10),
    add=LinearCost(1e-6, 2e-10),
)
SECONDS = (1e-3,) * 4
PROFILE = Profile(
    forward={2: SECONDS}, backward={2: (2e-3,) * 4}, output_bytes={2: (1000,) * 4}, grad_output_bytes={2: (500,) * 4},
    saved_bytes={2: (0,) * 4}, parameter_bytes=(4000,) * 4, gradient_bytes=(4000,) * 4,
    optimizer_bytes=(0,) * 4, step_seconds=4e-4, backward_input={2: (1.5e-3,) * 4}, backward_weight={2: (7e-4,) * 4},
)  # fmt: skip


@given(st.floats(1e-7, 1e-2), st.floats(0, 1e-7), st.lists(st.integers(1, 2**24), min_size=2, max_size=6, unique=True))
def test_a_line_is_found_again(fixed, per_byte, sizes):
    line = fit([(n, LinearCost(fixed, per_byte).at(n)) for n in sizes])
    for n in sizes:
        assert line.at(n) == pytest.approx(LinearCost(fixed, per_byte).at(n), rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 2**24), st.floats(1e-7, 1e3)), min_size=1, max_size=6))
def test_a_line_never_costs_less_than_nothing(points):
    line = fit(points)
    assert line.fixed >= 0
    assert line.per_byte >= 0
    assert line.at(2**20) >= line.at(2**10)


def test_short_messages_count_as_much_as_long_ones():
    assert fit([(1, 1e-5), (10**7, 1e-2)]).at(1) == pytest.approx(1e-5, rel=0.01)


def test_messages_are_those_of_the_nearest_number_of_ranks():
    assert FOUND.exchanged(2) == FOUND.exchange[0][1:]
    assert FOUND.exchanged(4) == FOUND.exchanged(64) == FOUND.exchange[1][1:]
    with pytest.raises(PlanError, match="knows no exchanges"):
        replace(FOUND, exchange=()).exchanged(2)


def test_a_fit_needs_times():
    for points in ([], [(1, 0.0)], [(1, float("nan"))], [(1, float("inf"))]):
        with pytest.raises(PlanError, match="positive finite seconds"):
            fit(points)


def test_text_names_every_rate():
    text = str(FOUND)
    for part in (
        "4 on cpu, 2 cores",
        "200.0 GFLOP/s alone",
        "1.80 ranks",
        "message 1 - 2",
        "allreduce over 4",
    ):
        assert part in text
        assert part in FOUND._repr_html_()
    assert "a device each" in str(replace(FOUND, cores=None))


def test_links_that_were_not_measured_cost_the_median():
    assert FOUND.message(1, 0) == LinearCost(10e-6, 1e-9)
    assert FOUND.message(0, 3) == LinearCost(20e-6, 2e-9)
    one_rank = replace(FOUND, ranks=1, links=(), allreduce=())
    with pytest.raises(PlanError, match="knows no links"):
        one_rank.message(0, 1)
    with pytest.raises(PlanError, match="knows no collectives"):
        one_rank.sum_over(2, 1)
    assert one_rank.sum_over(1, 1000) == 0


def test_sums_over_groups_that_were_not_measured_scale_as_a_ring():
    assert FOUND.sum_over(2, 1000) == pytest.approx(1e-4 + 1e-6)
    assert FOUND.sum_over(8, 0) == pytest.approx(3e-4 * 7 / 3)
    assert FOUND.sum_over(8, 1e9) == pytest.approx(2.0 * (7 / 8) / (3 / 4) + 3e-4 * 7 / 3)


CABLE, NEAR = LinearCost(1e-3, 1e-6), LinearCost(1e-5, 1e-9)
APART = replace(
    FOUND, links=((0, 1, NEAR), (0, 2, CABLE), (2, 3, NEAR)), allreduce=((2, NEAR),), hosts=(0, 0, 1, 1), filling=0.5,
    across=(("allreduce", 2, CABLE), ("all_gather", 4, LinearCost(2e-3, 3e-6)), ("allreduce", 4, CABLE)),
)  # fmt: skip


def test_links_between_two_hosts_are_one_cable():
    assert APART.message(1, 3) == APART.message(3, 0) == CABLE
    assert APART.message(1, 0) == NEAR
    assert replace(APART, links=APART.links[1:]).message(0, 1) == NEAR, "as within the other host"


def test_collectives_across_hosts_cost_what_was_measured_of_them():
    assert APART.collective("allreduce", (1, 3), 1000) == pytest.approx(CABLE.at(1000))
    assert APART.collective("all_gather", (0, 1, 2, 3), 1000) == pytest.approx(5e-3)
    assert APART.collective("allreduce", (0, 1), 1000) is None, "one host"
    assert FOUND.collective("allreduce", (0, 3), 1000) is None
    assert APART.sum_over(2, 1000) == pytest.approx(NEAR.at(1000))
    assert APART.sum_over(4, 1000) == pytest.approx(CABLE.at(1000))
    for text in (str(APART), APART._repr_html_()):
        assert "of 2 hosts" in text
        assert "all_gather over 4, across hosts" in text


@pytest.mark.parametrize("filling", [1.0, 0.5])
@pytest.mark.parametrize("cores", [None, 2])
def test_messages_of_ranks_of_a_host_share_its_cable(filling, cores):
    """Two pipelines from host 0 to host 1, each with one message there and one back: 1000 bytes and 500."""
    program = Plan(dp=2, pp=2, microbatches=1).compile(layers=4)
    costs = ProgramCosts(program, PROFILE, 4, calibration=replace(APART, hosts=(0, 1, 0, 1), filling=filling))
    trace = simulate(program, costs, cores=cores)
    sends = [
        (trace.starts[rank][k], trace.ends[rank][k])
        for rank in (0, 2)
        for k, ins in enumerate(program.ranks[rank])
        if ins.op is Op.SEND
    ]
    (first, ended), (second, _) = sorted(sends)
    assert second - first == pytest.approx(filling * (ended - first))


def test_a_collective_across_hosts_waits_for_the_cable():
    program = Plan(dp=2, pp=2, microbatches=1).compile(layers=4)  # (each stage is summed over a rank of each host)
    costs = ProgramCosts(program, PROFILE, 4, calibration=replace(APART, filling=1.0))
    trace = simulate(program, costs)
    spans = sorted(
        (trace.starts[rank][k], trace.ends[rank][k])
        for rank in (0, 1)
        for k, ins in enumerate(program.ranks[rank])
        if ins.op is Op.ALL_REDUCE
    )
    assert len(spans) == 2
    assert spans[1][0] >= spans[0][1]
    assert spans[1][1] - spans[1][0] == pytest.approx(CABLE.at(8000))


def test_a_message_costs_its_line_in_all():
    """One micro-batch through two ranks: the times of both, and nothing of the message is counted twice."""
    program = Plan(pp=2, microbatches=1).compile(layers=4)
    costs = ProgramCosts(program, PROFILE, 2, calibration=FOUND)
    line = FOUND.message(0, 1)
    expected = 4 * 3e-3 + line.at(1000) + line.at(500)
    steps = [ins for ins in program.ranks[0] if ins.op is Op.STEP]
    assert simulate(program, costs).time == pytest.approx(expected + costs.compute(0, steps[0]))
    without = ProgramCosts(program, PROFILE, 2)
    forward = program.ranks[0][0]
    assert costs.compute(0, forward) == pytest.approx(without.compute(0, forward) + FOUND.send.at(1000))


def test_sums_of_gradients_cost_what_was_measured():
    program = Plan(dp=4, bucket="flat").compile(layers=4)
    (ins,) = [ins for ins in program.ranks[0] if ins.op is Op.ALL_REDUCE]
    assert ProgramCosts(program, PROFILE, 8, calibration=FOUND).collective(ins) == pytest.approx(
        len(ins.parts) * 3e-4 + 16000 * 2e-9
    )
