"""Placements of graphs: programs that the simulator runs, and searches with a fixed number of evaluations."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from minipar import Plan
from minipar.costs.partition import partition
from minipar.errors import PlanError
from minipar.planner.graphs import Graph, chain, inception, program_of, step_time
from minipar.planner.placement import (
    SAMPLES,
    OutOfCalls,
    Simulator,
    climb,
    compare,
    contiguous,
    learn,
    sample_randomly,
)
from minipar.prediction.simulator import simulate
from minipar.program import Op, edges
from minipar.program.shape import uniform


def test_one_rank_takes_the_sum():
    for graph in (chain([3.0, 1.0, 2.0]), inception(2)):
        n = len(graph.costs)
        assert step_time(graph, [0] * n, 5) == pytest.approx(5 * sum(graph.costs))


def test_a_pipeline_takes_what_the_dynamic_program_says():
    """Equal stages, free messages: sum(t) + (m - 1) max(t), in the order that the placement gets."""
    graph = chain([3.0] * 8)
    for ranks in (2, 4):
        best = partition(graph.costs, ranks, 6)
        assert contiguous(graph, ranks, 6) == tuple(k * ranks // 8 for k in range(8))
        assert step_time(graph, contiguous(graph, ranks, 6), 6) == pytest.approx(best.time)


def test_messages_take_their_time():
    graph = chain([3.0, 3.0], [6.0, 0.0], bandwidth=2.0)
    assert step_time(graph, (0, 1), 1) == pytest.approx(6 + 3 + 3)  # there, and back as a gradient
    assert step_time(graph, (0, 0), 1) == pytest.approx(6)


def test_branches_run_side_by_side():
    diamond = Graph((3.0, 30.0, 30.0, 3.0), edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    assert step_time(diamond, (0, 0, 0, 0), 1) == pytest.approx(66)
    assert step_time(diamond, (0, 0, 1, 0), 1) == pytest.approx(36)
    program = program_of(diamond, (0, 0, 1, 0), 2)
    sends = [ins for rank in program.ranks for ins in rank if ins.op is Op.SEND]
    assert len(sends) == 2 * 4  # node 0 to node 2, node 2 to node 3, and a gradient for each


def test_no_placement_deadlocks():
    torch.manual_seed(0)
    for graph in (inception(2, bandwidth=0.5), chain([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)):
        for _ in range(30):
            placement = torch.randint(4, (len(graph.costs),)).tolist()
            load = [sum(c for c, r in zip(graph.costs, placement, strict=True) if r == rank) for rank in range(4)]
            assert step_time(graph, placement, 3) >= 3 * max(load) - 1e-9


def until_out_of_calls(search):
    found = []
    with suppress(OutOfCalls):
        found.extend(search)  # (what came before the exception is in it)
    return found


SEARCHES = [sample_randomly, climb, learn]


@pytest.mark.parametrize("search", SEARCHES)
def test_searches_are_seeded_and_stay_within_their_calls(search):
    graph = inception(1)
    runs = []
    for seed in (3, 3, 4):
        simulator = Simulator(graph, 3, 2, 70)
        state = torch.get_rng_state()
        found = until_out_of_calls(search(simulator, seed))
        assert simulator.calls == 70
        assert len(found) == 70
        assert torch.equal(torch.get_rng_state(), state)
        assert all(time == pytest.approx(step_time(graph, placement, 2)) for placement, time in found[:5])
        runs.append(found)
        torch.manual_seed(1)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_policy_learns():
    """On a graph where the answer is plain (two nodes that must be apart), the mean of its samples improves."""
    graph = Graph((10.0, 10.0, 10.0, 10.0), edges=())
    simulator = Simulator(graph, 4, 1, 30 * SAMPLES)
    times = [time for _, time in until_out_of_calls(learn(simulator, 0))]
    assert sum(times[-5 * SAMPLES :]) < 0.92 * sum(times[: 5 * SAMPLES])
    assert min(times) == 10


def test_a_comparison_says_who_wins():
    found = compare(inception(1), 3, microbatches=2, budget=96, seed=1)
    assert [f.time for f in found.found] == sorted(f.time for f in found.found)
    methods = {f.method: f for f in found.found}
    assert set(methods) == {"learned policy", "hill climbing", "random search", "dynamic program"}
    for one in found.found:
        assert one.time == pytest.approx(simulate(program_of(found.graph, one.placement, 2), _costs(found)).time)
        assert len(one.curve) == (0 if one.method == "dynamic program" else 96)
        assert list(one.curve) == sorted(one.curve, reverse=True)
        assert one.time >= found.ideal
    text = str(found)
    assert text.splitlines()[1].startswith(found.found[0].method)
    assert "96" in text
    assert found._repr_html_().count("<tr>") == 5
    figure = found.plot()
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert "hill climbing" in labels
    assert "image/png" in figure._repr_mimebundle_()[0]


def _costs(found):
    from minipar.planner.graphs import GraphCosts

    return GraphCosts(found.graph)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chain([]), "graph of 0 nodes"),
        (lambda: chain([1, 0]), "a cost above 0"),
        (lambda: Graph((1, 1), edges=((1, 0),)), "edge 1, 0: must go from a node to a later one"),
        (lambda: program_of(chain([1, 2]), (0,), 1), "placement"),
        (lambda: compare(chain([1, 2]), 1), "ranks=1"),
        (lambda: compare(chain([1, 2]), 2, budget=0), "budget=0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(PlanError, match=message):
        call()


def test_a_placement_that_was_found_is_a_plan():
    graph = inception(2)
    found = compare(graph, 3, microbatches=2, budget=32)
    shape = replace(uniform(len(graph.costs)), edges=edges.numbered(graph.edges, len(graph.costs)))
    for one in found.found:
        ranks = {rank: k for k, rank in enumerate(sorted(set(one.placement)))}
        place = tuple(ranks[rank] for rank in one.placement)
        program = Plan(pp=len(ranks), place=place, microbatches=2, schedule="looped-bfs").compile(shape)
        assert tuple(map(set, program.placement)) == tuple(
            {layer for layer, rank in enumerate(place) if rank == r} for r in range(len(ranks))
        )
