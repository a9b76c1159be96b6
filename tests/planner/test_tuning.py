"""bucket=auto and the curve of step time over bucket size."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minipar import Cluster, Plan, bucket_curve, simulate
from minipar.costs.device import DeviceSpec
from minipar.errors import PlanError
from minipar.execution.execution import Job, profile_job
from minipar.models.parameter_groups import shape_of
from minipar.prediction.program_costs import ProgramCosts
from minipar.program import Group, Op
from minipar.program.shape import Shape
from minipar.strategies.buckets import sizes

MiB = 1 << 20


class AlphaBeta:
    """A layer's times by hand; a message costs `fixed` and `each` for a byte."""

    def __init__(self, forward, backward, fixed, each):
        self.times, self.fixed, self.each = {Op.FORWARD: forward, Op.BACKWARD: backward}, fixed, each

    def compute(self, rank, ins):
        return sum(self.times[ins.op][layer] for layer in ins.layers) if ins.op in self.times else 0.0

    def transfer(self, rank, ins):
        return 0.0, 0.0

    def collective(self, ins):
        return sum(self.fixed + part.bytes * self.each for part in ins.parts)

    def size(self, rank, value):
        return 0.0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(0, 9),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_auto_is_the_size_with_the_shortest_simulated_step(layers, fixed, each, microbatches):
    shape = Shape(len(layers), tuple(Group((k,), (size,)) for k, (size, _) in enumerate(layers)))
    times = [time for _, time in layers]
    costs = AlphaBeta(times, times, fixed, each)
    plan = Plan(dp=2, bucket="auto", microbatches=microbatches)

    def time(bucket):
        from dataclasses import replace

        program = replace(plan, bucket=bucket).compile(shape, costs_of=lambda program: costs)
        return simulate(program, costs).time

    tried = [time(size) for size in sizes(plan.layout(shape))]
    assert time("auto") == min(tried)
    assert min(tried) <= min(time("flat"), time("none"))  # (one tensor a layer)


def test_auto_without_costs_is_documented_and_with_them_follows_latency():
    shape = Shape(8, tuple(Group((k,), (MiB,)) for k in range(8)))
    many = [len([i for i in Plan(dp=2, bucket="auto").compile(shape, costs_of=lambda p, f=fixed: AlphaBeta(
        [1] * 8, [1] * 8, f, 1 / MiB)).ranks[0] if i.group]) for fixed in (0, 0.3, 2, 100)]  # fmt: skip
    assert many == sorted(many, reverse=True)
    assert many[0] == 8
    assert many[-1] == 1
    guessed = Plan(dp=2, bucket="auto").compile(shape)  # no latency: a message for each layer
    assert sum(bool(ins.group) for ins in guessed.ranks[0]) == 8


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def test_the_curve_is_predicted_and_measured(tmp_path):
    """On emulated devices, whose link needs 20 ms for a message and 20 ms for a layer."""
    size = 64 * 65 * 4
    device = DeviceSpec(costs={"forward": 0.04, "backward": 0.08}, bandwidth=size / 0.02, latency=0.01)
    job = Job(deep, (torch.randn(8, 64), torch.randn(8, 64)), loss=nn.functional.mse_loss)
    with Cluster(2, device=device) as cluster:
        (facts,) = cluster.run_on([0], profile_job, job, (4,))

        def costs_of(program):
            return ProgramCosts(program, facts.profile, 8, device)

        curve = bucket_curve("dp=2", shape_of(list(deep())), costs_of, job=job, cluster=cluster, passes=3)
    assert curve.buckets == ("none", *(k * size / MiB for k in (1, 2, 3, 4)), "flat")
    assert curve.best == 2 * size / MiB
    assert curve.predicted[0] > curve.predicted[1] > curve.predicted[2] < curve.predicted[-1]  # a valley
    for predicted, measured in zip(curve.predicted, curve.measured, strict=True):
        assert 0.99 * predicted <= measured <= 2 * predicted + 0.1
    text = str(curve)
    assert len(text.splitlines()) == 7
    assert "<- best" in text.splitlines()[3]
    curve.plot().savefig(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    (axes,) = curve.plot().axes
    assert [line.get_label() for line in axes.lines] == ["predicted", "measured"]


def test_a_curve_of_pieces():
    shape = Shape(3, tuple(Group((k,), (size * MiB,)) for k, size in enumerate((1, 2, 4))))
    costs = AlphaBeta([2, 2, 1], [1, 1, 1], 0, 1 / MiB)
    curve = bucket_curve("dp=2 overlap=priority", shape, lambda program: costs)
    assert curve.measured == ()
    assert curve.predicted[-1] == max(curve.predicted)  # whole
    assert min(curve.predicted) < max(curve.predicted)
    with pytest.raises(PlanError, match="has one replica and no buckets"):
        bucket_curve("pp=2", shape, partial(AlphaBeta, [1], [1], 0))
