"""A worker's pull waits at server 0 until the worker's gradient has reached all servers."""

from __future__ import annotations

from minipar.server.process import Arrivals, Replicas


def test_who_pushed_nothing_does_not_wait():
    assert not Arrivals(2).wait(0)


def test_who_pulls_waits_until_what_it_pushed_is_everywhere():
    arrivals = Arrivals(2)
    assert not arrivals.whole(0, 3, life=7, server=1)
    assert not arrivals.wait(1), "another worker has nothing to do with it"
    assert arrivals.wait(0)
    assert arrivals.wait(0), "and again, as long as it is so"
    assert arrivals.whole(0, 3, life=7, server=0)
    assert arrivals.awaited(0)
    assert not arrivals.awaited(0), "it is let go once"
    assert not arrivals.wait(0)


def test_a_gradient_that_is_everywhere_lets_nobody_wait():
    arrivals = Arrivals(1)
    assert arrivals.whole(0, 3, life=7, server=0)
    assert not arrivals.wait(0)
    assert not arrivals.awaited(0)


def test_the_same_server_does_not_count_twice():
    arrivals = Arrivals(2)
    assert not arrivals.whole(0, 3, life=7, server=1)
    assert not arrivals.whole(0, 3, life=7, server=1)
    assert arrivals.wait(0)


def test_who_begins_anew_does_not_wait_for_what_it_pushed_in_another_life():
    arrivals = Arrivals(2)
    arrivals.whole(0, 3, life=7, server=1)
    arrivals.whole(1, 3, life=5, server=1)
    assert arrivals.wait(0)
    arrivals.forget(0, life=8)
    assert not arrivals.wait(0)
    assert not arrivals.awaited(0)
    assert arrivals.wait(1), "the other one still does"
    arrivals.whole(0, 4, life=8, server=0)
    arrivals.forget(0, life=8)
    assert arrivals.wait(0), "what it pushed in this life counts"


def test_a_replica_has_pushed_when_all_its_workers_have_and_pulls_when_all_do():
    arrivals = Arrivals(2, {1: 1}, Replicas([(0, 1), (2, 3)]))
    assert not arrivals.whole(1, 3, life=5, server=1), "it has nothing on the other server, but worker 0 has"
    assert not arrivals.whole(2, 3, life=9, server=0)
    assert not arrivals.whole(2, 3, life=9, server=1), "this is of the other replica"
    assert arrivals.wait(1, late=True), "worker 0 has not pushed"
    assert not arrivals.whole(0, 3, life=7, server=0)
    assert arrivals.whole(0, 3, life=7, server=1)
    assert not arrivals.awaited(0), "worker 0 has not pulled"
    assert not arrivals.wait(0)
    arrivals.pulling.forget(0, 1)
    assert arrivals.wait(0, late=True)
    assert arrivals.wait(1, late=True)
    assert not arrivals.whole(1, 4, life=5, server=1)
    arrivals.forget(1, life=6)
    arrivals.whole(0, 4, life=7, server=0)
    assert not arrivals.whole(0, 4, life=7, server=1), "what worker 1 pushed in another life does not count"
    assert arrivals.whole(1, 4, life=6, server=1)
