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
from minipar.comm.transport import arena, shared, shared_memory, stream
from minipar.comm.transport.arena import Arena, Exchange
from minipar.comm.transport.stream import Stream
from minipar.errors import RankDied

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
            group.arena.line_up(one := Exchange(group.arena, shared.allreduce(group.arena, torch.ones(5000))))
            one.wait()
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
    return [Arena(memory, count, k, gone) for k in range(count)]


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_may_end_when_it_has_done_its_part(late: int) -> None:
    """Another one is late then. If that one ends, it is the one that is gone."""
    ended: list[int] = []
    ends = arenas(3, lambda k: k if k in ended else None)
    xs = [torch.full((ends[0].fits(torch.float32) * 2,), k + 1.0) for k in range(3)]  # two pieces
    started = [Exchange(end, shared.reduce(end, x, 0)) for end, x in zip(ends, xs, strict=True)]
    for one in started:
        one.begin()
    for end, one in zip(ends, started, strict=True):
        end.line_up(one)
    started[3 - late].wait()
    ended.append(3 - late)
    timer = threading.Timer(0.2, started[late].wait)
    timer.start()
    started[0].wait()
    timer.join()
    assert bool((xs[0] == 6.0).all())
    again = Exchange(ends[0], shared.reduce(ends[0], xs[0], 0))
    again.begin()
    ends[0].line_up(again)
    ended[:] = [late]
    with pytest.raises(ConnectionError, match=f"rank {late} is gone"):
        again.wait()


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
            started = []
            for k, end in enumerate(ends):
                part = xs[k].clone()[: size // count * count]
                steps = [
                    shared.allreduce(end, xs[k]),
                    shared.reduce_scatter(end, part, parts[k], [size // count] * count),
                    shared.broadcast(end, wholes[k], count - 1),
                ]
                started.append([Exchange(end, one) for one in steps])
                started[k][0].begin()
            for end, exchanges in zip(ends, started, strict=True):
                for one in exchanges:
                    end.line_up(one)
            while not all(end.idle for end in ends):
                ends[int(torch.randint(count, (), generator=generator))].run()
            total = count * content + sum(range(count))
            assert all(torch.equal(x, total) for x in xs)
            own = total[: size // count * count].split(max(1, size // count))
            assert all(torch.equal(*pair) for pair in zip(parts, own, strict=False))
            assert all(torch.equal(whole, torch.arange(count * 900.0) + count - 1) for whole in wholes)


def test_after_a_mismatch_all_have_the_same_count_whoever_had_begun() -> None:
    ends = arenas(3)
    begun = []
    for k, end in enumerate(ends[:2]):
        one = Exchange(end, shared.allreduce(end, torch.ones(50_000)) if k else shared.broadcast(end, torch.ones(9), 0))
        one.begin()
        begun.append(one.begun)
    assert begun == [2, 1]
    for end, count in zip(ends, [*begun, 0], strict=True):
        end.realign(count)
    assert [end.posted for end in ends] == [2, 2, 2]
    xs = [torch.ones(50_000) for _ in ends]
    for end, x in zip(ends, xs, strict=True):
        end.line_up(Exchange(end, shared.allreduce(end, x)))
    while not all(end.idle for end in ends):
        for end in ends:
            end.run()
    assert all(bool((x == 3).all()) for x in xs)


def test_a_stream_keeps_every_byte_in_order() -> None:
    memory = mmap.mmap(-1, stream.SIZE)
    writer, reader = Stream(memory), Stream(memory)
    data = torch.randint(256, (3 * stream.CAPACITY + 12_345,), dtype=torch.uint8).numpy()
    got = bytearray(len(data))
    sizes = [1, 7, 300_000, stream.CAPACITY, 5_000_001]
    failed: list[BaseException] = []

    def write() -> None:
        done = turn = 0
        try:
            while done < len(data):
                done += writer.write(memoryview(data)[done : done + sizes[turn % 5]])
                turn += 1
                writer.wait_to_write()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    done = turn = 0
    deadline = time.monotonic() + 30
    while done < len(data) and time.monotonic() < deadline and not failed:
        reader.wait_to_read()
        done += reader.read(memoryview(got)[done : done + sizes[turn % 4]])
        turn += 1
    thread.join(5)
    assert not failed
    assert bytes(got) == data.tobytes()
