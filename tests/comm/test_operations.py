"""Every operation of a Communicator, on every kind of value and both transports, against plain computation."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from minipar.cluster import Cluster
from minipar.comm import communicator
from minipar.comm.communicator import Communicator
from minipar.errors import CollectiveMismatch, RankError
from minipar.program import collectives

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "list": lambda x: x.long().tolist(),
    "float64 array": lambda x: x.double().numpy(),
    "int32 array": lambda x: x.int().numpy(),
    "float32 tensor": lambda x: x.float(),
    "bfloat16 tensor": lambda x: x.bfloat16(),
    "int64 tensor": lambda x: x.long(),
}
# Rows of each rank's values: none, less than one for each rank, uneven, more than fits the board.
SHAPES = [(0, 3), (1, 2), (7,), (5, 3), (700, 3)]
LARGE = (300_001,)


def create() -> Communicator:
    return communicator.create()


def values(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers, so that no dtype rounds."""
    return (torch.arange(np.prod(shape, dtype=int)) * 7 % 11 + rank).reshape(shape)


def same(found: Any, expected: Any) -> bool:
    """Whether type, dtype, shape and values are the same."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, np.ndarray):
        return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())
    if isinstance(found, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(found, list) and found and not isinstance(found[0], (int, float)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def cut(x: Any, k: int, ranks: int) -> Any:
    """The rows of rank k."""
    counts = [len(x) // ranks + (j < len(x) % ranks) for j in range(ranks)]
    return x[sum(counts[:k]) : sum(counts[: k + 1])]


def check_all(algorithm: str | None, kinds: list[str], shapes: list[tuple[int, ...]]) -> list[str]:
    """In a rank: what went wrong. The algorithm is that of sums."""
    comm = create()
    n, me = comm.size, comm.rank
    wrong = []
    for kind in kinds:
        make = KINDS[kind]
        for shape in shapes:
            mine = make(values(me, shape))
            everyone = [values(k, shape) for k in range(n)]
            total, last = make(sum(everyone[1:], everyone[0])), n - 1
            uneven = values(me, (shape[0] + 2 * me, *shape[1:]))
            rows = [values(k, (shape[0] + 2 * k, *shape[1:])) for k in range(n)]
            found = {
                "allreduce": (comm.allreduce(mine, algorithm=algorithm), total),
                "allreduce max": (comm.allreduce(mine, max, algorithm=algorithm), make(everyone[-1])),
                "reduce": (comm.reduce(mine, last), total if me == last else None),
                "reduce_scatter": (comm.reduce_scatter(mine), cut(total, me, n)),
                "reduce_scatter min": (
                    comm.reduce_scatter(mine, min),
                    cut(make(everyone[0]), me, n),
                ),
                "all_gather": (comm.all_gather(make(uneven)), make(torch.cat(rows))),
                "broadcast": (
                    comm.broadcast(mine if me != 0 or n == 1 else None, last),
                    make(everyone[-1]),
                ),
                "all_to_all": (
                    comm.all_to_all([make(values(me + k, (shape[0] + me, *shape[1:]))) for k in range(n)]),
                    [make(values(k + me, (shape[0] + k, *shape[1:]))) for k in range(n)],
                ),
            }
            if not isinstance(mine, list):
                joined = torch.cat([cut(values(k, shape), me, n) for k in range(n)])
                found["all_to_all of rows"] = (comm.all_to_all(mine), make(joined))
            wrong += [f"{name} of {kind} {shape}" for name, pair in found.items() if not same(*pair)]
            if not same(mine, make(values(me, shape))):
                wrong.append(f"the argument of {kind} {shape} was changed")
    return wrong


@pytest.mark.many(2)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_operation_on_every_kind(clusters, ranks):
    """(That the backend's own give the same, gloo says below.)"""
    assert clusters(ranks).run(check_all, None, list(KINDS), SHAPES) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensors_of_several_pieces(clusters, ranks):
    assert clusters(ranks).run(check_all, "shared", ["float32 tensor", "int32 array"], [LARGE]) == [[]] * ranks


@pytest.mark.many(2)
@pytest.mark.parametrize("algorithm", ["backend", *collectives.names("allreduce")])
def test_every_algorithm(clusters, algorithm):
    assert clusters(4).run(check_all, algorithm, ["list", "float32 tensor"], SHAPES) == [[]] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, torch.uint8])
def test_other_dtypes_in_shared_memory(clusters, dtype):
    def f() -> bool:
        comm = create()
        x = (torch.arange(50_000) % 13 + comm.rank).to(dtype)
        everyone = [(torch.arange(50_000) % 13 + k).to(dtype) for k in range(4)]
        gathered = comm.all_gather(x)
        return same(comm.allreduce(x), sum(everyone[1:], everyone[0])) and same(gathered, torch.cat(everyone))

    assert clusters(4).run(f) == [True] * 4


def test_what_no_sum_is_made_of_can_be_moved(clusters):
    def f() -> bool:
        comm = create()
        flags, waves = torch.tensor([True, False]), torch.tensor([1 + 2j * comm.rank])
        return (
            same(comm.broadcast(flags, 1), flags)
            and same(comm.all_gather(waves), torch.tensor([1 + 0j, 1 + 2j]))
            and same(
                comm.all_to_all([flags, waves])[0],
                [flags, waves][comm.rank] if comm.rank == 0 else torch.tensor([1 + 0j]),
            )
        )

    assert clusters(2).run(f) == [True] * 2


def test_bits_are_the_same_on_all_ranks_and_both_ways_to_sum(clusters):
    """Every element is summed in the order of ranks, be it on one rank or on all."""

    def f() -> list[bytes]:
        comm = create()
        x = torch.randn(100_003, generator=torch.Generator().manual_seed(comm.rank))
        small = torch.cat([comm.allreduce(part) for part in x.split(1000)])  # on the board
        scattered = comm.all_gather(comm.reduce_scatter(x))
        return [one.numpy().tobytes() for one in (comm.allreduce(x), small, scattered)]

    for ranks in (2, 4):
        found = clusters(ranks).run(f)
        assert len({one for row in found for one in row}) == 1


# Messages


def test_objects_arrive_as_they_were(clusters):
    objects = [1, 2.5, [[1, 2], [3, 4]], np.arange(6).reshape(2, 3), torch.ones(3, 0), torch.randn(200, 300).bfloat16(),
               torch.tensor(True), []]  # fmt: skip

    def f() -> list[Any]:
        comm = create()
        if comm.rank == 0:
            for x in objects:
                comm.send(x, 1)
            return [comm.recv(1)]
        found = [comm.recv(0) for _ in objects]
        comm.send(torch.zeros(3_000_000), 0)
        return found

    back, found = clusters(2).run(f)
    assert all(same(one, other) for one, other in zip(found, objects, strict=True))
    assert back[0].shape == (3_000_000,)


# Mistakes


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.broadcast([1], 2), "broadcast: root=2 is none of the 2 ranks here (0 to 1)"),
        (lambda c: c.broadcast(None, c.rank), "is the root, and has None"),
        (lambda c: c.reduce_scatter(3), "reduce_scatter: a number has no rows to divide among 2 ranks"),
        (lambda c: c.all_gather("text"), "all_gather: a str is not possible"),
        (lambda c: c.all_to_all([1, 2, 3]), "all_to_all: 3 pieces for 2 ranks"),
        (lambda c: c.allreduce([1], algorithm="magic"), "algorithm='magic' is not known on this rank; possible are"),
        (lambda c: c.allreduce(torch.ones(2).to_sparse()), "use .to_dense()"),
        (lambda c: c.recv(7), "cannot send to or receive from rank 7: 2 ranks are here"),
        (lambda c: c.send({}, 1 - c.rank), "send: a dict is not possible"),
    ],
)
def test_what_cannot_be_is_told_to_the_caller(clusters, call, text):
    """Only rank 0 makes the mistake; the other ranks are not kept waiting."""

    def f() -> Any:
        comm = create()
        return call(comm) if comm.rank == 0 else comm.barrier()

    began = time.monotonic()
    with pytest.raises(RankError) as raised:
        clusters(2).run(f)
    assert text in str(raised.value)
    assert time.monotonic() - began < 5
    assert clusters(2).run(lambda: create().allreduce([1])) == [[2], [2]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda c: c.allreduce(torch.ones(5000 + c.rank)),
            "allreduce: ranks differ: rank 0 has a tensor of 5000 float32 for sum, rank 1 has a tensor of 5001",
        ),
        (
            lambda c: c.all_gather(torch.ones(4, 2 + c.rank)),
            "all_gather: ranks differ: rank 0 has a tensor of 4x2 float32, rank 1 has a tensor of 4x3 float32",
        ),
        (lambda c: c.broadcast([1], c.rank), "rank 0 calls broadcast from rank 0, rank 1 calls broadcast from rank 1"),
        (
            lambda c: c.all_to_all(torch.ones(4) if c.rank else [1, 2]),
            "rank 0 has a list of pieces, rank 1 has a tensor of 4 float32",
        ),
        (
            lambda c: c.allreduce(torch.ones(5000), algorithm=["shared", None][c.rank]),
            "for sum by shared, rank 1 has a tensor of 5000 float32 for sum",
        ),
        (
            lambda c: c.all_gather(torch.ones(5000)) if c.rank else c.allreduce(torch.ones(5000)),
            "rank 0 calls allreduce of a tensor of 5000 float32 for sum, rank 1 calls all_gather of a tensor of 5000",
        ),
    ],
)
def test_ranks_that_differ_are_all_told_and_go_on(clusters, call, text):
    pids = clusters(2).run(os.getpid)

    def mismatch(comm: Communicator) -> str:
        try:
            call(comm)
        except CollectiveMismatch as error:
            return str(error)
        return "nothing"

    def f() -> tuple[str, bool]:
        comm = create()
        big = torch.arange(1_000_000.0)
        first = big.clone()
        under_way = comm.iallreduce(first, (0, 1))  # when the mismatch comes
        said = mismatch(comm)
        under_way.wait()
        right = torch.equal(first, 2 * big)
        again = mismatch(comm)  # while nothing is, so that one may have begun
        right = right and torch.equal(comm.allreduce(big), 2 * big) and text in again
        return said, right

    for said, right in clusters(2).run(f):
        assert text in said
        assert right
    assert clusters(2).run(os.getpid) == pids


@pytest.mark.many(6)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_across_machines_there_is_no_board_but_the_same_results(ranks):
    """As under torchrun on several hosts: forms go through gloo first."""

    def f() -> tuple[list[str], str, Any, str]:
        comm = create()
        wrong = check_all(None, list(KINDS), [*SHAPES, LARGE])
        try:
            comm.allreduce([1] * (comm.rank + 1))
            said = "nothing"
        except CollectiveMismatch as error:
            said = str(error)
        mixed = comm.allreduce([1, 2.5][comm.rank % 2])
        try:
            comm.allreduce(1, algorithm="shared")
        except RankError as error:
            return wrong, said, mixed, str(error)
        return wrong, said, mixed, ""

    with Cluster(ranks, device="cpu", transport="gloo") as cluster:
        how = "shared memory" if ranks == 1 else "gloo (transport='gloo')"
        assert cluster.run(lambda: (create().transport, create().posts)) == [(how, True)] * ranks
        for wrong, said, mixed, refused in cluster.run(f):
            assert wrong == []
            assert mixed == sum([1, 2.5][k % 2] for k in range(ranks))
            if ranks > 1:
                assert "rank 0 has a list of 1 int64 for sum, rank 1 has a list of 2 int64 for sum" in said
                assert refused == "algorithm='shared' is not possible: gloo (transport='gloo')"
