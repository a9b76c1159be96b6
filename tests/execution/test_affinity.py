"""Ranks keep to cores of their own where they outnumber them, and only meanwhile."""

from __future__ import annotations

import os
import sys

import cloudpickle
import pytest

from minipar import Cluster
from minipar.execution.affinity import on_own_core, ways

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (4, [0, 1], [[0, 1, 1, 0], [0, 1, 0, 1]]),
        (8, [2, 5], [[2, 5, 5, 2, 2, 5, 5, 2], [2, 5, 2, 5, 2, 5, 2, 5]]),
        (4, [3], [[3, 3, 3, 3], [3, 3, 3, 3]]),
        (2, [0, 1], []),  # cores enough
        (3, [0, 1], []),  # one core would have two, the other one
        (1, [0], []),
    ],
)
def test_every_core_has_the_same_number_of_ranks(ranks: int, cores: list[int], expected: list[list[int]]) -> None:
    assert ways(ranks, cores) == expected


def cores(way: int) -> tuple[set[int], set[int], set[int]]:
    before = os.sched_getaffinity(0)
    with on_own_core(way):
        within = os.sched_getaffinity(0)
    return before, within, os.sched_getaffinity(0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no such call on this system")
@pytest.mark.parametrize("way", [0, 1])
def test_a_rank_is_held_only_meanwhile(way: int) -> None:
    mine = sorted(os.sched_getaffinity(0))
    ranks = 2 * len(mine)
    if ranks > 16:
        ranks = 2  # too many to start here: cores enough, nobody is held
    with Cluster(ranks) as cluster:
        for rank, (before, within, after) in enumerate(cluster.run(cores, way)):
            found = ways(ranks, mine)
            assert before == after == set(mine)
            assert within == ({found[way][rank]} if found else set(mine))
