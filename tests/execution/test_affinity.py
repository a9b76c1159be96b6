"""Ranks keep to cores of their own where they outnumber them, and only meanwhile."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

import cloudpickle
import pytest

from minipar import Cluster
from minipar.execution import affinity
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


def turns() -> tuple[int, int, int]:
    """Nanoseconds of this thread's turns on its core, as Linux tells: before, while it is held, and after."""
    before = turn_of_this_thread()
    with on_own_core():
        within = turn_of_this_thread()
    return before, within, turn_of_this_thread()


def turn_of_this_thread() -> int:
    assert affinity._SCHED_SETATTR is not None
    room = ctypes.create_string_buffer(affinity._ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(affinity._SCHED_SETATTR + 1, 0, room, len(room.raw), 0) == 0
    return int(affinity._ATTRIBUTES.unpack(room.raw)[5])


@pytest.mark.skipif(affinity._SCHED_SETATTR is None or sys.platform != "linux", reason="no such call on this system")
def test_turns_are_longer_only_meanwhile() -> None:
    ranks = 2 * len(os.sched_getaffinity(0))
    if ranks > 16:
        ranks = 2
    asks = ranks > 2 and tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)
    with Cluster(ranks) as cluster:
        for before, within, after in cluster.run(turns):
            assert before == after != affinity._TURN
            assert (within == affinity._TURN) == asks
