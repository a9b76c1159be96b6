"""The linear program and the dynamic program have the same optimum."""

import pytest
from hypothesis import given

from minipar.costs.partition import partition
from minipar.errors import PlanError
from minipar.planner.linear import partition_by_milp
from tests.costs.test_partition import chains


@given(chains())
def test_equal_to_the_dynamic_program(chain):
    found = partition_by_milp(**chain)
    best = partition(**chain)
    assert found.time == pytest.approx(best.time, rel=1e-6, abs=1e-6)
    assert found.bound <= best.time * (1 + 1e-6) + 1e-6
    assert sum(found.split) == len(chain["costs"])


def test_a_chain_of_thirty_layers():
    costs = [1 + (k * 7919) % 13 for k in range(30)]
    found = partition_by_milp(costs, 4, 16, speeds=[1, 2, 1, 1], activations=[k % 5 for k in range(30)])
    best = partition(costs, 4, 16, speeds=[1, 2, 1, 1], activations=[k % 5 for k in range(30)])
    assert found.time == pytest.approx(best.time)
    assert best.time / 2 < found.bound < best.time


def test_without_scipy(monkeypatch):
    monkeypatch.setattr("minipar.planner.linear.find_spec", lambda name: None)
    with pytest.raises(PlanError, match="pip install scipy"):
        partition_by_milp([1, 2], 2)


def test_no_time():
    with pytest.raises(PlanError, match="no optimum after 0 s"):
        partition_by_milp([(k * 7919) % 13 for k in range(40)], 8, 16, seconds=0.0)
