"""Ranks on several hosts, kept apart on this machine: 0 and 1 are on one, 2 and 3 on another one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from minipar.cluster import Cluster
from minipar.comm import communicator
from minipar.comm.communicator import Communicator
from minipar.errors import CollectiveMismatch, Deadlock

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIPAR_HOST", "left,left,right,right")
        with Cluster(4, device="cpu", patience=5.0) as made:
            yield made


def create() -> Communicator:
    return communicator.create()


def test_who_shares_memory_and_who_does_not(four: Cluster) -> None:
    def f() -> tuple[str, bool, bool]:
        comm = create()
        pair = (0, 1) if comm.rank < 2 else (2, 3)
        cross = (comm.rank % 2, comm.rank % 2 + 2)
        return comm.transport, comm.group(pair).arena is not None, comm.group(cross).arena is not None

    assert four.run(f) == [("gloo (ranks are on 2 hosts)", True, False)] * 4


def test_messages_and_sums_between_all(four: Cluster) -> None:
    def f() -> list[Any]:
        comm, found = create(), []
        peers = [peer for peer in range(4) if peer != comm.rank]
        for size in (3, 300_000):
            x = torch.full((size,), float(comm.rank))
            sent = [comm.isend(x, peer, size) for peer in peers]
            got = [torch.empty(size) for _ in peers]
            for peer, into in zip(reversed(peers), got, strict=True):
                comm.irecv(into, peer, size).wait()
            for handle in sent:
                handle.wait()
            found.append([one.unique().tolist() for one in got])
        for ranks in ((0, 1), (1, 2), (0, 1, 2, 3)):
            if comm.rank in ranks:
                for size in (2, 40_000):
                    x = torch.full((size,), float(comm.rank + 1))
                    comm.iallreduce(x, ranks).wait()
                    found.append(x.unique().tolist())
        return found

    for rank, found in enumerate(four.run(f)):
        peers = [[float(peer)] for peer in reversed(range(4)) if peer != rank]
        groups = [ranks for ranks in ((0, 1), (1, 2), (0, 1, 2, 3)) if rank in ranks]
        assert found == [peers] * 2 + [[float(sum(ranks) + len(ranks))] for ranks in groups for _ in range(2)]


# mismatches -----------------------------------------------------------------------------------------------------------


def names(comm: Communicator) -> Any:
    return comm.broadcast(1.0) if comm.rank == 2 else comm.barrier()


def sums(comm: Communicator) -> Any:
    comm.iallreduce(torch.ones(9000 + comm.rank // 2), (0, 1, 2, 3), "bucket 1").wait()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (names, "rank 0 calls barrier, rank 2 calls broadcast from rank 0"),
        (
            sums,
            r"iallreduce: ranks differ: rank 0 has a tensor of 9000 float32 \(bucket 1\), rank 2 has a tensor of 9001",
        ),
    ],
)
def test_mismatches_are_named_on_every_rank(four: Cluster, call: Callable[[Communicator], Any], text: str) -> None:
    """gloo would abort the process where sizes differ, and mix up bytes or hang elsewhere. The group goes on."""

    def f() -> tuple[str, float]:
        comm = create()
        try:
            said = str(call(comm))
        except CollectiveMismatch as error:
            said = str(error)
        return said, comm.allreduce(1.0)

    pids = four.run(os.getpid)
    found = four.run(f)
    assert four.run(os.getpid) == pids
    assert {total for _, total in found} == {4.0}
    said = {said for said, _ in found}
    assert len(said) == 1, said
    assert re.search(text, said.pop())


# the order in which groups are made -----------------------------------------------------------------------------------

CIRCLE = ((0, 1), (1, 2), (0, 2))


def circle(prepared: bool) -> Callable[[], list[float]]:
    """Three ranks begin sums of all their pairs, each in an order in which it would wait for the next one."""

    def f() -> list[float]:
        comm = create()
        if prepared:
            comm.prepare(CIRCLE, algorithm="backend")
        first = [(comm.rank, (comm.rank + 1) % 3), (comm.rank, (comm.rank + 2) % 3)]
        sums = {tuple(sorted(pair)): torch.full((5000,), float(comm.rank)) for pair in first}
        for handle in [comm.iallreduce(x, pair, algorithm="backend") for pair, x in sums.items()]:
            handle.wait()
        return [float(sums[pair][0]) for pair in CIRCLE if pair in sums]

    return f


@pytest.mark.parametrize("hosts", ["", "left,left,right"])
def test_groups_are_made_in_one_order_before_they_are_used(monkeypatch: pytest.MonkeyPatch, hosts: str) -> None:
    monkeypatch.setenv("MINIPAR_HOST", hosts)
    with Cluster(3, device="cpu", patience=1.0) as three:
        assert three.run(circle(True)) == [[1.0, 2.0], [1.0, 3.0], [3.0, 2.0]]
    with Cluster(3, device="cpu", patience=1.0) as three, pytest.raises(Deadlock, match="the making of a group over"):
        three.run(circle(False))
