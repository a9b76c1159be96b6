"""Offload on real ranks: plain torch's gradients, memory that is really free, a link's speed, and what goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from minipar import Cluster, DeviceSpec, Plan, PlanError, train
from minipar.comm import communicator
from minipar.costs.profiler import shape_of
from minipar.errors import DeviceOutOfMemory, StoreError
from minipar.executor import Executor
from minipar.program import Op
from tests.test_gradients import check
from tests.toys import rows, toy

mse = nn.functional.mse_loss
MODEL = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), tied=True, frozen=(1,))
ALL = "offload=activations,optimizer,parameters"

PLANS = [
    "offload=activations microbatches=3 schedule=gpipe",
    "pp=2 offload=activations microbatches=4",
    "pp=4 schedule=gpipe offload=activations microbatches=4",
    "dp=2 pp=2 offload=activations microbatches=3 checkpoint=2",
    "offload=activations checkpoint=1 microbatches=2",
    "offload=optimizer microbatches=2 accumulate=2",
    "dp=2 offload=optimizer bucket=0.0001 microbatches=2",
    "dp=2 offload=optimizer bucket=none overlap=none clip=0.1",
    "dp=2 zero=1 offload=optimizer",
    "dp=2 zero=2 microbatches=2 reduce=step clip=0.1 offload=optimizer",
    "dp=4 zero=3 microbatches=2 offload=optimizer",
    "offload=parameters microbatches=3",
    "dp=2 offload=parameters clip=0.1",
    "dp=2 zero=3 microbatches=2 offload=parameters prefetch=2",
    f"pp=2 dp=2 microbatches=3 checkpoint=2 {ALL}",
    f"pp=2 dp=2 zero=3 microbatches=4 schedule=gpipe {ALL}",
]


@pytest.mark.parametrize("to", ["host", "disk"])
@pytest.mark.parametrize("text", PLANS)
def test_gradients_and_losses_are_those_of_plain_torch(clusters, text, to, tmp_path):
    check(clusters, Plan.parse(f"{text} offload_to={to} offload_folder={tmp_path}"), MODEL, rows(17), steps=3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [7, 1])
def test_micro_batches_without_rows(clusters, count):
    check(clusters, Plan.parse(f"pp=2 dp=2 microbatches=4 {ALL}"), MODEL, rows(count))


@pytest.mark.parametrize("frozen", [(0,), (0, 1, 2), (-1,), (0, 1, 2, 3, 4)])
def test_frozen_layers(clusters, frozen):
    for text in (f"microbatches=3 {ALL}", f"dp=2 zero=3 {ALL} offload_to=disk"):
        check(clusters, Plan.parse(text), partial(toy, ("tuples", "linear"), frozen=frozen), rows(9))


@pytest.mark.parametrize(
    "text",
    [
        "host_layers=0",
        "host_layers=2,3 pp=2 microbatches=3",
        "host_layers=1,8 dp=2 microbatches=2",
        f"host_layers=2 dp=2 microbatches=2 checkpoint=2 clip=0.1 {ALL}",
    ],
)
def test_layers_on_the_host(clusters, text):
    model = partial(toy, ("linear", "tuples", "dropout", "in-place", "unused"), frozen=(1,))
    check(clusters, Plan.parse(text), model, rows(17))


def test_tied_layers_on_the_host(clusters):
    """Across stages: their gradients are summed there."""
    check(clusters, Plan.parse("host_layers=0,8 pp=2 dp=2 microbatches=2"), MODEL, rows(17))


def named():
    from collections import OrderedDict

    layers = [("embed", nn.Linear(6, 6)), ("act", nn.Tanh()), ("head", nn.Linear(6, 6))]
    return nn.Sequential(OrderedDict(layers))


def test_layers_on_the_host_by_name(clusters):
    run = check(clusters, Plan(host_layers="embed"), named, rows(8))
    assert [ins.layers for ins in run.program.ranks[0] if ins.op is Op.FORWARD and ins.stream == "host"] == [(0,)]
    with pytest.raises(PlanError, match=r"host_layers=tail: the model has no such layer; possible are embed, act, head"):
        train(named, rows(8), "host_layers=tail", cluster=clusters(1), loss=mse, dtype=torch.float64, progress=False)


# Adam, and a device that is too small --------------------------------------------------------------------------------


def blocks(layers: int = 8, width: int = 128) -> nn.Sequential:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*[block() for _ in range(layers)])


def pairs(count: int = 32, width: int = 128):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator), torch.randn(count, width, generator=generator)


def adam(cluster, text, model=blocks, **options):
    return train(
        model, pairs(), text, cluster=cluster, steps=3, loss=mse, optimizer=partial(torch.optim.AdamW, lr=1e-3),
        progress=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("to", ["host", "disk"])
def test_a_model_of_four_times_the_device_trains_to_the_same_losses(clusters, to):
    """Parameters, gradients, two moments: 16 bytes each; and the largest weight makes temporaries, too."""
    states = 16 * sum(p.numel() for p in blocks().parameters())
    capacity = states // 4
    fits = adam(clusters(1), "microbatches=1")
    with Cluster(1, device=DeviceSpec(memory=capacity)) as small:
        with pytest.raises(DeviceOutOfMemory):
            adam(small, "microbatches=1")
        run = adam(small, f"{ALL} offload_to={to}", memory=True)
    assert run.losses == fits.losses
    assert run.peak_memory[0] <= capacity
    assert states >= 4 * run.peak_memory[0]


def test_the_device_holds_what_the_prediction_says(clusters):
    """Copies to the host take no time here, in the prediction; in the run, up to two may still be on their way."""
    for text in ("offload=optimizer", "offload=parameters", "offload=optimizer,parameters", "offload=activations"):
        run = adam(clusters(1), f"{text} microbatches=2", memory=True)
        slot = max(run.trace.size(0, v) for ins in run.program.ranks[0] for v in ins.writes if v.kind == "saved")
        gradient = max(run.trace.size(0, v) for ins in run.program.ranks[0] for v in ins.writes if v.kind == "grad")
        measured, predicted = run.peak_memory[0], run.predicted.peak_memory()[0]
        assert predicted * 0.95 <= measured <= predicted * 1.05 + 2 * (slot + gradient), text


def test_what_it_costs_on_the_device_by_kind(clusters):
    plain, away = (
        adam(clusters(1), text, memory=True).trace.peak_by_kind(0) for text in ("microbatches=1", f"{ALL} microbatches=1")
    )
    assert away["optimizer"] == 0 < plain["optimizer"]
    assert away["parameters"] <= plain["parameters"] / 8 * 2
    assert away["gradients"] < plain["gradients"]


def wide(vocab: int = 4096, width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8))


def test_a_wide_embedding_on_the_host_is_not_on_the_device(clusters):
    tokens = torch.arange(64).reshape(16, 4) * 61 % 4096
    target = torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(1))
    table = 4 * 4096 * 32
    runs = [
        train(wide, (tokens, target), text, cluster=clusters(1), steps=2, loss=mse, progress=False, memory=True)
        for text in ("microbatches=2", "microbatches=2 host_layers=0")
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].peak_memory[0] > 2 * table
    assert runs[1].peak_memory[0] < table / 10
    crossed = [ins for ins in runs[1].program.ranks[0] if ins.op in (Op.OFFLOAD, Op.FETCH)]
    assert {str(ins.writes[0]) for ins in crossed} == {
        "output(0) mb0", "output(0) mb1", "host grad_output(0) mb0", "host grad_output(0) mb1",
    }  # fmt: skip


# an emulated link ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["offload=activations", "offload=optimizer", "offload=parameters offload_to=disk"])
def test_a_copy_takes_the_time_of_the_emulated_link(text):
    rate = 50e6
    with Cluster(1, device=DeviceSpec(host_bandwidth=rate, disk_bandwidth=rate)) as cluster:
        run = adam(cluster, text)
    trace, seen = run.trace, 0
    free: dict[str, float] = {}
    for k, ins in enumerate(run.program.ranks[0]):
        if ins.op not in (Op.OFFLOAD, Op.FETCH):
            continue
        size = trace.size(0, ins.reads[0])
        assert size > 0
        begin = max(trace.starts[0][k], free.get(ins.stream, 0.0))
        assert trace.ends[0][k] >= begin + size / rate - 2e-3
        free[ins.stream] = begin + size / rate
        seen += 1
        predicted = run.predicted.ends[0][k] - run.predicted.starts[0][k]
        assert predicted == pytest.approx(size / rate, rel=0.05)
    assert seen > 8
    assert {e.stream for e in run.predicted.events if e.instruction.op in (Op.OFFLOAD, Op.FETCH)} == set(free)


# what goes wrong -----------------------------------------------------------------------------------------------------


def single(text: str, model=blocks) -> Executor:
    """One rank's executor, in this process."""
    torch.manual_seed(0)
    built = model()
    return Executor(
        Plan.parse(text).compile(shape_of(list(built))), communicator.alone(), built, mse,
        partial(torch.optim.AdamW, lr=1e-3),
    )  # fmt: skip


def losses(executor: Executor, first: int, count: int) -> list[float]:
    return [executor.run(lambda s: pairs(), k).losses[0] for k in range(first, first + count)]
