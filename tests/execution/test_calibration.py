"""calibrate() on real ranks: its results are finite, and predictions use them (a benchmark measures their errors)."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn

from minipar import Cluster, PlanError, calibrate, simulate, train
from minipar.costs.rates import Copies
from minipar.execution.measuring import calibration
from minipar.execution.measuring.calibration import measure_copies
from minipar.prediction.program_costs import ProgramCosts
from minipar.strategies.plan import Plan
from tests.costs.test_rates import PROFILE
from tests.toys import rows, toy

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_rates_are_positive_and_finite(clusters):
    found = calibrate(clusters(3), seconds=0.1, progress=False)
    pairs = [(a, b) for a in range(found.ranks) for b in range(a + 1, found.ranks)]
    assert [(a, b) for a, b, _ in found.links] == pairs
    assert [n for n, _ in found.allreduce] == list(range(2, found.ranks + 1))
    assert [n for n, *_ in found.exchange] == list(range(2, found.ranks + 1))
    lines = [line for *_, line in (*found.links, *found.allreduce, *found.exchange)]
    lines += [line for _, line, _ in found.exchange]
    for line in (*lines, found.send, found.receive, found.uncontended, found.add):
        assert all(0 <= x < math.inf for x in line)
        assert 0 < line.at(2**20) < 10
    assert 0 < found.flops_of_each <= 100 * found.flops_of_one < math.inf
    assert 1 <= found.concurrency <= min(found.ranks, found.cores)
    program = Plan(pp=3, microbatches=1).compile(layers=4)
    costs = ProgramCosts(program, PROFILE, 2, calibration=found)
    assert 4 * 3e-3 < simulate(program, costs).time < 10


def test_a_burst_does_not_count_as_the_rate():
    """64 KiB pass at once, the rest at 12 MB/s."""
    line = calibration._line(lambda size: 1e-4 + max(0, size - 65536) / 12e6)
    assert line.fixed == pytest.approx(1e-4)
    assert line.bandwidth == pytest.approx(12e6, rel=0.01)


@pytest.mark.extra("::test_rates_are_positive_and_finite")
def test_ranks_of_two_hosts(monkeypatch):
    monkeypatch.setenv("MINIPAR_HOST", "left,right,right")
    with Cluster(3, device="cpu") as three:
        found = calibrate(three, seconds=0.05, progress=False)
    assert found.hosts == (0, 1, 1)
    assert [(a, b) for a, b, _ in found.links] == [(0, 1), (1, 2)], "one for each two hosts"
    assert found.allreduce == (), "no neighbours are a group on one host for all ranks"
    assert [(kind, n) for kind, n, _ in found.across] == [
        (kind, n) for n in (2, 3) for kind in ("allreduce", "all_gather", "reduce_scatter")
    ]
    assert all(0 < line.at(2**20) < 10 for *_, line in found.across)
    assert found.filling == 1.0, "the first host has one rank"
    assert found.cores == len(os.sched_getaffinity(0)), "both hosts are this machine"


def test_refusals(clusters):
    for seconds in (0, -1, float("inf"), float("nan"), "2", True):
        with pytest.raises(PlanError, match="seconds="):
            calibrate(clusters(2), seconds=seconds)


def test_train_predicts_with_it(clusters):
    options = {"loss": nn.functional.mse_loss, "dtype": torch.float64, "steps": 2, "progress": False}
    model, plan = partial(toy, ("linear",)), "pp=2 microbatches=2"
    found = calibrate(clusters(2), seconds=0.05, progress=False)
    slow = replace(found, links=tuple((a, b, line._replace(fixed=3.0)) for a, b, line in found.links))
    run = train(model, rows(8), plan, cluster=clusters(2), calibration=slow, **options)
    assert run.predicted.time > 3, "two messages in a row, of which each takes 3 s"
    assert run.prediction_error == pytest.approx(run.predicted.time / run.trace.time - 1)
    assert "calibrated" in run.predicted.note
    assert "%" in repr(run)
    assert "calibrated" in train(model, rows(8), plan, cluster=clusters(2), **options).predicted.note


def test_emulated_devices_are_not_calibrated_for_a_prediction():
    options = {"loss": nn.functional.mse_loss, "dtype": torch.float64, "steps": 1, "progress": False}
    with Cluster(2, device="pcie") as cluster:
        run = train(partial(toy, ("linear",)), rows(8), "pp=2 microbatches=2", cluster=cluster, **options)
    assert "calibrated" not in run.predicted.note


def test_train_measures_what_a_program_needs_once_on_each_cluster(monkeypatch):
    measured = []

    def noting(cluster, seconds, progress, *needs):
        found = plainly(cluster, seconds, progress, *needs)
        measured.append((needs, (bool(found.exchange), bool(found.links), bool(found.allreduce))))
        return found

    plainly = calibration._calibrated
    monkeypatch.setattr(calibration, "_calibrated", noting)
    options = {"loss": nn.functional.mse_loss, "dtype": torch.float64, "steps": 1, "progress": False}
    learn = partial(train, partial(toy, ("linear",)), rows(8), **options)
    with Cluster(2, device="cpu") as one, Cluster(2, device="cpu") as other:
        first, second = (learn("pp=2", cluster=one) for _ in range(2))
        learn("pp=2", cluster=other)
        learn("dp=2 algorithm=ring overlap=none", cluster=one)
        learn("dp=2 algorithm=ring overlap=none", cluster=one)
    stages, sums = ((False, True, False),) * 2, ((True, False, True),) * 2
    assert measured == [stages, stages, sums]
    assert first.predicted.time > 0
    assert second.predicted.time > 0


# copies to slower tiers -----------------------------------------------------------------------------------------------


def test_lines_of_both_tiers(tmp_path):
    found = measure_copies(torch.device("cpu"), True, str(tmp_path))
    assert all(line.at(1 << 20) > 0 for line in found)
    assert found.to_disk != Copies().to_disk  # measured
    assert list(tmp_path.iterdir()) == []  # nothing is left


def test_the_disk_is_left_alone_unless_it_is_asked_for():
    found = measure_copies(torch.device("cpu"), False)
    assert found[2:] == Copies()[2:]
    assert found.to_host != Copies().to_host
