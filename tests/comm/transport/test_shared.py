"""Shared memory between ranks: what happens when a rank dies, is stopped, or gets no memory; and tests of its parts."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from minipar.cluster import Cluster, worker
from minipar.comm import communicator
from minipar.comm.queues import Queue, Starter
from minipar.comm.transport import arena, calls, shared, shared_memory
from minipar.comm.transport.arena import Arena
from minipar.comm.transport.calls import Steps
from minipar.errors import CollectiveMismatch, RankDied

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, device="cpu") as made:
        yield made


def total() -> float:
    comm = communicator.create()
    return float(comm.allreduce(torch.full((300_000,), float(comm.rank)))[-1])


def test_a_rank_that_is_killed_in_the_middle(cluster: Cluster) -> None:
    """Rank 1 dies at a random moment of many; the others come back with their state."""

    def keep() -> int:
        sys.kept = worker.context().rank  # type: ignore[attr-defined]
        communicator.create()
        return os.getpid()

    def f() -> None:
        comm = communicator.create()
        comm.barrier()
        if comm.rank == 1:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            comm.allreduce(torch.ones(3_000_000))

    pids = cluster.run(keep)
    began = time.monotonic()
    with pytest.raises(RankDied, match=r"^rank 1 was killed by signal 9"):
        cluster.run(f)
    assert time.monotonic() - began < 10
    assert cluster.run(total) == [3.0] * 3
    assert [a == b for a, b in zip(cluster.run(os.getpid), pids, strict=True)] == [True, False, True]
    assert cluster.run(lambda: getattr(sys, "kept", None)) == [0, None, 2]


def test_without_a_driver_the_others_notice_by_themselves() -> None:
    """As under torchrun: a process that ends is seen by those that wait for it."""

    def f() -> str:
        comm = communicator.create()
        group = comm.group()
        assert group.arena is not None
        if comm.rank == 1:
            return ""
        child = os.fork() if comm.rank == 0 else 0
        if comm.rank == 0 and not child:
            os._exit(0)
        if comm.rank == 2:
            return ""
        kept = dict(comm._world.host.watched)
        comm._world.host.watched[1] = os.pidfd_open(child)
        try:
            group.queue.submit("a sum", shared.allreduce(group.arena, torch.ones(5000))).wait()
        except ConnectionError as error:
            return str(error)
        finally:
            os.waitpid(child, 0)
            comm._world.host.watched.update(kept)
        return "nothing"

    with Cluster(3, device="cpu") as three:
        assert three.run(f)[0] == "rank 1 is gone"


def test_who_cannot_have_it_uses_gloo_and_all_are_told_why() -> None:
    def f() -> tuple[str, float, float, list[int], str]:
        comm_rank = worker.context().rank
        if comm_rank == 1:

            def refuse(*_: object) -> Any:
                raise OSError("no memory for this test")

            shared_memory.open_from = shared_memory.make = refuse
        comm = communicator.create()
        x = torch.full((300_000,), float(comm.rank))
        if comm.rank == 1:
            comm.send(x, 0)
        got = float(comm.recv(1)[0]) if comm.rank == 0 else 1.0
        try:
            comm.allreduce(x, algorithm="shared")
            said = ""
        except Exception as error:
            said = str(error)
        return comm.transport, float(comm.allreduce(x)[-1]), got, comm.all_gather([comm.rank] * 2000)[::2000], said

    with Cluster(3, device="cpu") as three:
        found = three.run(f)
    assert [transport for transport, *_ in found] == [
        "gloo (rank 1 has none)",
        "gloo (no memory for this test)",
        "gloo (rank 1 has none)",
    ]
    assert [(whole, got, rows) for _, whole, got, rows, _ in found] == [(3.0, 1.0, [0, 1, 2])] * 3
    assert "algorithm='shared' is not possible: gloo (rank 1 has none)" in found[0][-1]


# The parts alone


def arenas(count: int, gone: Callable[[int], int | None] = lambda _: None) -> list[Arena]:
    memory = mmap.mmap(-1, arena.size(count))
    return [Arena(memory, tuple(range(count)), k, gone) for k in range(count)]


def queues(count: int) -> list[Queue]:
    return [Queue(tuple(range(count)), Starter("starts collectives")) for _ in range(count)]


def announced(end: Arena, call: str, steps: Steps) -> Steps:
    end.announce(calls.announcement(call))
    yield from steps


@pytest.mark.parametrize("gone", [1, 2])
def test_a_rank_that_has_ended_is_noticed(gone: int) -> None:
    ends = arenas(3, lambda k: k if k == gone else None)
    one = queues(3)[0].submit("sum", shared.allreduce(ends[0], torch.ones(9)), False)
    with pytest.raises(ConnectionError, match=f"rank {gone} is gone"):
        one.wait()


def test_ranks_in_any_interleaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks in one process, each step by step, in random order: the sums are right whoever is ahead."""
    monkeypatch.setattr(arena, "_LARGEST", 4096)
    generator = torch.Generator().manual_seed(0)
    for count in (2, 3, 4, 3, 2):
        ends = arenas(count)
        for size in (1, 1000, 40_001):
            content = torch.arange(size) % 1009.0  # other values in every piece
            xs = [content + k for k in range(count)]
            parts = [torch.zeros(size // count) for _ in range(count)]
            wholes = [torch.arange(count * 900.0) + k for k in range(count)]
            lines = queues(count)
            for k, (line, end) in enumerate(zip(lines, ends, strict=True)):
                part = xs[k].clone()[: size // count * count]
                for name, steps in (
                    ("sum", shared.allreduce(end, xs[k])),
                    ("scatter", shared.reduce_scatter(end, part, parts[k], [size // count] * count)),
                    ("give", shared.broadcast(end, wholes[k], count - 1)),
                ):
                    line.submit(name, announced(end, name, steps), False)
            while any(line.waiting for line in lines):
                lines[int(torch.randint(count, (), generator=generator))].run()
            total = count * content + sum(range(count))
            assert all(torch.equal(x, total) for x in xs)
            own = total[: size // count * count].split(max(1, size // count))
            assert all(torch.equal(*pair) for pair in zip(parts, own, strict=False))
            assert all(torch.equal(whole, torch.arange(count * 900.0) + count - 1) for whole in wholes)


def test_after_a_mismatch_all_have_the_same_count_and_go_on() -> None:
    ends, lines = arenas(3), queues(3)
    xs = [torch.ones(50_000) for _ in ends]
    given = [
        announced(ends[0], "broadcast", shared.broadcast(ends[0], torch.ones(9), 1)),
        announced(ends[1], "allreduce", shared.allreduce(ends[1], torch.ones(1_000_000))),
        announced(ends[2], "barrier", shared.rows(ends[2], [])),
    ]
    wrong = [line.submit("one", steps, False) for line, steps in zip(lines, given, strict=True)]
    for line, end, x in zip(lines, ends, xs, strict=True):
        line.submit("sum", announced(end, "sum", shared.allreduce(end, x)), False)
    while any(line.waiting for line in lines):
        for line in lines:
            line.run()
    assert len({str(one.error) for one in wrong}) == 1
    for one in wrong:
        with pytest.raises(
            CollectiveMismatch, match="rank 0 calls broadcast, rank 1 calls allreduce, rank 2 calls bar"
        ):
            one.wait()
    assert len({end.posted for end in ends}) == 1
    assert all(bool((x == 3).all()) for x in xs)
