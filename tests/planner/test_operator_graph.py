"""The cost graph of captured operators: closed forms that are known, and what propagation says of the same forms."""

import math
from time import process_time

import pytest

from minipar.costs.alpha_beta import collective_seconds
from minipar.errors import PlanError
from minipar.planner.elimination import eliminate
from minipar.planner.forms_found import operator_problem
from minipar.planner.intra import ilp
from minipar.planner.operator_graph import Machine, operator_graph
from minipar.program.mesh import Mesh
from minipar.sharding.propagation import propagate_model
from tests.planner.problems import attention, blocks, perceptron


def summed(ranks, size, alpha=1.0, beta=1.0):
    return collective_seconds("all_reduce", ranks, size, alpha, beta)


SMALL, LARGE = 128 * 128 * 4, 1024 * 128 * 4  # bytes of a weight of 128 x 128, and of 128 rows of 1024


@pytest.mark.parametrize("mesh", [Mesh(x=4, y=1), Mesh(x=1, y=4)])
@pytest.mark.parametrize(
    ("layers", "rows", "width", "best"),
    [
        (2, 1024, 128, 2 * summed(4, SMALL)),  # data parallel: the sums of two gradients
        (2, 128, 1024, summed(4, LARGE)),  # column, then row: one sum of activations
        (12, 1024, 128, 12 * summed(4, SMALL)),
        (12, 128, 1024, 11 * summed(4, LARGE)),
    ],
)
def test_alphas_and_betas_of_one(mesh, layers, rows, width, best):
    """Alpa's solver has these as its unit tests."""
    machine = Machine(links={"x": (1.0, 1.0), "y": (1.0, 1.0)})
    graph = operator_graph(perceptron(layers, rows, width), mesh, machine, replicated=False)
    for found in (eliminate(graph), ilp(graph)):
        assert found.time == pytest.approx(best)


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_a_slow_axis_and_a_fast_one(sizes):
    """Rows over the slow axis, columns and rows of weights over the fast one: Alpa's closed form."""
    slow, fast = sizes
    machine = Machine(links={"x": (1.0, 1.0), "y": (1.0, 0.01)})
    graph = operator_graph(perceptron(2, 1024, 128), Mesh(x=slow, y=fast), machine, replicated=False)
    best = 2 * summed(slow, SMALL / fast) + summed(fast, LARGE / slow, beta=0.01)
    assert eliminate(graph).time == pytest.approx(best)
    assert ilp(graph).bound == pytest.approx(best)


def test_attention_whose_weights_must_be_divided():
    """With weights in parts, the one sum behind the projection is the least that attention sends."""
    rows, sequence, width = 4, 128, 512
    machine = Machine(links={"x": (1.0, 1.0)})
    graph = operator_graph(
        attention(rows, sequence, width, 16), Mesh(x=4), machine, outputs="R", training=False, replicated=False,
        budget=4 * width * width * 4 / 4,
    )  # fmt: skip
    assert ilp(graph).time == pytest.approx(summed(4, rows * sequence * width * 4))


def test_tied_layers_decide_alike():
    """The answer of tied layers costs the same where each layer decides by itself, and they lose little by it."""
    machine = Machine(1e9, 1e9, {"dp": (1e-6, 1e-9), "tp": (1e-6, 3e-10)})
    mesh = Mesh(dp=2, tp=2)
    layers = blocks(4, 64, 32)
    tied = operator_graph(layers, mesh, machine)
    each = operator_graph(layers, mesh, machine, tied=False)
    found = eliminate(tied)
    said = found.labels()
    names = {name: name.replace("2.", "1.").replace("3.", "1.").replace("2:", "1:").replace("3:", "1:")
             for name in (node.name for node in each.nodes)}  # fmt: skip
    pins = {name: said[own] for name, own in names.items() if not name.startswith("end:")}
    assert eliminate(each.pinned(pins)).time == pytest.approx(found.time, rel=1e-9)
    assert eliminate(each).time <= found.time < 1.1 * eliminate(each).time
    assert ilp(tied).time == pytest.approx(found.time)
    assert len(each.nodes) > 1.8 * len(tied.nodes)


@pytest.fixture(scope="module")
def gpt():
    import torch

    from minipar import models, sharding

    return sharding.capture_model(models.build("gpt-tiny"), torch.zeros(4, 16, dtype=torch.long)).layers


LINKS = {"dp": (1e-5, 1e-9), "tp": (1e-6, 2e-10)}


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=2, tp=2)])
def test_the_graph_counts_what_propagation_sends(gpt, mesh):
    """Megatron's forms cost in the graph what their collectives take, one by one."""
    problem = operator_problem(gpt, mesh, Machine(links=LINKS))
    found = problem.propagated()
    rows = "S0 on dp" if mesh.length("dp") > 1 else "I"
    from minipar.sharding.propagation import megatron

    model = propagate_model(gpt, megatron(), mesh, rows, LINKS)
    sent = math.fsum(one.time for sharding in model.shardings for one in sharding.collectives())
    assert sent > 0
    assert found.time == pytest.approx(sent, rel=1e-6)


def test_the_search_beats_propagation(gpt):
    problem = operator_problem(gpt, Mesh(tp=2), Machine(1e11, 1e10, LINKS))
    found = problem.compare()
    assert found.best.time == pytest.approx(found.bound)
    assert found["ilp"].time < found["propagation"].time
    assert found["ilp"].time < found["data parallel"].time
    pinned = problem.pinned({"1.mlp.0": "S0 on tp"})
    assert eliminate(pinned.graph).time > found.best.time


def test_thirty_two_tied_layers_on_a_mesh_of_two_by_two(gpt):
    names = gpt[1].names
    from minipar.sharding.graph import Layer

    middle = [Layer(gpt[1].graph, {k: f"{n}{v[1:]}" for k, v in names.items()}) for n in range(1, 33)]
    ilp(operator_graph(blocks(1, 8, 8), Mesh(tp=2)))  # (imports scipy)
    began = process_time()
    graph = operator_graph([gpt[0], *middle, gpt[-1]], Mesh(dp=2, tp=2), Machine(1e11, 1e10, LINKS))
    found = ilp(graph)
    assert process_time() - began < 2 * 2, "seconds of the processor; at most 2 on a free machine"
    assert found.time == pytest.approx(found.bound) == pytest.approx(eliminate(graph).time)
    assert graph.nodes[graph.number("1.mlp.0")].count == 32


def test_budgets_of_thirty_two_tied_layers(gpt):
    """A budget of memory costs the linear program a few seconds at most, since a price leaves out most choices."""
    names = gpt[1].names
    from minipar.sharding.graph import Layer

    middle = [Layer(gpt[1].graph, {k: f"{n}{v[1:]}" for k, v in names.items()}) for n in range(1, 33)]
    graph = operator_graph([gpt[0], *middle, gpt[-1]], Mesh(dp=2, tp=2), Machine(1e11, 1e10, LINKS))
    free = eliminate(graph)
    began = process_time()
    tight = ilp(graph.within(0.7 * free.memory))
    assert process_time() - began < 2 * 3, "seconds of the processor; about 1.5 on a free machine"
    assert free.time < tight.time == pytest.approx(tight.bound)
    assert tight.memory <= 0.7 * free.memory


def test_annotations_lead_to_the_same_ways(gpt):
    problem = operator_problem(gpt, Mesh(tp=2), Machine(1e11, 1e10, LINKS), gathered=False)
    found = ilp(problem.graph)
    said = problem.annotations(found)
    assert said["4.attention.qkv"] == "S2:3 on tp"
    assert said["2.mlp.2"] == "P on tp"
    model = propagate_model(gpt, said, Mesh(tp=2), links=LINKS)
    assert len(model.collectives()) > 0


def test_refusals():
    with pytest.raises(PlanError, match="needs an axis"):
        operator_graph(perceptron(1, 8, 8), Mesh(pp=2))
    with pytest.raises(PlanError, match="at least one layer"):
        operator_graph([], Mesh(tp=2))
    graph = operator_graph(perceptron(1, 8, 8), Mesh(tp=2), budget=1.0)
    with pytest.raises(PlanError, match="no answer fits; the smallest needs"):
        ilp(graph)
