"""gloo alone: failures have the same errors as over the local transport, and the next run has all ranks again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
import torch

from minipar import Cluster
from minipar.cluster import worker
from minipar.comm import communicator
from minipar.errors import Deadlock, RankDied, RankError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(3, device="cpu", transport="gloo", patience=2.0) as cluster:
        yield cluster


def total() -> int:
    return int(communicator.create().allreduce(1))


def wait_for_rank_1(how: str) -> None:
    comm = communicator.create()
    comm.barrier()
    if comm.rank == 1 and how == "raises":
        raise ValueError("of rank 1")
    if comm.rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1 and how == "is stopped":
        worker.report(None)
        threading.Event().wait()
    if comm.rank == 0:
        comm.irecv(torch.empty(3), 1).wait()
    comm.irecv(torch.empty(3), 0).wait() if comm.rank == 1 else comm.allreduce(torch.ones(3))


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("raises", ValueError, "of rank 1"),
        ("dies", RankDied, "rank 1 was killed by signal 9"),
        (
            "waits too",
            Deadlock,
            r"(?s)rank 0: recv from rank 1.*rank 1: recv from rank 0.*rank 2: allreduce",
        ),
    ],
)
def test_what_fails_is_named_and_the_next_run_goes_on(three, how, error, says):
    assert three.run(total) == [3, 3, 3]
    with pytest.raises(error, match=says):
        three.run(wait_for_rank_1, how)
    assert three.run(total) == [3, 3, 3]


def test_int16_which_gloo_does_not_know(three):
    def f() -> bool:
        comm = communicator.create()
        everyone = [(torch.arange(3001) * 29 + 20_000 * k).to(torch.int16) for k in range(3)]  # sums that overflow
        mine, total, largest = everyone[comm.rank], sum(everyone[1:], everyone[0]), torch.stack(everyone).amax(0)
        in_place, rows = mine.clone(), slice(*((0, 1001), (1001, 2001), (2001, 3001))[comm.rank])
        comm.iallreduce(in_place, (0, 1, 2)).wait()
        reduced = comm.reduce(mine, 1)
        right = [
            (comm.allreduce(mine), total),
            (comm.allreduce(mine, max), largest),
            (in_place, total),
            (comm.reduce_scatter(mine), total[rows]),
            (comm.all_gather(mine), torch.cat(everyone)),
            (comm.broadcast(mine if comm.rank == 2 else None, 2), everyone[2]),
            *([(reduced, total)] if comm.rank == 1 else []),
        ]
        return all(found.dtype == torch.int16 and torch.equal(found, expected) for found, expected in right)

    assert three.run(f) == [True] * 3


def test_the_stop_button_reaches_ranks_that_wait(three):
    assert three.run(total) == [3, 3, 3]
    with pytest.raises(KeyboardInterrupt):
        three.run_with(lambda *_: os.kill(os.getpid(), signal.SIGINT), wait_for_rank_1, "is stopped")
    assert three.run(total) == [3, 3, 3]


def test_it_says_what_it_is_and_what_it_cannot(three):
    assert three.transport == "gloo"
    assert repr(three) == "Cluster(3 ranks, cpu over gloo, ready)"
    assert set(three.run(lambda: communicator.create().transport)) == {"gloo (transport='gloo')"}
    with pytest.raises(RankError, match="possible are ranks on one machine"):
        three.run(lambda: communicator.create().readable([0], 0.0))


def test_there_is_neither_a_socket_nor_shared_memory_of_one_machine(three):
    """Nothing but gloo carries anything: what the local transport would use is not even made."""

    def f() -> bool:
        comm = communicator.create()
        comm.allreduce(torch.ones(5000))
        comm.send([1], (comm.rank + 1) % 3) if comm.rank == 0 else comm.recv(0) if comm.rank == 1 else None
        return mapped()

    assert three.run(f) == [False] * 3
    with Cluster(2, device="cpu") as local:
        assert local.run(lambda: (total(), mapped())) == [(2, True)] * 2


def mapped() -> bool:
    """In a rank: whether it has memory that ranks share."""
    return "memfd:minipar" in Path("/proc/self/maps").read_text()
