"""The tracker on a GPU: the same bytes as the allocator's own statistics, up to its rounding."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minipar import Cluster, Plan, data, models
from minipar.execution.execution import Job, execute
from minipar.models.parameter_groups import shape_of

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
