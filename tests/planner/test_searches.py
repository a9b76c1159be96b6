"""Every search on one cost graph: the exact ones equal brute force, the others are no better."""

import math

import numpy as np
import pytest

from minipar.errors import PlanError
from minipar.planner.annealing import anneal
from minipar.planner.answer import compare
from minipar.planner.brute_force import brute_force
from minipar.planner.chain import chain
from minipar.planner.cost_graph import CostGraph, Edge, Node, consistent, undominated
from minipar.planner.elimination import eliminate, marginals
from minipar.planner.greedy import greedy
from minipar.planner.intra import ilp, smallest
from minipar.planner.learned import learn
from minipar.planner.priced import left, priced
from minipar.planner.side_by_side import METHODS
from minipar.planner.what_if import difference, explain, front, solve
from tests.planner.problems import random_graph


@pytest.mark.parametrize("seed", range(10))
def test_without_a_budget(seed):
    graph = random_graph(seed)
    try:
        best = brute_force(graph)
    except PlanError:  # two choices of some neighbours never go together
        with pytest.raises(PlanError, match="go together"):
            ilp(graph)
        return
    for found in (ilp(graph), eliminate(graph)):
        assert found.time == pytest.approx(best.time)
        assert graph.seconds(found.choices) == found.time
        assert found.bound <= best.time + 1e-6
        assert found.gap_to_bound < 1


@pytest.mark.parametrize("seed", range(20, 32))
def test_within_a_budget(seed):
    graph = random_graph(seed, budget=True, impossible=0.0)
    try:
        best = brute_force(graph)
    except PlanError:
        with pytest.raises(PlanError, match="no answer fits; the smallest needs"):
            ilp(graph)
        return
    found = ilp(graph)
    assert found.time == pytest.approx(best.time)
    assert found.memory <= graph.budget
    assert found.bound <= best.time + 1e-6
    assert smallest(graph).memory == min(sum(p) for p in [[min(n.memory) for n in graph.nodes]])


@pytest.mark.parametrize("seed", range(12))
def test_each_choice_has_its_best_answer(seed):
    graph = random_graph(seed, impossible=0.05)
    price = 0.7 * (seed % 3)
    for node, times in zip(graph.nodes, marginals(graph, price), strict=True):
        for label, time in zip(node.labels, times, strict=True):
            try:
                best = eliminate(graph.pinned({node.name: label}), price)
            except PlanError:
                assert time == math.inf
            else:
                assert time == pytest.approx(best.time + price * best.memory)


def test_a_price_of_memory_bounds_what_fits_and_keeps_the_best_answer():
    known = 0
    for seed in range(20, 60):
        graph = random_graph(seed, budget=True, impossible=0.0)
        found = priced(graph)
        if found is None:
            continue
        known += 1
        best = brute_force(graph)
        assert found.bound <= best.time + 1e-9 <= found.best.time + 1e-8
        assert found.best.memory <= graph.budget
        kept = left(graph, found)
        assert brute_force(graph.keep(kept)).time == best.time
        assert ilp(graph).bound == pytest.approx(best.time), "the certificate is tight"
    assert known > 10
    assert priced(random_graph(3).within(1e9)) is None, "everything fits"


def test_a_linear_program_that_is_stopped_returns_what_it_has():
    graph = random_graph(7, nodes=9, most=5)
    free, least = eliminate(graph), smallest(graph)
    tight = graph.within((free.memory + least.memory) / 2)
    best = brute_force(tight)
    found = ilp(tight, seconds=1e-6)
    assert found.memory <= tight.budget
    assert found.bound <= best.time <= found.time
    assert found.gap_to_bound >= found.time / best.time - 1


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 6, 7])
def test_a_chain(seed):
    graph = random_graph(seed, chain=True, budget=seed % 2 == 0, impossible=0.02)
    best = brute_force(graph)
    cells = int(graph.budget or 1)  # bytes are whole numbers, so that nothing is rounded
    found = chain(graph, cells)
    assert (found.time, found.bound) == (best.time, best.time)
    if graph.budget is not None and seed == 0:
        rough = chain(graph, 7)
        assert rough.memory <= graph.budget
        assert rough.bound <= best.time <= rough.time


def test_what_a_chain_refuses():
    with pytest.raises(PlanError, match="not the next node"):
        chain(random_graph(3))
    graph = random_graph(4, chain=True)
    with pytest.raises(PlanError, match="no answer fits; the smallest needs"):
        chain(graph.within(0.5))


@pytest.mark.parametrize("search", [anneal, learn, greedy])
def test_what_is_not_exact_is_no_better(search):
    graph = random_graph(1, impossible=0.0)
    best = brute_force(graph)
    found = search(graph)
    assert best.time <= found.time < 3 * best.time
    assert found.time == graph.seconds(found.choices)
    again = search(graph)
    assert again.choices == found.choices
    tight = graph.within(smallest(graph).memory + 2)
    assert search(tight).memory <= tight.budget


def test_annealing_finds_the_best_of_a_small_graph():
    graph = random_graph(1, impossible=0.0)
    assert anneal(graph, proposals=4000, temperature=0.05).time == brute_force(graph).time
    with pytest.raises(PlanError, match="start needs more memory"):
        anneal(graph.within(0.0), start=[0] * 6)


def test_choices_that_are_left_out_change_no_optimum():
    for seed in range(4):
        graph = random_graph(seed, nodes=5)
        kept = undominated(graph)
        assert brute_force(graph.keep(kept)).time == brute_force(graph).time
        assert brute_force(consistent(graph)).time == brute_force(graph).time
    assert any(len(k) < len(n.labels) for k, n in zip(kept, graph.nodes, strict=True))


def test_all_methods_side_by_side():
    graph = random_graph(2, nodes=5, chain=True)
    found = compare(graph)
    assert {one.method for one in found.answers} | set(found.failed) == set(METHODS)
    assert found.best.time == brute_force(graph).time == found.bound
    assert [one.time for one in found.answers] == sorted(one.time for one in found.answers)
    assert "ilp" in str(found)
    assert found._repr_html_().count("<tr>") == 1 + len(METHODS)
    assert found["greedy"].method == "greedy"
    with pytest.raises(PlanError, match="was not asked"):
        found["luck"]
    assert "brute force" in compare(random_graph(2, nodes=40), {"brute force": brute_force}).failed


def test_pin_and_solve_again():
    graph = random_graph(7, impossible=0.0)
    best = solve(graph)
    for node in graph.nodes:
        for row in explain(graph, node.name).rows:
            pinned = brute_force(graph.pinned({node.name: row.label}))
            assert row.time == pytest.approx(pinned.time)
            assert row.slower == pytest.approx(pinned.time - best.time)
    told = explain(graph, "n0")
    assert told.rows[0].label == told.chosen == best.labels()["n0"]
    other = brute_force(graph.pinned({"n0": told.rows[-1].label}))
    apart = difference(best, other)
    assert apart.seconds == other.time - best.time
    assert "n0" in str(apart) or len(told.rows) == 1
    with pytest.raises(PlanError, match="no such node; the closest are"):
        explain(graph, "n00")
    with pytest.raises(PlanError, match="no choice '9'; possible are"):
        graph.pinned({"n0": "9"})


def test_the_front_of_time_against_memory():
    graph = random_graph(9, nodes=6, impossible=0.0)
    found = front(graph, points=5, gap=0.0)
    assert found[0].memory == smallest(graph).memory
    assert found[-1].time == solve(graph).time
    assert [one.memory for one in found] == sorted(one.memory for one in found)
    assert [one.time for one in found] == sorted((one.time for one in found), reverse=True)
    for one in found:
        assert one.time == brute_force(graph.within(one.memory)).time


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Node("a", ("x",), (1.0, 2.0)), "each choice needs one of both"),
        (lambda: Node("a", ("x",), (-1.0,)), "at least 0"),
        (lambda: CostGraph(()), "0 nodes"),
        (lambda: CostGraph((Node("a", ("x",), (1.0,)),), (Edge(0, 0, np.zeros((1, 1))),)), "to a later one"),
        (lambda: brute_force(random_graph(0, nodes=60)), "possible are up to"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(PlanError, match=message):
        call()


def test_nothing_goes_together():
    nodes = tuple(Node(name, ("x", "y"), (0.0, 0.0)) for name in "ab")
    graph = CostGraph(nodes, (Edge(0, 1, np.full((2, 2), math.inf)),))
    for search in (brute_force, eliminate, ilp, consistent, greedy, learn):
        with pytest.raises(PlanError, match="go together|goes together|goes with"):
            search(graph)


def test_without_scipy(monkeypatch):
    monkeypatch.setattr("minipar.planner.intra.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'minipar\[search\]'"):
        ilp(random_graph(0))
