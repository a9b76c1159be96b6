"""On a GPU: the tracker's bytes, the profile of what a plan leaves to the host, and offload by pinned memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from minipar import Cluster, Plan, data, models, profile, train
from minipar.execution.execution import Job, execute
from minipar.execution.streams import streams_of
from minipar.models.parameter_groups import shape_of
from tests.execution.test_offloading import ALL, blocks, mse, pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def test_the_allocator_agrees(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # else 32 MiB for each thread that computes, on a large GPU
    model = partial(models.build, "gpt-demo")
    job = Job(model, data.for_model("gpt-demo"), 16, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    program = Plan.parse("microbatches=2").compile(shape_of(list(model())))
    with Cluster(1, device="cuda") as cluster:
        (series,) = execute(program, job, cluster=cluster, passes=3, memory=True).trace.series
    assert series.device["most_reserved"] >= series.device["most_allocated"]
    peak = series.peak()
    assert peak.by_kind["activations"] > 0, "autograd's own thread is followed, too"
    # (the allocator rounds up to 512 bytes, and kernels have workspaces of their own)
    assert 0.9 <= peak.bytes / series.device["most_allocated"] <= 1.02


def test_what_the_host_computes_is_timed_there():
    """(Each of these layers takes the GPU well below a millisecond, and one core of the host many of them.)"""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).cuda()
    x, y = torch.randn(512, 2048), torch.randn(512, 2048)
    for host in (1, 3):
        found = profile(
            model, (x, y), nn.functional.mse_loss, optimizer=partial(torch.optim.Adam, lr=1e-3), on_host={host},
            host_steps=True,
        )  # fmt: skip
        for table in (found.forward, found.backward):
            slowest, *others = sorted(table[512], reverse=True)
            assert table[512][host] == slowest > 5 * max(others)
        assert found.host_step_seconds > 5 * found.step_seconds > 0
    assert all(p.is_cuda for p in model.parameters())
    assert profile(model, (x, y), nn.functional.mse_loss).host_step_seconds == 0


@pytest.mark.parametrize(
    "text", ["offload=activations", "offload=optimizer", "offload=parameters", ALL, f"{ALL} offload_to=disk",
             "host_layers=0"]
)  # fmt: skip
def test_the_same_losses(text):
    # (activations count where the peak is not in the update, whose temporary values are as many as the parameters)
    adam, sgd = partial(torch.optim.AdamW, lr=1e-3), partial(torch.optim.SGD, lr=0.1, foreach=False)
    activations = text == "offload=activations"
    with Cluster(1, device="cuda") as cluster:
        runs = [
            train(blocks, pairs(2048 if activations else 32), Plan.parse(words), cluster=cluster, steps=3, loss=mse,
                  progress=False, optimizer=sgd if activations else adam, memory=True)
            for words in ("microbatches=1", text)
        ]  # fmt: skip
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
    assert runs[1].peak_memory[0] < runs[0].peak_memory[0]


def test_buffers_of_a_step_are_used_again():
    streams = streams_of(torch.device("cuda", torch.cuda.current_device()))
    tensor = torch.randn(1 << 20, device="cuda")
    room = streams.room(tensor)
    assert room.is_pinned()
    streams.copy(tensor, room, "away").result()
    streams.copy(room, into := torch.empty_like(tensor), "back").result()
    assert torch.equal(into, tensor)
    streams.give_back(room, None)
    assert streams.room(tensor).data_ptr() == room.data_ptr()
    streams.close()
