"""Memory of workers is followed, predicted and limited; that of servers, on their hosts, is what they keep."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from minipar import Cluster, DeviceOutOfMemory, DeviceSpec, Plan, models, train
from minipar.execution.execution import Job
from minipar.models.parameter_groups import shape_of
from minipar.server.serving import execute_served

pytestmark = pytest.mark.many(3)

GPT = partial(models.gpt, layers=2, width=32, heads=2, context=16)
ADAM = partial(torch.optim.AdamW, lr=1e-3)
WORDS = "dp=2 sync=ps microbatches=2"


def tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(256, (rows, 16), generator=torch.Generator().manual_seed(0))
    return x, x.roll(1, 1)


def go(cluster, words=WORDS, rows=16, **more):
    return train(GPT, tokens(rows), words, cluster=cluster, steps=3, optimizer=ADAM, progress=False, **more)


@pytest.mark.many(4)
@pytest.mark.parametrize(
    "words",
    [
        WORDS,
        "dp=2 sync=ps servers=2 microbatches=2 mode=async checkpoint=1 compress=topk:0.1",
        "dp=2 sync=ps servers=2 precision=bf16",
        "dp=2 sync=ps microbatches=2 schedule=zb-h1 clip=0.1",
    ],
)
def test_memory_is_as_predicted(clusters, words):
    run = go(clusters(Plan.parse(words).ranks), words, memory=True)
    for rank, (measured, predicted) in enumerate(zip(run.trace.series, run.predicted.series, strict=True)):
        peak = measured.peak()
        assert peak.bytes == pytest.approx(predicted.peak().bytes, rel=0.01), (rank, peak)
        if rank < 2:
            assert predicted.totals()[0] == pytest.approx(predicted.totals()[-1])
            assert peak.by_kind["optimizer"] == 0
            assert peak.by_kind["data"] == predicted.peak().by_kind["data"]
            assert peak.bytes <= measured.highest
        else:
            assert peak.by_kind["optimizer"] > 0
    assert len(str(run.memory).splitlines()) == len(run.program.ranks)


def test_a_worker_is_limited_to_the_byte(clusters):
    """A limit of one byte less than what was needed; the ranks go on after it."""
    job = Job(GPT, tokens(16), optimizer=ADAM)
    program = Plan.parse(WORDS).compile(shape_of(list(GPT())), steps=2)
    done, _ = execute_served(program, job, clusters(3), memory=True)
    needed = max(series.highest for series in done.trace.series[:2])
    with Cluster(3, device=DeviceSpec(memory=needed - 1)) as cluster:
        with pytest.raises(DeviceOutOfMemory) as caught:
            execute_served(program, job, cluster)
        assert (caught.value.needed, caught.value.capacity) == (needed, needed - 1)
        assert not any("zero" in way or "pp" in way for way in caught.value.ways_out)
        small = replace(job, data=tokens(8))
        assert execute_served(program, small, cluster)[0].losses
