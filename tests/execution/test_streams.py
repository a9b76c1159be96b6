"""The executor on a device that works while its host goes on, by a test double of the device layer (no GPU needed)."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from minipar import Plan
from minipar.costs.unit import UnitCosts
from minipar.execution.execution import _whole
from minipar.execution.executor import Executor
from minipar.execution.finite import Finite
from minipar.models.parameter_groups import shape_of
from tests.fake_streams import FakeComm, FakeStreams, resolve, run_ranks, timed
from tests.toys import rows, toy

CPU, META = torch.device("cpu"), torch.device("meta")
MODEL = partial(toy, ("linear", "tuples", "unused"), tied=True, frozen=(1,))
STRAIGHT = partial(toy, ("linear",) * 6)
mse = nn.functional.mse_loss
PASSES = 2


def built(model):
    torch.manual_seed(0)
    return model().double()


def walk(text, model, device, strict=True, after=lambda streams: None, batch=16, on_nan="ignore", **options):
    """Run a plan on all ranks; their records, streams, executors, and the program."""
    plan = Plan.parse(text)
    whole = built(model)
    program = plan.compile(shape_of(list(whole)))
    costs = UnitCosts(program, 1.0, 2.0)

    def rank(world, k):
        streams = FakeStreams(device, strict)
        comm = FakeComm(world, k, streams)
        executor = Executor(program, comm, copy.deepcopy(whole), mse, partial(torch.optim.SGD, lr=0.5), streams=streams)
        if on_nan != "ignore":
            executor.compute.finite = Finite(k, on_nan, lambda text: None)
        timed(executor, streams, partial(costs.compute, k), after)
        keep = device.type != "meta"
        x, y = rows(batch)
        records = [executor.run(lambda step: (x.double(), y.double()), p, keep_gradients=keep) for p in range(PASSES)]
        executor.offloading.close()
        return records, streams, executor

    return program, costs, run_ranks(plan.ranks, rank)


def plain(model, clip=None, batch=16):
    """The losses and gradients of plain torch."""
    whole, (x, y) = built(model), rows(batch)
    losses, gradients = [], []
    for _ in range(PASSES):
        whole.zero_grad()
        loss = mse(whole(x.double()), y.double())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(whole.parameters(), clip)
        losses.append(loss.item())
        named = [(name, p) for name, p in whole.named_parameters() if p.requires_grad]
        gradients.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named})
        with torch.no_grad():
            for name, p in named:
                p -= 0.5 * gradients[-1][name]
    return losses, gradients


ALL = "offload=activations,optimizer,parameters"
PLANS = [
    "microbatches=2",
    "pp=2 microbatches=4",
    "pp=4 microbatches=8",
    "pp=2 schedule=gpipe microbatches=4 checkpoint=2",
    "pp=2 schedule=zb-v microbatches=4",
    "pp=2 schedule=chimera microbatches=4",
    "pp=2 schedule=interleaved chunks=2 microbatches=4",
    "dp=2 bucket=0.0001 microbatches=2",
    "dp=2 bucket=none clip=0.1",
    "dp=2 pp=2 microbatches=4 bucket=0.0001",
    "dp=2 zero=2 microbatches=2 clip=0.1",
    "dp=2 zero=3 microbatches=2",
    "dp=2 pp=2 zero=3 microbatches=2 bucket=none",
    "offload=activations microbatches=3 schedule=gpipe",
    "pp=2 offload=activations microbatches=4",
    "offload=optimizer microbatches=2",
    "dp=2 zero=2 microbatches=2 reduce=step clip=0.1 offload=optimizer",
    "offload=parameters microbatches=3",
    "dp=2 zero=3 microbatches=2 offload=parameters prefetch=2",
    "host_layers=2 dp=2 microbatches=2",
    f"pp=2 dp=2 microbatches=3 checkpoint=2 {ALL}",
    f"dp=2 zero=3 microbatches=2 {ALL}",
]


@pytest.mark.parametrize("text", PLANS)
def test_the_gradients_are_those_of_plain_torch_and_the_host_never_waits_for_a_posted_receive(text):
    program, _, found = walk(text, MODEL, CPU)
    losses, gradients = plain(MODEL, program.clip)
    for k in range(PASSES):
        mine = _whole([records[k].gradients[0] for records, _, _ in found])
        assert sum(records[k].losses[0] for records, _, _ in found) == pytest.approx(losses[k], abs=1e-12)
        assert mine.keys() == gradients[k].keys()
        assert all(torch.allclose(mine[name], gradients[k][name], rtol=0, atol=1e-12) for name in mine)
    assert resolve([streams.tape for _, streams, _ in found], lambda group, k: 0.5) == []
