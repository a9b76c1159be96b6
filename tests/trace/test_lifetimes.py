"""Memory as a program states it: at every moment the curve is the sum of the values that are alive."""

import pytest

from minipar import simulate
from minipar.program import param
from minipar.strategies.plan import Plan
from minipar.trace.lifetimes import live_values

PLANS = [
    Plan(pp=4, microbatches=6, schedule="1f1b"),
    Plan(pp=4, microbatches=8, schedule="zb-v"),
    Plan(pp=4, microbatches=8, schedule="interleaved", chunks=2, checkpoint="1"),
    Plan(pp=2, microbatches=4, schedule="gpipe", offload="activations"),
    Plan(pp=4, microbatches=8, schedule="pipedream"),
    Plan(pp=2, dp=2, microbatches=4, zero=1),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_curve_is_the_sum_of_what_is_alive(plan):
    """Counted in activations, too, where the curve leaves out what has no size."""
    trace = simulate(plan.compile(layers=8), latency=0.25)
    for rank in range(len(trace.program.ranks)):
        alive = live_values(trace, rank)
        curve = trace.memory(rank)
        assert curve.peak > 0
        # (at one moment the curve has several values while values come; the last of them is what `live_values` says)
        for time, total in dict(zip(curve.times, curve.total, strict=True)).items():
            now = [life for life in alive if life.start <= time and (life.end is None or life.end > time)]
            assert total == pytest.approx(sum(life.size for life in now)), time


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_kinds_of_the_curve_sum_up_to_it(plan):
    trace = simulate(plan.compile(layers=8))
    for rank in range(len(trace.program.ranks)):
        curve = trace.memory(rank)
        assert curve.total == pytest.approx([sum(column) for column in zip(*curve.kinds.values(), strict=True)])
        assert curve.times == sorted(curve.times)


def test_what_is_freed_makes_room_for_what_comes_at_the_same_moment():
    """A rank of 1F1B that begins a forward when a backward ends holds no more than before."""
    trace = simulate(Plan(pp=4, microbatches=8, schedule="1f1b").compile(layers=4))
    assert trace.peak_memory() == trace.in_flight() == [4, 3, 2, 1]


def test_versions_of_parameters_live_side_by_side_until_nothing_needs_them():
    trace = simulate(Plan(pp=4, microbatches=8, schedule="pipedream").compile(layers=4, steps=4))
    for rank, versions in enumerate(trace.weight_versions()):
        mine = [life for life in live_values(trace, rank) if life.value == param(rank, life.value.step)]
        at_once = [sum(a.start <= b.start and (a.end is None or a.end > b.start) for a in mine) for b in mine]
        assert max(at_once) == versions
        assert [life.end for life in mine].count(None) == 1  # the newest one stays
