"""The choice of an algorithm by calibrated cost, which is simulated with the rates for the number of messages that
travel at once."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import cloudpickle
import pytest
import torch

from minipar import PlanError, simulate
from minipar.comm import communicator, operations
from minipar.costs.rates import LinearCost
from minipar.prediction.choice import CalibratedCosts, choose, predicted
from minipar.program.collectives import COLLECTIVES, names, program
from tests.costs.test_rates import FOUND

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ALL = FOUND.exchanged(4)[0]


@pytest.mark.parametrize(("collective", "ranks", "size"), list(product(COLLECTIVES, (2, 4), (1 << 10, 1 << 26))))
def test_the_choice_is_the_cheapest(collective, ranks, size):
    seconds = predicted(collective, ranks, size, FOUND)
    assert seconds[choose(collective, ranks, size, FOUND)] == min(seconds.values())
    assert set(names(collective)) == set(seconds) - {"backend"}
    assert ("backend" in seconds) == (collective == "allreduce")


def test_the_backend_is_chosen_where_it_is_faster():
    def slower(line: LinearCost) -> LinearCost:
        return LinearCost(line.fixed + 1.0, line.per_byte)

    exchange = tuple((n, slower(one), slower(more)) for n, one, more in FOUND.exchange)
    ours = replace(FOUND, exchange=exchange, uncontended=slower(FOUND.uncontended))
    assert choose("allreduce", 4, 1 << 26, ours) == "backend"
    theirs = replace(FOUND, allreduce=tuple((n, slower(line)) for n, line in FOUND.allreduce))
    assert choose("allreduce", 4, 1 << 26, theirs) != "backend"


def test_many_short_messages_cost_more_than_few_and_bytes_more_than_steps():
    assert predicted("allreduce", 8, 8, FOUND)["ring"] > predicted("allreduce", 8, 8, FOUND)["halving-doubling"]
    assert predicted("allreduce", 8, 1 << 28, FOUND)["tree"] > predicted("allreduce", 8, 1 << 28, FOUND)["ring"]


def test_a_ring_has_the_rates_of_all_at_once():
    n = 1 << 20
    assert predicted("all_gather", 4, n, FOUND)["ring"] == pytest.approx(3 * ALL.at(n / 4))
    summed = predicted("reduce_scatter", 4, n, FOUND)["ring"]
    assert summed == pytest.approx(3 * (ALL.at(n / 4) + FOUND.add.at(n / 4)))


def test_a_tree_has_the_rates_of_as_many_as_send():
    """Of 4 ranks one sends in the first round, two in the second: a third of the way from alone to all at once."""
    n = 1 << 20
    between = FOUND.uncontended.at(n) + (ALL.at(n) - FOUND.uncontended.at(n)) / 3
    assert predicted("broadcast", 4, n, FOUND)["tree"] == pytest.approx(FOUND.uncontended.at(n) + between)


def test_each_further_message_takes_its_time():
    one = program("all_gather", "direct", 4, 0)
    overhead = min(ALL.fixed, FOUND.exchanged(4)[1].fixed)
    assert simulate(one, CalibratedCosts(one, FOUND)).time == pytest.approx(ALL.fixed + 2 * overhead)


def test_one_rank_needs_no_rates():
    uncontended = replace(FOUND, ranks=1, exchange=(), allreduce=())
    assert set(predicted("allreduce", 1, 8, uncontended).values()) == {0.0}
    with pytest.raises(PlanError, match="knows no exchanges"):
        predicted("allreduce", 2, 8, uncontended)


# by real ranks


def by_auto(rates, size):
    """What algorithm="auto" is on a rank, and whether the sum is right."""
    comm = communicator.create()
    comm.rates, chosen, real = rates, [], operations._chosen

    def noted(*args):
        chosen.append(real(*args))
        return chosen[-1]

    operations._chosen = noted
    try:
        found = comm.allreduce(torch.arange(size, dtype=torch.float64) * (comm.rank + 1), algorithm="auto")
    finally:
        operations._chosen, comm.rates = real, None
    return chosen, torch.equal(found, torch.arange(size) * 6.0)


def test_auto_goes_by_the_rates_that_the_ranks_know(clusters):
    """Three ranks, so that ring, tree and halving-doubling differ; every rank takes the same."""
    everyone = ((3, LinearCost(1e-4, 2e-9), LinearCost(2e-4, 2e-9)),)
    latency = replace(FOUND, ranks=3, exchange=everyone, allreduce=((3, LinearCost(1.0, 0.0)),))
    bytes_ = replace(
        latency,
        uncontended=LinearCost(0.0, 1e-7),
        exchange=((3, LinearCost(0.0, 1e-7), LinearCost(0.0, 1e-7)),),
        add=LinearCost(0.0, 0.0),
    )
    backend = replace(latency, allreduce=((3, LinearCost(0.0, 0.0)),))
    seen = set()
    for rates, size in ((latency, 6), (latency, 60_000), (bytes_, 60_000), (backend, 60_000)):
        wanted = choose("allreduce", 3, 8 * size, rates)
        found = clusters(3).run(by_auto, rates, size)
        assert found == [([wanted if wanted != "backend" else None], True)] * 3
        seen.add(wanted)
    assert "backend" in seen
    assert len(seen) >= 3, "the rates differ enough for different algorithms"


def test_auto_without_rates_is_as_without_an_algorithm(clusters):
    assert clusters(3).run(by_auto, None, 60) == [([None], True)] * 3
