"""The executor on a device that works while its host goes on, by a test double of the device layer (no GPU needed)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from minipar import Plan, simulate
from minipar.costs.unit import UnitCosts
from minipar.errors import NotFinite, RankError
from minipar.execution.executor import Executor
from minipar.execution.lines import assemble
from minipar.execution.mean_loss import Finite
from minipar.execution.streams import HostStreams, Later, PinnedPool
from minipar.models.parameter_groups import shape_of
from minipar.models.tensors import Unchanged
from minipar.program import COLLECTIVES, COMPUTE, Op
from minipar.training import reference
from tests.fake_streams import FakeComm, FakeStreams, HostBlocked, resolve, run_ranks, timed
from tests.toys import rows, toy

pytestmark = pytest.mark.many(2)

CPU, META = torch.device("cpu"), torch.device("meta")
MODEL = partial(toy, ("linear", "tuples", "unused"), tied=True, frozen=(1,))
STRAIGHT = partial(toy, ("linear",) * 6)
mse, SGD = nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.5)
PASSES = 2


def built(model):
    torch.manual_seed(0)
    return model().double()


def walk(text, model, device, strict=True, after=lambda streams: None, batch=16, on_nan="ignore", **options):
    """Run a plan on all ranks; their records, streams, executors, and the program."""
    plan = Plan.parse(text)
    whole = built(model)
    program = plan.compile(shape_of(list(whole)))
    costs = UnitCosts(
        program, 1.0, 2.0, stage_factors=[1 + k / 8 for k in range(plan.ranks)]
    )  # no rank is like another

    def rank(world, k):
        streams = FakeStreams(device, strict)
        comm = FakeComm(world, k, streams)
        executor = Executor(program, comm, copy.deepcopy(whole), mse, SGD, streams=streams)
        if on_nan != "ignore":
            executor.compute.finite = Finite(k, on_nan, lambda text: None)
        timed(executor, streams, partial(costs.compute, k), after)
        keep = device.type != "meta"
        x, y = rows(batch)
        records = []
        for p in range(PASSES):
            streams.meet(p)
            records.append(executor.run(lambda step: (x.double(), y.double()), p, keep_gradients=keep))
        executor.close()
        return records, streams, executor

    # In the first pass it compares numbers that layers were given with what is there after them, and waits for that.
    checked = mock.patch.object(Unchanged, "equals", lambda *_: True) if device is META else nullcontext()
    with checked:
        return program, costs, run_ranks(plan.ranks, rank)


ALL = "offload=activations,optimizer,parameters"
PLANS = [
    "pp=4 microbatches=8",
    "pp=2 schedule=chimera microbatches=4",
    "dp=2 zero=2 microbatches=2 reduce=step clip=0.1 offload=optimizer",
    "dp=2 zero=3 microbatches=2 offload=parameters prefetch=2",
    f"pp=2 dp=2 microbatches=3 checkpoint=2 {ALL}",
]


@pytest.mark.parametrize("text", PLANS)
def test_the_gradients_are_those_of_plain_torch_and_the_host_never_waits_for_a_posted_receive(text):
    program, _, found = walk(text, MODEL, CPU)
    job = reference.Job(built(MODEL), lambda step: tuple(t.double() for t in rows(16)), mse, SGD, clip=program.clip)
    plain = reference.train_plainly(job, PASSES)
    for k in range(PASSES):
        mine = assemble(
            part for records, _, _ in found for own, cut in records[k].gradients[0] for part in own.of_whole(cut)
        )
        assert sum(records[k].losses[0] for records, _, _ in found) == pytest.approx(plain.losses[k], abs=1e-12)
        assert mine.keys() == plain.gradients[k].keys()
        assert all(torch.allclose(mine[name], plain.gradients[k][name], rtol=0, atol=1e-12) for name in mine)
    assert resolve([streams.tape for _, streams, _ in found]) == []


TIMED = [
    "pp=4 microbatches=8",
    "pp=2 schedule=zb-v microbatches=4",
    "dp=2 pp=2 microbatches=4 bucket=none",
    "dp=2 zero=3 microbatches=2",
]


@pytest.mark.parametrize("text", TIMED)
def test_the_events_give_the_times_of_the_simulator(text):
    """On `meta`: nobody can read a number on the host. The second pass, in which no form is announced any more."""
    program, costs, found = walk(text, STRAIGHT, META)
    assert resolve([streams.tape for _, streams, _ in found]) == []
    wanted = simulate(program, costs)
    zero = min(event.at for records, _, _ in found for event in records[1].starts)
    for rank, (records, _, _) in enumerate(found):
        for k, ins in enumerate(program.ranks[rank]):
            if ins.op in COMPUTE:
                mine = records[1].starts[k].at - zero, records[1].ends[k].at - zero
                assert mine == pytest.approx((wanted.starts[rank][k], wanted.ends[rank][k])), f"rank {rank}: {ins}"
            elif ins.op is Op.RECV or ins.op in COLLECTIVES:
                assert records[1].ends[k].at - zero == pytest.approx(wanted.ends[rank][k]), f"rank {rank}: {ins}"


UNREAD = [
    "pp=2 clip=0.1 checkpoint=1 microbatches=4",
    "dp=2 zero=2 clip=0.1 precision=bf16",
    "pp=2 schedule=pipedream-2bw microbatches=4",
    "dp=2 local_steps=2",
    "dp=2 compress=topk:0.1",
]


@pytest.mark.parametrize("text", UNREAD)
def test_no_number_is_read_while_a_pass_runs(text):
    """A number on `meta` has no value: whoever wants it fails."""
    _, _, found = walk(text, STRAIGHT, META)
    assert resolve([streams.tape for _, streams, _ in found]) == []


def synchronize(streams):
    """What the executor did before: wait for the whole device after each instruction."""
    streams.synchronize()


def test_to_synchronize_after_each_instruction_is_caught():
    with pytest.raises(HostBlocked, match=r"for the whole device while the receive of message \d+ from rank \d[, ]"):
        walk("pp=2 schedule=zb-v microbatches=4", STRAIGHT, META, after=synchronize)


def test_and_it_would_have_waited_for_ever():
    """1F1B on two ranks: rank 0 posts the receive of a gradient, computes, and waits for both. The gradient comes after
    what it would send next."""
    _, _, found = walk("pp=2 microbatches=4", STRAIGHT, META, strict=False, after=synchronize)
    stuck = resolve([streams.tape for _, streams, _ in found])
    assert {"host of rank 0", "host of rank 1"} <= set(stuck)


def test_without_receives_in_flight_the_host_may_wait():
    _, _, found = walk("dp=2 microbatches=2", STRAIGHT, META, after=synchronize)
    assert resolve([streams.tape for _, streams, _ in found]) == []


class Broken(nn.Module):
    def forward(self, x):
        return x * float("nan")


def test_a_loss_that_is_not_finite_is_found_before_its_update():
    def model():
        return nn.Sequential(nn.Linear(6, 6), Broken(), nn.Linear(6, 6))

    with pytest.raises(NotFinite, match="the loss is nan in step 0, rank 1, micro-batch 0"):
        walk("pp=2 split=1,2 microbatches=4", model, CPU, on_nan="stop")


# the parts ------------------------------------------------------------------------------------------------------------


def test_numbers_are_checked_at_once_where_they_are_known():
    seen = []
    later = Later(HostStreams())
    later.check(torch.tensor(2.0), seen.append)
    assert seen == [2.0]


def test_numbers_are_checked_in_order_when_they_are_known():
    seen, streams = [], FakeStreams(CPU)
    later = Later(streams)
    for number in (torch.tensor(1.0), 2.0):
        later.check(number, seen.append)
    later.settle(False)
    assert seen == []
    later.settle(True)
    assert seen == [1.0, 2.0]


def test_a_pinned_buffer_is_used_again_when_its_last_copy_is_done():
    made = []

    def empty(size):
        made.append(torch.empty(size, dtype=torch.uint8))
        return made[-1]

    pool, streams = PinnedPool(empty), FakeStreams(CPU)
    first = pool.take(torch.Size((3, 2)), torch.float64)
    assert first.shape == (3, 2)
    copy_ = streams.copy(torch.ones(3, 2, dtype=torch.float64), first, "offload")
    pool.give(first, copy_)
    pool.take(torch.Size((12,)), torch.float32)
    assert len(made) == 2
    copy_.result()
    again = pool.take(torch.Size((12,)), torch.float32)
    assert len(made) == 2
    assert again.data_ptr() == first.data_ptr()
    assert pool.take(torch.Size(()), torch.bool).shape == ()


def test_copies_of_a_cpu_run_beside_it_in_order():
    streams = HostStreams()
    a, b, c = torch.ones(4), torch.zeros(4), torch.zeros(4)
    first = streams.copy(a, b, "offload")
    second = streams.copy(b, c, "fetch", after=first)
    streams.follow(second)
    assert c.tolist() == [1.0] * 4
    streams.close()


def test_a_count_that_is_not_that_of_the_targets_is_refused():
    def losing(output, y):
        return mse(output, y, reduction="sum"), torch.tensor(3.0)

    program = Plan.parse("microbatches=1").compile(shape_of(list(built(STRAIGHT))))
    streams = FakeStreams(CPU)
    comm = run_ranks(1, lambda world, k: FakeComm(world, k, streams))[0]
    executor = Executor(program, comm, built(STRAIGHT), losing, torch.optim.SGD, streams=streams)
    with pytest.raises(RankError, match="count 3, but its targets weigh 8"):
        executor.run(lambda step: tuple(part.double() for part in rows(8)))
