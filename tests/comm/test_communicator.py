"""Communicator: what ranks can send and sum, and the errors for what they cannot."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from minipar.cluster import Cluster, worker
from minipar.comm import communicator, queues, values
from minipar.comm.communicator import Communicator
from minipar.comm.transport import sockets
from minipar.errors import RankError

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, device="cpu") as made:
        yield made


def create() -> Communicator:
    return communicator.create()


# allreduce


@pytest.mark.parametrize(
    ("by_rank", "op", "expected"),
    [
        ([1, 2, 4], sum, 7),
        ([1.5, 2.0, 4.0], min, 1.5),
        ([1, 2, 4], "avg", 7 / 3),
        ([True, False, True], sum, 2),
        ([[1], [2.5], [3]], "sum", [6.5]),  # one rank's real number makes the result real on all
        ([[[1, 2], [3, 4]], [[0, 0], [1, 1]], [[5, 0], [0, 5]]], sum, [[6, 2], [4, 10]]),
        ([[[1, 2], [3, 4]], [[0, 0], [1, 1]], [[5, 0], [0, 5]]], max, [[5, 2], [3, 5]]),
        ([[], [], []], sum, []),
        ([2**53 + 1, 0, 0], sum, 2**53 + 1),
    ],
)
def test_numbers_and_lists(cluster: Cluster, by_rank: list[Any], op: Any, expected: Any) -> None:
    def f() -> Any:
        return create().allreduce(by_rank[worker.context().rank], op)

    for result in cluster.run(f):
        assert result == expected
        assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("x", "op", "text"),
    [
        ([1], "mean", r"op='mean' is not known; possible are sum, max, min, avg"),
        ([1], len, "op='len' is not known"),
        ("text", sum, "a str is not possible; possible are a number, a list of numbers"),
        ([1, "a"], sum, "a list with a str in it"),
        ([[1, 2], [3]], sum, "equal lengths"),
        ([2**70], sum, "64 bits"),
        (np.array(["a"]), sum, "dtype <U1 is not possible"),
        (np.array([1j]), sum, "dtype complex128 is not possible"),
        (np.array([1, 2]), "avg", "average is no int64"),
        (torch.ones(1, dtype=torch.bool), sum, "dtype bool is not possible"),
        (torch.ones([1] * 9), sum, "9 dimensions are too many"),
    ],
)
def test_what_cannot_be_reduced_is_told(cluster: Cluster, x: Any, op: Any, text: str) -> None:
    with pytest.raises(RankError, match=text):
        cluster.run(lambda: create().allreduce(x, op))


# Point to point


def test_a_dropped_handle_keeps_its_tensor_until_it_is_sent(cluster: Cluster) -> None:
    def f() -> bool:
        comm = create()
        comm.barrier()
        if comm.rank == 0:
            comm.isend(torch.arange(4_000_000.0), 1, 9)
            gc.collect()
            for _ in range(10):
                torch.full((4_000_000,), -1.0)  # would take the place of the tensor
            comm.barrier()
            (handle,) = comm.pending
            handle.wait()
        elif comm.rank == 1:
            comm.barrier()
            got = torch.empty(4_000_000)
            comm.irecv(got, 0, 9).wait()
            return bool((got == torch.arange(4_000_000.0)).all())
        else:
            comm.barrier()
        return True

    assert cluster.run(f) == [True] * 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda comm: comm.isend(torch.ones(2, 3).T, (comm.rank + 1) % 3), r"strides \(1, 3\) .* use .contiguous"),
        (lambda comm: comm.iallreduce(torch.ones(2, 3).T, (0, 1, 2)), "contiguous"),
        (lambda comm: comm.isend(torch.ones(1), comm.rank), "cannot send to or receive from rank .: 3 ranks"),
        (lambda comm: comm.irecv(torch.ones(1), 3), "from rank 3: 3 ranks"),
        (lambda comm: comm.iallreduce(torch.ones(1), (2, 1, 0)), r"group \(2, 1, 0\): must be sorted ranks of 0 to 2"),
        (lambda comm: comm.iallreduce(torch.ones(1), ((comm.rank + 1) % 3,)), "this rank . among them"),
        (lambda comm: comm.iallreduce(torch.ones(1), ()), "must be"),
    ],
)
def test_calls_that_cannot_be_are_told(cluster: Cluster, call: Any, text: str) -> None:
    with pytest.raises(RankError, match=text):
        cluster.run(lambda: call(create()))


# Groups


def test_barrier_waits_for_the_last(cluster: Cluster) -> None:
    def f() -> tuple[float, float]:
        comm = create()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.3)
        came = time.monotonic()
        comm.barrier()
        return came, time.monotonic()

    found = cluster.run(f)
    assert min(left for _, left in found) >= max(came for came, _ in found)


# Making and closing


def test_it_is_made_once_and_there_is_no_global_group(cluster: Cluster) -> None:
    def f() -> tuple[bool, bool, int, int, str, str]:
        comm = create()
        same = comm is create()
        return same, torch.distributed.is_initialized(), comm.rank, comm.size, str(comm.device), comm.backend

    assert cluster.run(f) == [(True, False, rank, 3, "cpu", "gloo") for rank in range(3)]


def test_after_close_the_next_create_makes_a_new_one(cluster: Cluster) -> None:
    def f() -> tuple[bool, str, list[int]]:
        comm = create()
        comm.close()
        comm.close()
        try:
            comm.barrier()
            said = ""
        except RankError as error:
            said = str(error)
        return create() is comm, said, create().allreduce([1])

    for same, said, total in cluster.run(f):
        assert not same
        assert "this Communicator is closed; communicator.create() makes a new one" in said
        assert total == [3]


@pytest.mark.parametrize("operation", ["irecv", "isend", "iallreduce"])
def test_after_a_failure_there_is_a_new_one_whatever_was_under_way(cluster: Cluster, operation: str) -> None:
    def f() -> None:
        comm = create()
        comm.barrier()
        if comm.rank == 0:
            if operation == "iallreduce":  # from here on rank 0 is one ahead of the others
                comm.iallreduce(torch.ones(2), (0, 1, 2))
            else:
                getattr(comm, operation)(torch.ones(2), 1, 77)
        raise ValueError("with something under way")

    pids = cluster.run(os.getpid)
    with pytest.raises(ValueError, match="under way"):
        cluster.run(f)
    started = time.monotonic()
    assert cluster.run(lambda: create().allreduce([1])) == [[3]] * 3
    assert time.monotonic() - started < 3
    assert cluster.run(os.getpid) == pids  # every rank had answered, so every rank kept its state


def once(owner: type, name: str) -> None:
    """An interrupt comes at the end of the next call of this method."""
    original = getattr(owner, name)

    def then_interrupted(self: Any, *given: Any) -> Any:
        found = original(self, *given)
        setattr(owner, name, original)
        signal.raise_signal(signal.SIGINT)
        return found

    setattr(owner, name, then_interrupted)


@pytest.mark.parametrize("call", ["recv", "allreduce"])
def test_after_an_interrupt_in_the_middle_of_a_call_that_was_caught_it_gives_nothing_wrong(
    cluster: Cluster, call: str
) -> None:
    """A part of a message was read, and the function goes on: it is told, and does not get the rest of it."""

    def f() -> Any:
        comm = create()
        if call == "recv" and comm.rank == 0:
            comm.send([1] * values.FORM, 1)
            comm.send([2] * values.FORM, 1)
        if comm.rank == 1:
            once(*((sockets._Incoming, "next") if call == "recv" else (queues.Queue, "run")))
            again = partial(comm.recv, 0) if call == "recv" else partial(comm.allreduce, 1)
            with contextlib.suppress(KeyboardInterrupt):
                again()
            return again()

    with pytest.raises(RankError, match=f"an interrupt came in the middle of {call}, after which this communicator"):
        cluster.run(f)
    assert cluster.run(lambda: create().allreduce(1)) == [3, 3, 3]


def test_a_full_disk_does_not_end_a_rank_that_closes_an_old_one(cluster: Cluster) -> None:
    """torch's store writes to its file once more as it goes, and ends the process if it cannot."""

    def limit(size: int) -> int:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return os.getpid()

    def fail() -> None:
        create().barrier()
        raise ValueError("so that the next run makes another one")

    unlimited = -1
    cluster.run(lambda: create().barrier())
    pids = cluster.run(limit, 1)
    with pytest.raises(ValueError, match="so that"):
        cluster.run(fail)
    assert cluster.run(limit, unlimited) == pids


def test_some_ranks_alone_cannot_make_it() -> None:
    def ring() -> float:
        comm = create()
        got = torch.zeros(1)
        if comm.rank == 0:
            comm.isend(torch.ones(1), 1, 0).wait()
        else:
            comm.irecv(got, 0, 0).wait()
        return got.item()

    with Cluster(3, device="cpu") as three:
        with pytest.raises(RankError, match="is made by all ranks together: call it once"):
            three.run_on([0, 1], create)
        three.run(lambda: create().size)
        assert three.run_on([0, 1], ring) == [0.0, 1.0]


def test_gloo_listens_on_the_loopback_alone(cluster: Cluster) -> None:
    def f() -> list[str]:
        create().allreduce(torch.ones(1), algorithm="backend")
        inodes = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        addresses = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    addresses.append(fields[1].split(":")[0])
        return addresses

    for addresses in cluster.run(f):
        assert set(addresses) == {"0100007F"}  # 127.0.0.1


def test_outside_a_rank_it_says_where_to_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RankError, match=r"call it in a function given to cluster.run .*RANK, WORLD_SIZE"):
        create()


@pytest.mark.parametrize("hosts", [1, 2])
def test_it_works_in_processes_that_torchrun_started(hosts: int) -> None:
    """Which host a process is on it says itself; torchrun's LOCAL_WORLD_SIZE need not be there."""

    def f() -> tuple[int, int, str, list[int], float]:
        worker._rank = None  # all that is left are the variables that torchrun would have set
        comm = create()
        first, how = comm.allreduce([comm.rank, 1]), comm.transport
        if comm.rank == 0:
            comm.send(120, 1)
        else:
            first.append(comm.recv(0))
        comm.close()
        return comm.rank, comm.size, how, first, create().allreduce(2.0, max)

    with Cluster(2, device="cpu") as two:

        def g() -> Any:
            rank = worker._rank
            os.environ.pop("LOCAL_WORLD_SIZE", None)
            if hosts == 2:
                os.environ["MINIPAR_HOST"] = f"host {worker.context().rank}"
            try:
                return f()
            finally:
                worker._rank = rank

        how = "shared memory" if hosts == 1 else "gloo (ranks are on 2 hosts)"
        assert two.run(g) == [(0, 2, how, [1, 2], 2.0), (1, 2, how, [1, 2, 120], 2.0)]


# On GPUs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("more", [0, 1], ids=["nccl", "gloo through the host"])
def test_tensors_on_gpus(more: int) -> None:
    size = torch.cuda.device_count() + more

    def f() -> tuple[list[float], list[float], list[float]]:
        comm = create()
        comm.prepare([tuple(range(comm.size))])
        x = torch.full((4,), float(comm.rank), device=comm.device)
        total = comm.allreduce(x)
        got = torch.empty(4, device=comm.device)
        if comm.size > 1:
            ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            handles = [comm.irecv(got, behind, 1), comm.isend(x * 2, ahead, 1)]
            for handle in handles:
                handle.wait()
        comm.iallreduce(x, tuple(range(comm.size))).wait()
        return total.tolist(), got.tolist(), x.tolist()

    with Cluster(size, device="cuda") as gpus:
        for rank, (total, got, x) in enumerate(gpus.run(f)):
            assert total == x == [float(sum(range(size)))] * 4
            if size > 1:
                assert got == [2.0 * ((rank - 1) % size)] * 4
