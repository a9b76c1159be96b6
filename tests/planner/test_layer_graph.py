"""Strategies of whole layers, as a chain with memory, and as the costs of stages."""

import pytest

from minipar.errors import PlanError
from minipar.planner.brute_force import brute_force
from minipar.planner.chain import chain
from minipar.planner.elimination import eliminate
from minipar.planner.layer_graph import layer_graph, times_on
from minipar.planner.operator_graph import Machine, operator_graph
from minipar.planner.stages import every_division, stage_costs, stages, submeshes
from minipar.program.mesh import Mesh
from tests.planner.problems import blocks

MACHINE = Machine(1e12, 1e11, {"dp": (1e-6, 1e-10), "tp": (1e-6, 1e-10)})


def test_the_chain_equals_brute_force_and_trades_time_for_memory():
    graph = layer_graph(blocks(4, 256, 64), Mesh(tp=2), MACHINE, kinds=("rows", "zero", "tensor"))
    assert graph.is_chain
    free = chain(graph)
    assert free.time == pytest.approx(brute_force(graph).time)
    tight = graph.within(0.7 * free.memory)
    found = chain(tight, 4000)
    best = brute_force(tight)
    assert found.memory <= tight.budget
    assert found.time == pytest.approx(best.time, rel=0.01)
    assert found.bound <= best.time * (1 + 1e-9)
    assert found.time > free.time
    with pytest.raises(PlanError, match="the smallest needs"):
        chain(graph.within(1000.0))


def test_what_a_strategy_costs():
    """Rows divide what is kept, ZeRO the state too, and running again keeps the input only."""
    graph = layer_graph(blocks(2, 256, 64), Mesh(tp=2), MACHINE)
    costs = {c.strategy.label: c for c in graph.nodes[1].meaning}
    rows, zero, again = costs["rows on tp"], costs["zero on tp"], costs["rows on tp, again"]
    weights = 2 * 64 * 128 * 4
    assert rows.state == 4 * weights
    assert zero.state == 2 * weights
    assert zero.seconds > rows.seconds
    assert again.saved == 256 * 64 * 4 / 2 < rows.saved
    assert rows.seconds < again.seconds < 1.5 * rows.seconds
    assert costs["tensor on tp"].state == 2 * weights


def test_operators_do_at_least_as_well_as_layers():
    layers = blocks(3, 256, 64)
    by_layer = chain(layer_graph(layers, Mesh(tp=2), MACHINE, kinds=("rows", "tensor"), again=False))
    by_operator = eliminate(operator_graph(layers, Mesh(tp=2), MACHINE, inputs="S0 on tp"))
    assert by_operator.time <= by_layer.time * (1 + 1e-9)


def test_two_axes():
    graph = layer_graph(blocks(2, 256, 64), Mesh(dp=2, tp=2), MACHINE, again=False)
    labels = graph.nodes[0].labels
    assert "rows on dp, tensor on tp" in labels
    assert "tensor on dp, tensor on tp" not in labels
    assert chain(graph).time <= eliminate(graph).time * (1 + 1e-9)


def test_stages_of_layers():
    layers = blocks(4, 256, 64)
    meshes = submeshes(2, 2)
    costs = stage_costs(*_arguments(times_on(layers, meshes, MACHINE), meshes))
    found = stages(costs, 2, 2, 8)
    assert found.time == pytest.approx(every_division(costs, 2, 2, 8).time)


def _arguments(three, meshes):
    times, states, saved = three
    return times, meshes, states, saved


def test_refusals():
    with pytest.raises(PlanError, match="strategy 'luck': unknown"):
        layer_graph(blocks(1, 8, 8), Mesh(tp=2), kinds=("luck",))
    with pytest.raises(PlanError, match="layer 0: can take none"):
        layer_graph(blocks(1, 9, 8), Mesh(tp=2), kinds=("rows",))
