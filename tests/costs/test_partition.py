"""Partitions of chains: equal to brute force, and quick for long chains."""

import itertools
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipar import Plan, simulate
from minipar.costs.partition import partition, partition_replicated, stage_times, step_time
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError

numbers = st.one_of(st.integers(0, 9), st.floats(0, 9))


@st.composite
def chains(draw, most=8):
    n = draw(st.integers(1, most))
    p = draw(st.integers(1, n))
    return {
        "costs": draw(st.lists(numbers, min_size=n, max_size=n)),
        "stages": p,
        "microbatches": draw(st.sampled_from([1, 2, 3, 8, 50])),
        "speeds": draw(st.lists(st.sampled_from([0.5, 1, 1, 2, 4, 0.3]), min_size=p, max_size=p)),
        "activations": draw(st.lists(numbers, min_size=n, max_size=n)),
        "bandwidth": draw(st.sampled_from([0.5, 1.0, 3.0])),
    }


def splits(n, p):
    for cuts in itertools.combinations(range(1, n), p - 1):
        ends = [0, *cuts, n]
        yield [b - a for a, b in itertools.pairwise(ends)]


def by_hand(chain, split, speeds):
    """Times of the stages, written out."""
    times, start = [], 0
    for size, speed in zip(split, speeds, strict=True):
        stop = start + size
        hands_on = chain["activations"][stop - 1] / chain["bandwidth"] if stop < len(chain["costs"]) else 0
        times.append(sum(chain["costs"][start:stop]) / speed + hands_on)
        start = stop
    return times


def brute_force(chain, speeds):
    times = [by_hand(chain, split, speeds) for split in splits(len(chain["costs"]), chain["stages"])]
    return min(sum(t) + (chain["microbatches"] - 1) * max(t) for t in times)


@given(chains())
def test_equal_to_brute_force(chain):
    found = partition(**chain)
    assert found.time == pytest.approx(brute_force(chain, chain["speeds"]), rel=1e-12, abs=1e-12)
    assert sum(found.split) == len(chain["costs"])
    assert min(found.split) >= 1
    assert found.times == pytest.approx(by_hand(chain, found.split, chain["speeds"]), rel=1e-12)


def test_known_cases():
    assert partition([1] * 16, 4, 8, speeds=[1, 1, 2, 4]).split == (2, 2, 4, 8)
    # The instance on which torchgpipe's block partition never returns.
    assert max(partition([5, 3, 3, 3, 8, 3, 5, 8, 20], 8, 100).times) == 20
    # One micro-batch only: the way counts, not the slowest stage, so cuts go where they are cheap.
    assert partition([1, 1, 1, 1], 2, 1, activations=[0, 9, 9, 9]).split == (1, 3)
    assert partition([1, 1, 1, 1], 2, 100, activations=[0.5, 0.6, 0.7, 0]).split == (2, 2)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
)
def test_replicated_stages_equal_brute_force(costs, ranks, activations, parameters):
    n = len(costs)
    found = partition_replicated(costs, ranks, activations=activations[:n], parameters=parameters[:n], bandwidth=2.0)

    def slowest(split, held):
        times, start = [], 0
        for size, r in zip(split, held, strict=True):
            stop = start + size
            times.append(max(sum(costs[start:stop]), 2 * (r - 1) * sum(parameters[start:stop]) / 2) / r)
            times.append(2 * activations[stop - 1] / 2 if stop < n else 0)
            start = stop
        return max(times)

    every = [
        slowest(split, held)
        for p in range(1, min(n, ranks) + 1)
        for split in splits(n, p)
        for held in itertools.product(range(1, ranks + 1), repeat=p)
        if sum(held) == ranks
    ]
    assert found.slowest == pytest.approx(min(every))
    assert slowest(found.split, found.ranks) == pytest.approx(found.slowest)
    assert (sum(found.split), sum(found.ranks)) == (n, ranks)


def test_ten_thousand_layers():
    costs = [1 + (k * 7919) % 13 for k in range(10_000)]
    messages = [1 + (k * 104729) % 11 for k in range(10_000)]
    start = time.process_time()
    found = partition(costs, 8, 32, speeds=[1, 1, 2, 2, 1, 3, 1, 1], activations=messages)
    assert time.process_time() - start < 30, "a rough bound on a busy machine"
    assert sum(found.split) == 10_000
    assert found.time == step_time(found.times, 32)
    # No neighbouring cut is better.
    for s in range(7):
        for move in (-1, 1):
            split = list(found.split)
            split[s], split[s + 1] = split[s] + move, split[s + 1] - move
            times = stage_times(costs, split, speeds=[1, 1, 2, 2, 1, 3, 1, 1], activations=messages)
            assert step_time(times, 32) >= found.time


def test_the_objective_is_what_gpipe_takes():
    """In the simulator, with free messages: sum(t) + (m - 1) max(t), for the forward and for the backward."""
    costs = LayerCosts((1.0, 5.0, 2.0, 2.0, 4.0), (2.0, 10.0, 4.0, 4.0, 8.0), *((0,) * 5 for _ in range(3)))
    plan = Plan(pp=3, microbatches=6, schedule="gpipe", split="auto")
    program = plan.compile(layers=5, costs=costs)
    forward = stage_times(costs.forward, [len(held) for held in program.placement])
    assert max(forward) == 6
    factors = [t / max(forward) for t in forward]
    trace = simulate(program, forward=max(forward), backward=2 * max(forward), stage_factors=factors)
    best = partition([a + b for a, b in zip(costs.forward, costs.backward, strict=True)], 3, 6)
    assert trace.time == pytest.approx(best.time)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition([1, 2], 3), "stages=3: must be from 1 to 2"),
        (lambda: partition([1, 2], 0), "stages=0: must be from 1 to 2"),
        (lambda: partition([], 1), "stages=1: must be from 1 to 0"),
        (lambda: partition([1, 2], 2, 0), "microbatches=0"),
        (lambda: partition([1] * 10_001, 2), "10001 layers; possible are up to 10000"),
        (lambda: partition([1, -2], 2), "at least 0"),
        (lambda: partition([1, math.nan], 2), "finite numbers of at least 0"),
        (lambda: partition([1, 2], 2, speeds=[1, 0]), "above 0"),
        (lambda: partition([1, 2], 2, bandwidth=0), "above 0"),
        (lambda: partition([1, 2], 2, speeds=[1]), "1 speeds for 2 stages"),
        (lambda: partition([1, 2], 2, activations=[1]), "1 activation for 2 layers"),
        (lambda: partition_replicated([1, 2], 0), "ranks=0"),
        (lambda: partition_replicated([1, 2], 2, parameters=[1]), "1 parameters for 2 layers"),
        (lambda: stage_times([1, 2, 3], (1, 1)), "split=1,1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(PlanError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
