"""Stages and submeshes: the dynamic program equals brute force, with and without a memory limit; and the linear
program of a partition."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given

from minipar.costs.partition import partition, step_time
from minipar.errors import PlanError
from minipar.planner.linear import partition_by_milp
from minipar.planner.stages import Stage, StageCosts, Staged, stage_costs, stages, submeshes
from tests.costs.test_partition import chains

CLUSTERS = [(1, 2), (1, 4), (2, 2), (3, 1), (2, 4)]


def random_case(seed):
    random = np.random.default_rng(seed)
    nodes, per_node = CLUSTERS[seed % len(CLUSTERS)]
    layers = int(random.integers(1, 6))
    meshes = submeshes(nodes, per_node)

    def numbers(least, most):
        return random.integers(least, most, (len(meshes), layers)).astype(float).tolist()

    costs = stage_costs(numbers(1, 30), meshes, numbers(1, 9), numbers(0, 5))
    budget = float(random.integers(5, 40)) if seed % 2 else None
    return costs, nodes, per_node, int(random.integers(1, 9)), budget


def every_division(costs: StageCosts, nodes, per_node, microbatches, budget):
    """All stages and submeshes that fit."""
    numbered = list(enumerate(costs.submeshes))
    for count in range(1, min(costs.layers, nodes * per_node) + 1):
        for cuts in combinations(range(1, costs.layers), count - 1):
            borders = [0, *cuts, costs.layers]
            for picked in product(numbered, repeat=count):
                if sum(n * m for _, (n, m) in picked) != nodes * per_node:
                    continue
                made = []
                for s, (k, mesh) in enumerate(picked):
                    a, b = borders[s], borders[s + 1]
                    held = costs.memory[k, a, b] + (count - s) * costs.activations[k, a, b]
                    made.append(Stage(a, b, mesh, float(costs.time[k, a, b]), float(held)))
                fits = budget is None or all(stage.memory <= budget * (1 + 1e-9) for stage in made)
                if fits and all(math.isfinite(stage.time) for stage in made):
                    yield Staged(tuple(made), microbatches, step_time([x.time for x in made], microbatches))


@pytest.mark.parametrize("seed", range(30))
def test_equal_to_brute_force(seed):
    case = random_case(seed)
    best = min(every_division(*case), key=lambda one: one.time, default=None)
    if best is None:
        with pytest.raises(PlanError, match="possible|uses all"):
            stages(*case)
        return
    found = stages(*case)
    assert found.time == pytest.approx(best.time)
    assert sum(found.split) == case[0].layers
    assert sum(n * m for n, m in (s.submesh for s in found.stages)) == case[1] * case[2]
    if case[4] is not None:
        assert all(stage.memory <= case[4] for stage in found.stages)
    assert str(found).startswith(f"{len(found.stages)} stage")


def test_one_device_a_stage_is_a_partition():
    """On nodes of one device, with layers that only one device can take, stages are those of `partition`."""
    layers = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    meshes = submeshes(4, 1)
    times = [layers if n * m == 1 else [math.inf] * len(layers) for n, m in meshes]
    found = stages(stage_costs(times, meshes), 4, 1, 8)
    assert found.time == pytest.approx(partition(layers, 4, 8).time)
    assert len(found.split) == 4


def test_submeshes_tile_a_cluster():
    assert submeshes(2, 4) == ((1, 1), (1, 2), (1, 4), (2, 4))
    assert submeshes(1, 6) == ((1, 1), (1, 2), (1, 4), (1, 6))


def test_thirty_two_layers_on_sixty_four_devices():
    meshes = submeshes(8, 8)
    times = [[(1 + 0.1 * (l % 3)) / (n * m) ** 0.9 for l in range(32)] for n, m in meshes]
    found = stages(stage_costs(times, meshes), 8, 8, 64)
    assert found.bounds < 100, "few bounds are tried"
    assert sum(found.split) == 32
    ideal = sum(1 + 0.1 * (l % 3) for l in range(32)) * 64 / 64
    assert ideal < found.time < 1.7 * ideal


def test_refusals():
    costs = stage_costs([[1.0, 1.0]], [(1, 1)])
    with pytest.raises(PlanError, match="no division of 2 layers uses all of a cluster of 3x1"):
        stages(costs, 3, 1, 1)
    heavy = stage_costs([[1.0, 1.0]], [(1, 1)], [[2.0**20, 2.0**21]])
    with pytest.raises(PlanError, match=r"one layer alone needs 2.0 MiB"):
        stages(heavy, 2, 1, 1, budget=2.0**20)
    with pytest.raises(PlanError, match="microbatches=0"):
        stages(costs, 1, 1, 0)


# The linear program ---------------------------------------------------------------------------------------------------


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
