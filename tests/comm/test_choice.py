"""The choice of an algorithm by calibrated cost: simulated with the rates of as many messages as are under way."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from minipar import PlanError, simulate
from minipar.comm.algorithms import COLLECTIVES, names, program
from minipar.comm.choice import CalibratedCosts, choose, predicted
from minipar.costs.rates import Line
from tests.costs.test_rates import FOUND

ALL = FOUND.exchanged(4)[0]


@pytest.mark.parametrize(("collective", "ranks", "size"), list(product(COLLECTIVES, (2, 4), (1 << 10, 1 << 26))))
def test_the_choice_is_the_cheapest(collective, ranks, size):
    seconds = predicted(collective, ranks, size, FOUND)
    assert seconds[choose(collective, ranks, size, FOUND)] == min(seconds.values())
    assert set(names(collective)) == set(seconds) - {"backend"}
    assert ("backend" in seconds) == (collective == "allreduce")


def test_the_backend_is_chosen_where_it_is_faster():
    def slower(line: Line) -> Line:
        return Line(line.fixed + 1.0, line.per_byte)

    exchange = tuple((n, slower(one), slower(more)) for n, one, more in FOUND.exchange)
    ours = replace(FOUND, exchange=exchange, alone=slower(FOUND.alone))
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
    between = FOUND.alone.at(n) + (ALL.at(n) - FOUND.alone.at(n)) / 3
    assert predicted("broadcast", 4, n, FOUND)["tree"] == pytest.approx(FOUND.alone.at(n) + between)


def test_each_further_message_takes_its_time():
    one = program("all_gather", "direct", 4, 0)
    overhead = min(ALL.fixed, FOUND.exchanged(4)[1].fixed)
    assert simulate(one, CalibratedCosts(one, FOUND)).time == pytest.approx(ALL.fixed + 2 * overhead)


def test_one_rank_needs_no_rates():
    alone = replace(FOUND, ranks=1, exchange=(), allreduce=())
    assert set(predicted("allreduce", 1, 8, alone).values()) == {0.0}
    with pytest.raises(PlanError, match="knows no exchanges"):
        predicted("allreduce", 2, 8, alone)
