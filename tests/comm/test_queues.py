"""Collectives are announced before they start: mismatches are named, and never reach gloo."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from minipar.cluster import Cluster
from minipar.comm import communicator
from minipar.comm.queues import Queue
from minipar.comm.transport import calls
from minipar.errors import CollectiveMismatch, RankError

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ALL = (0, 1, 2)
LARGE = 4096  # elements


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, device="cpu") as made:
        yield made


def sizes(comm: Any) -> Any:
    return comm.iallreduce(torch.ones(LARGE + (comm.rank == 1)), ALL)


def small_sizes(comm: Any) -> Any:
    return comm.iallreduce(torch.ones(2 + (comm.rank == 1)), ALL)


def dtypes(comm: Any) -> Any:
    return comm.iallreduce(torch.ones(LARGE, dtype=torch.int32 if comm.rank == 1 else torch.float32), ALL)


def order(comm: Any) -> Any:
    a, b = torch.ones(LARGE), torch.ones(LARGE)  # of one form: only their names tell
    first = [(a, "weights"), (b, "biases")]
    handles = [comm.iallreduce(x, ALL, name) for x, name in (first[::-1] if comm.rank == 1 else first)]
    handles[1].wait()
    return handles[0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (sizes, "iallreduce: ranks differ: rank 0 has a tensor of 4096 float32, rank 1 has a tensor of 4097 float32"),
        (small_sizes, "iallreduce: ranks differ: rank 0 has a tensor of 2 float32, rank 1 has a tensor of 3 float32"),
        (dtypes, "iallreduce: ranks differ: rank 0 has a tensor of 4096 float32, rank 1 has a tensor of 4096 int32"),
        (order, "rank 0 has a tensor of 4096 float32 (biases), rank 1 has a tensor of 4096 float32 (weights)"),
    ],
)
def test_mismatches_are_named_on_every_rank(cluster: Cluster, call: Callable[[Any], Any], text: str) -> None:
    pids = cluster.run(os.getpid)

    def f() -> str:
        try:
            call(communicator.create()).wait()
        except CollectiveMismatch as error:
            return str(error)
        return "nothing"

    assert all(text in said for said in cluster.run(f))
    with pytest.raises(RankError, match="ranks differ"):
        cluster.run(lambda: call(communicator.create()).wait())
    assert cluster.run(lambda: communicator.create().allreduce([1])) == [[3]] * 3
    assert cluster.run(os.getpid) == pids  # nobody was aborted


@pytest.mark.parametrize("elements", [LARGE])
def test_the_caller_does_not_wait_and_others_need_not_wait_for_it(cluster: Cluster, elements: int) -> None:
    """Rank 0 starts first, then computes and looks after nothing: the helper thread takes part for it."""

    def f() -> tuple[float, float, float]:
        comm = communicator.create()
        comm.barrier()
        began = time.monotonic()
        if comm.rank:
            time.sleep(0.8)
        x = torch.ones(elements)
        handle = comm.iallreduce(x, ALL)
        called = time.monotonic() - began
        told: list[float] = []
        handle.when_done(lambda: told.append(time.monotonic()))
        if comm.rank == 0:
            end = time.monotonic() + 2
            while time.monotonic() < end:
                pass
        handle.wait()
        waited = time.monotonic() - began
        return called, waited, told[0] - began

    first, *others = cluster.run(f)
    assert first[0] < 0.6
    assert 0.6 < first[2] < 1.8
    assert all(waited < 1.8 for _, waited, _ in others)


@pytest.mark.parametrize("seed", range(2))
def test_random_sequences_sum_right_or_name_the_first_difference(cluster: Cluster, seed: int) -> None:
    """One rank deviates at a random place. Sleeps of random length change who comes last."""
    plan = random.Random(seed)
    lengths = [plan.choice([1, 5, 300, LARGE, 3 * LARGE]) for _ in range(60)]
    wrong, at = plan.randrange(3), plan.randrange(60)

    def f() -> tuple[int, str]:
        comm = communicator.create()
        own = random.Random(100 * seed + comm.rank)
        under_way: list[tuple[int, torch.Tensor, Any]] = []
        said, right = "", 0
        for k, length in enumerate(lengths):
            x = torch.ones(length + (k == at and comm.rank == wrong))
            under_way.append((k, x, comm.iallreduce(x, ALL)))
            if own.random() < 0.2:
                time.sleep(own.random() * 0.01)
            while under_way and (own.random() < 0.4 or k == len(lengths) - 1):
                j, y, handle = under_way.pop(own.randrange(len(under_way)))
                try:
                    handle.wait()
                    right += bool((y == 3).all())
                except CollectiveMismatch as error:
                    said += f"{j}: {error}"
        return right, said

    results = cluster.run(f)
    assert [right for right, _ in results] == [59] * 3
    assert len({said for _, said in results}) == 1
    assert results[0][1].startswith(f"{at}: iallreduce: ranks differ")


def test_all_are_named_and_first_two_that_differ() -> None:
    said = [calls.announcement(f"allreduce of {name}") for name in "aaba"]
    with pytest.raises(CollectiveMismatch, match="allreduce: ranks differ: rank 0 has a, rank 5 has b, rank 1 has a"):
        calls.compare((0, 1, 5, 6), said)
    calls.compare((0, 1), [calls.announcement("a real number", "number"), calls.announcement("a whole one", "number")])


def test_a_rank_that_waits_is_told_which_rank_is_gone() -> None:
    nothing: Any = None
    with pytest.raises(ConnectionError, match="rank 1 is gone, or its host is cut off"):
        Queue((0, 1), nothing, lambda: 1).check()
    Queue((0, 1), nothing).check()
