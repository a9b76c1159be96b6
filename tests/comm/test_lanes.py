"""Collectives by programs that run while a rank computes: in any order of groups, to the end, and without a trace."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TimeoutLater
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from minipar import PlanError, communicator
from minipar.comm.communicator import Communicator
from minipar.comm.playing import Playing

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ALL, LOW, HIGH = (0, 1, 2, 3), (0, 1), (2, 3)


def lanes(groups: list[tuple[int, ...]]) -> Communicator:
    comm = communicator.create()
    comm.prepare(groups, algorithm="ring")
    comm.play_beside(groups, "ring")
    return comm


def in_opposite_orders(count: int) -> bool:
    """Half of the ranks begin and await one group's sum first, the others the other one's: in `wait` nobody would go
    on. Whether all sums are right."""
    comm = lanes([ALL, LOW, HIGH])
    mine = LOW if comm.rank in LOW else HIGH
    order = [ALL, mine] if comm.rank % 2 else [mine, ALL]
    right = True
    for k in range(3):
        sums = {group: torch.full((count,), float(comm.rank + k), dtype=torch.float64) for group in order}
        handles = [comm.iallreduce(sums[group], group, algorithm="ring") for group in order]
        for handle in handles:
            handle.wait()
        right &= all(bool((sums[g] == sum(rank + k for rank in g)).all()) for g in order)
    return right


@pytest.mark.parametrize("count", [1_000_003])
def test_groups_in_any_order(clusters, count):
    assert clusters(4).run(in_opposite_orders, count) == [True] * 4


def test_a_collective_may_end_as_a_slice_of_the_wait_does() -> None:
    class Ends(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            try:
                return super().result(timeout)
            except TimeoutLater:
                self.set_result(None)  # (what the lane's thread does at this moment)
                raise

    Playing(Ends(), "ring").wait()
    failed: Future[None] = Future()
    failed.set_exception(TimeoutLater("its own"))
    with pytest.raises(TimeoutLater, match="its own"):
        Playing(failed, "ring").wait()


def without_waiting() -> tuple[bool, bool, list[float]]:
    """All three operations go on while nobody waits, and say when they end."""
    comm = lanes([(0, 1)])
    ended = threading.Event()
    whole, parts, slices = torch.ones(1000), torch.arange(4.0), torch.zeros(2)
    gathered = torch.full((4,), -1.0)
    handles = [
        comm.iallreduce(whole, (0, 1), algorithm="ring"),
        comm.ireduce_scatter(parts, slices, (0, 1), algorithm="ring"),
        *comm.iall_gather(torch.full((2,), float(comm.rank)), gathered, (0, 1), algorithm="ring"),
    ]
    handles[-1].when_done(ended.set)
    told = ended.wait(20)
    done = all(handle.done() for handle in handles)
    for handle in handles:
        handle.wait()
    return told, done, [*whole[:1].tolist(), *slices.tolist(), *gathered.tolist()]


def test_they_go_on_while_the_rank_does_something_else(clusters):
    for rank, (told, done, found) in enumerate(clusters(2).run(without_waiting)):
        assert told
        assert done
        slices = [[0.0, 2.0], [4.0, 6.0]][rank]
        assert found == [2.0, *slices, 0.0, 0.0, 1.0, 1.0]


def closed(told: str) -> tuple[bool, str]:
    """A rank closes while its lane waits for a message that does not come. Whether the thread ends; the error."""
    comm = lanes([(0, 1)])
    if comm.rank == 1:  # (it does nothing before the other one is done)
        until = time.monotonic() + 20
        while not os.path.exists(told) and time.monotonic() < until:
            time.sleep(0.01)
        comm.close()
        return True, ""
    handle, lane = comm.iallreduce(torch.ones(1000), (0, 1), algorithm="ring"), comm.lane((0, 1))
    assert lane is not None
    ended = lane._turns._ended
    time.sleep(0.1)
    comm.close()
    try:
        handle.wait()
    except (ConnectionError, RuntimeError) as error:
        return ended is not None and ended.wait(10), type(error).__name__
    finally:
        open(told, "w").close()
    return False, ""


def test_closing_ends_the_thread_and_what_waits(clusters, tmp_path):
    (over, error), _ = clusters(2).run(closed, str(tmp_path / "told"))
    assert over
    assert error == "ConnectionError"


def test_a_gpu_has_none():
    comm = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(
        PlanError, match="algorithm=ring: while a GPU computes, .* possible are overlap=none, where each"
    ):
        Communicator.play_beside(comm, [(0, 1)], "ring")
