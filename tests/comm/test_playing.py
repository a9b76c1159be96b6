"""Collectives by algorithm on real ranks: results equal the backend's, for every algorithm, dtype and operation."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from minipar import Cluster, RankError, simulate
from minipar.comm import communicator
from minipar.comm.playing import measured, play, record
from minipar.costs.alpha_beta import AlphaBeta
from minipar.program import Op
from minipar.program.collectives import COLLECTIVES, names, program
from minipar.program.collectives.moves import bounds

pytestmark = pytest.mark.many(6)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ADDING = ("allreduce", "reduce_scatter", "reduce")


@pytest.fixture(scope="module", params=[2, 3, 4])
def cluster(request: Any) -> Iterator[Cluster]:
    with Cluster(request.param, device="cpu") as made:
        yield made


def content(size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Other values on every rank and at every place."""
    numbers = (torch.arange(size) * 37 + 101 * rank) % 251 - 125
    return numbers.to(dtype) if dtype == torch.int64 else (numbers / 8 + 0.1 * rank).to(dtype)


def variants(collective: str, ranks: int) -> Iterator[tuple[str, int, int]]:
    for algorithm in names(collective):
        for root in sorted({0, ranks - 1}) if collective in ("broadcast", "reduce") else [0]:
            nodes = [1, 2] if algorithm == "hierarchical" and ranks == 4 else [1]
            yield from ((algorithm, root, n) for n in nodes)


def torchs_own(collective: str, x: torch.Tensor, root: int, op: str) -> torch.Tensor | None:
    """What torch's own gives on this rank; None where a rank gets nothing."""
    rank, ranks, x = dist.get_rank(), dist.get_world_size(), x.clone()
    first, last = bounds(x.numel(), ranks, rank)
    if collective in ADDING and x.numel():
        dist.all_reduce(x, {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM))
        x = x / ranks if op == "avg" else x
    if collective == "reduce_scatter":
        return x[first:last]
    if collective == "reduce":
        return x if rank == root else None
    if collective == "all_gather":  # of parts that differ in size: each rank's, broadcast
        for owner in range(ranks):
            part = x[slice(*bounds(x.numel(), ranks, owner))].contiguous()
            dist.broadcast(part, owner)
            x[slice(*bounds(x.numel(), ranks, owner))] = part
    elif collective == "broadcast" and x.numel():
        dist.broadcast(x, root)
    elif collective == "all_to_all":
        sizes = [b - a for a, b in (bounds(x.numel(), ranks, r) for r in range(ranks))]
        out = x.new_empty(sizes[rank] * ranks)
        dist.all_to_all_single(out, x, [sizes[rank]] * ranks, sizes)
        return out
    return x


def compare(store: str, collective: str, dtype: torch.dtype) -> list[str]:
    """What differs from the backend's, of all algorithms, sizes and operations."""
    comm = communicator.create()
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size)
    ranks, everyone, wrong = comm.size, tuple(range(comm.size)), []
    ops = ["sum", "max", "min"] + ["avg"] * dtype.is_floating_point if collective in ADDING else ["sum"]
    close = {torch.bfloat16: 3e-2, torch.float32: 1e-6, torch.float64: 1e-14}.get(dtype, 0.0)
    for op in ops:
        for size in (0, 1, ranks - 1, ranks + 1, 61, 300_001) if op == "sum" else (61,):
            x = content(size, dtype, comm.rank)
            wanted: dict[int, torch.Tensor | None] = {}
            for algorithm, root, nodes in variants(collective, ranks):
                if root not in wanted:
                    wanted[root] = torchs_own(collective, x, root, op)
                one = program(collective, algorithm, ranks, size * x.element_size(), root=root, nodes=nodes, op=op)
                given = x.clone()
                if collective == "all_gather":
                    first, last = bounds(size, ranks, comm.rank)
                    given[:first], given[last:] = 77, 77
                found, right = play(one, comm, given, everyone, op), wanted[root]
                if right is None:
                    continue
                off = (found.double() - right.double()).abs() > close * (1 + 40 * ranks)
                if found.shape != right.shape or found.dtype != dtype or bool(off.any()):
                    wrong.append(f"{collective} {algorithm} of {size} for {op}, root {root}, {nodes} nodes")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_results_equal_the_backends(cluster: Cluster, dtype: torch.dtype) -> None:
    def f(store: str) -> list[str]:
        return [line for collective in COLLECTIVES for line in compare(store, collective, dtype)]

    with tempfile.TemporaryDirectory() as folder:
        assert cluster.run(f, os.path.join(folder, "store")) == [[]] * cluster.size


def test_what_was_measured_is_a_trace_of_the_program(cluster: Cluster) -> None:
    one = program("allreduce", "ring", cluster.size, 12 << 18, item=4)

    def f() -> Any:
        comm = communicator.create()
        x = torch.ones(3 << 18)
        comm.barrier()
        return record(one, comm, x, tuple(range(comm.size)))[1]

    trace = measured(one, cluster.run(f))
    assert trace.kind == "measured"
    assert trace.program is one
    predicted = simulate(one, AlphaBeta(one, 1e-4, 1e-9, 1e-10))
    assert trace.bytes_by_link() == predicted.bytes_by_link()
    sends = {}
    for rank, row in enumerate(one.ranks):
        before = 0.0
        for k, ins in enumerate(row):
            assert 0 <= trace.starts[rank][k] <= trace.ends[rank][k] < 60
            if ins.op is Op.SEND:
                sends.setdefault((rank, ins.peer), []).append(trace.starts[rank][k])
            if ins.stream == "compute":
                assert trace.starts[rank][k] >= before
                before = trace.ends[rank][k]
    for rank, row in enumerate(one.ranks):
        arrivals = [trace.ends[rank][k] for k, ins in enumerate(row) if ins.op is Op.RECV]
        assert all(there > sent for sent, there in zip(sends[(rank - 1) % cluster.size, rank], arrivals, strict=True))
    assert trace.compare(predicted).plot().axes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "mean"}, "op='mean' is not known; possible are sum, max, min, avg"),
        ({"tensor": torch.ones(4, dtype=torch.bool)}, "dtype bool cannot be reduced; possible are float32"),
        ({"tensor": torch.ones(4, dtype=torch.complex64)}, "dtype complex64 cannot be reduced"),
        ({"tensor": torch.ones(4, dtype=torch.int32), "op": "avg"}, "an average is no int32"),
        ({"tensor": torch.ones(4, 4).T}, r"a tensor of strides \(1, 4\)"),
        ({"ranks": (0,)}, r"ranks \(0,\): allreduce by ring, \d ranks needs \d different ranks"),
        ({"ranks": (0, 0, 0, 0)}, "different ranks"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(cluster: Cluster, change: Any, message: str) -> None:
    def f() -> str:
        comm = communicator.create()
        everyone = tuple(range(comm.size))
        given = {"tensor": torch.ones(4), "ranks": everyone} | change
        try:
            play(program("allreduce", "ring", comm.size, 16), comm, **given)
        except RankError as error:
            return str(error)
        return "nothing"

    for text in cluster.run(f):
        with pytest.raises(RankError, match=message):
            raise RankError(text)
