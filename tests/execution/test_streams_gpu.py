"""The device layer on a real GPU: events, copies beside the computation, NCCL's ends; and pipelines on two GPUs.

`torch.cuda._sleep` is a kernel that only waits: while it runs, the GPU is busy and the host is not.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from itertools import pairwise
from statistics import median

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn

from minipar import Cluster, Plan, train
from minipar.comm.handles import Handle
from minipar.comm.transport.interface import StreamWork
from minipar.comm.transport.nccl import Nccl
from minipar.errors import Deadlock
from minipar.execution.streams import CudaStreams, Later
from minipar.program import COMPUTE, Op
from tests.comparing import check
from tests.toys import rows, toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

mse = nn.functional.mse_loss
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LONG = 400_000_000  # cycles: 0.2 s or more on every GPU of today


@pytest.fixture
def streams() -> CudaStreams:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    made = CudaStreams(device)
    made.begin()
    return made


# events ---------------------------------------------------------------------------------------------------------------


def test_the_host_runs_ahead_of_the_device(streams):
    start = time.perf_counter()
    torch.cuda._sleep(LONG)
    mark = streams.mark()
    assert not mark.query()
    assert time.perf_counter() - start < 0.1
    streams.wait(mark)
    assert mark.query()
    assert time.perf_counter() - start > 0.1


def test_events_are_on_the_hosts_clock(streams):
    marks, seen = [], []
    for _ in range(5):
        torch.cuda._sleep(LONG // 20)
        marks.append(streams.mark())
        torch.cuda.synchronize()
        seen.append(time.perf_counter())
    found = streams.times(marks)
    assert all(a < b for a, b in pairwise(found))
    for event, host in zip(found, seen, strict=True):
        assert -1e-4 < host - event < 5e-3
    assert streams.times([1.5]) == [1.5]


def test_a_number_arrives_without_a_wait(streams):
    later, seen = Later(streams), []
    number = torch.full((), 3.0, device="cuda")
    torch.cuda._sleep(LONG)
    later.check(number, seen.append)
    later.settle(False)
    assert seen == []
    later.settle(True)
    assert seen == [3.0]


# copies ---------------------------------------------------------------------------------------------------------------


def test_a_copy_is_done_while_the_device_computes(streams):
    tensor = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    room = streams.room(tensor)
    copy = streams.copy(tensor, room, "away")
    torch.cuda._sleep(LONG)
    busy = streams.mark()
    copy.result()
    assert not busy.query()
    assert room.is_pinned()
    assert torch.equal(room, torch.arange(1 << 20, dtype=torch.float32))
    streams.wait(busy)


def test_the_reader_waits_for_the_copy_and_the_copy_for_the_writer(streams):
    tensor = torch.zeros(1 << 20, device="cuda")
    back = torch.zeros_like(tensor)
    torch.cuda._sleep(LONG)
    tensor.fill_(2.0)
    room = streams.room(tensor)
    away = streams.copy(tensor, room, "away")
    streams.follow(streams.copy(room, back, "back", away))
    assert float(back.sum()) == 2.0 * (1 << 20)


def test_offload_is_as_fast_as_the_link(streams):
    """Beside plain copies between the same GPU and pinned memory."""
    tensor = torch.randn(64 << 20, device="cuda")
    host, room = torch.empty(tensor.shape, pin_memory=True), streams.room(tensor)
    back = torch.empty_like(tensor)

    def seconds(act) -> float:
        act()
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            act()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return median(found)

    away = seconds(lambda: host.copy_(tensor, non_blocking=True))
    here = seconds(lambda: back.copy_(host, non_blocking=True))
    assert seconds(lambda: streams.copy(tensor, room, "away")) < away / 0.9
    assert seconds(lambda: streams.copy(room, back, "back")) < here / 0.9
    assert torch.equal(back, tensor)


# ranks ----------------------------------------------------------------------------------------------------------------


def test_a_measured_trace_is_the_devices():
    """The time of the step is the device's: it is not less than what its instructions took one after the other."""
    model = partial(toy, ("linear",) * 4)
    with Cluster(1, device="cuda") as cluster:
        run = train(model, rows(64), "microbatches=4", cluster=cluster, steps=4, loss=mse, progress=False)
    trace = run.trace
    spans = sorted((trace.starts[0][k], trace.ends[0][k]) for k, ins in enumerate(trace.program.ranks[0])
                   if ins.op in COMPUTE)  # fmt: skip
    assert all(end > start for start, end in spans)
    assert all(before <= start + 1e-6 for (_, before), (start, _) in pairwise(spans))


def test_the_end_of_a_collective_of_nccl_is_an_event(streams):
    """One rank suffices: its all-reduce waits for the kernel before it, and is not over when it is in the stream."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    nccl = Nccl(dist.HashStore(), 0, 1, streams.device, None)
    tensor = torch.ones(1024, device="cuda")
    group = nccl.process_group((0,))
    torch.cuda._sleep(LONG)
    handle = Handle(StreamWork(group.allreduce([tensor])), tensor, set())
    end = streams.ended([handle], "group")
    assert not end.query()
    assert not handle.done()
    handle.wait()
    assert not end.query(), "wait lets the stream wait, and not the host"
    streams.wait(end)
    nccl.close(False)


def test_a_rank_that_spins_is_part_of_a_deadlock():
    def f() -> None:
        torch.cuda._sleep(100 * LONG)
        torch.cuda.synchronize()

    with Cluster(1, device="cuda", patience=0.5) as cluster:
        cluster.run(lambda: torch.zeros(1, device="cuda").item())
        with pytest.raises(Deadlock, match=r"rank 0: its GPU, in torch\.cuda\.synchronize, since "):
            cluster.run(f)


PIPELINES = [
    "pp=2 microbatches=4",
    "pp=2 schedule=chimera microbatches=4",
    "dp=2 microbatches=2 bucket=0.0001 clip=0.1",
    "dp=2 zero=3 microbatches=2",
    "pp=2 offload=activations,optimizer,parameters microbatches=4",
]


@pytest.mark.parametrize("text", PIPELINES)
def test_gradients_of_two_ranks(text):
    """On two GPUs over NCCL; where there is one, both ranks share it, and gloo carries what they send."""
    with Cluster(2, device="cuda") as cluster:
        check(
            lambda ranks: cluster, Plan.parse(text), partial(toy, ("linear", "tuples", "dropout"), tied=True), rows(12)
        )


@two_gpus
def test_a_receive_that_was_posted_ahead_does_not_hold_the_walk_up():
    """1F1B over NCCL: a message ends after it was sent, and the stages overlap."""
    model = partial(toy, ("linear",) * 6)
    with Cluster(2, device="cuda") as cluster:
        assert cluster.carrier == "nccl"
        run = train(model, rows(64), "pp=2 microbatches=8", cluster=cluster, steps=3, loss=mse, progress=False)
    trace = run.trace
    for rank, row in enumerate(trace.program.ranks):
        sent = {ins.reads: trace.starts[1 - rank][k] for k, ins in enumerate(trace.program.ranks[1 - rank])
                if ins.op is Op.SEND}  # fmt: skip
        for k, ins in enumerate(row):
            if ins.op is Op.RECV:
                assert trace.ends[rank][k] > sent[ins.writes] - 5e-5
