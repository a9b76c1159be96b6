"""Ranks keep to cores of their own where they outnumber them, and only meanwhile."""

from __future__ import annotations

import os
import sys

import cloudpickle
import pytest

from minipar import Cluster
from minipar.execution.affinity import cores_of, on_own_core

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (4, [0, 1], [0, 1, 1, 0]),
        (8, [2, 5], [2, 5, 5, 2, 2, 5, 5, 2]),
        (4, [3], [3, 3, 3, 3]),
        (2, [0, 1], None),  # cores enough
        (3, [0, 1], None),  # one core would have two, the other one
        (1, [0], None),
    ],
)
def test_every_core_has_the_same_number_of_ranks(ranks: int, cores: list[int], expected: list[int] | None) -> None:
    assert cores_of(ranks, cores) == expected


def cores() -> tuple[set[int], set[int], set[int]]:
    before = os.sched_getaffinity(0)
    with on_own_core():
        within = os.sched_getaffinity(0)
    return before, within, os.sched_getaffinity(0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no such call on this system")
def test_a_rank_is_held_only_meanwhile() -> None:
    mine = sorted(os.sched_getaffinity(0))
    ranks = 2 * len(mine)
    if ranks > 16:
        ranks = 2  # too many to start here: cores enough, nobody is held
    with Cluster(ranks) as cluster:
        for rank, (before, within, after) in enumerate(cluster.run(cores)):
            found = cores_of(ranks, mine)
            assert before == after == set(mine)
            assert within == ({found[rank]} if found else set(mine))
