"""The contents of a rank's memory while it runs, by kind, layer and instruction; the tracker is off by default."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from minipar import Cluster, MiniparError, Plan, data, models, train
from minipar.execution.execution import Job, execute
from minipar.execution.memory.tracker import SERIES
from minipar.models.parameter_groups import shape_of
from minipar.program import Op

WIDTHS = (32, 64, 64, 256)
ADAM = partial(torch.optim.AdamW, lr=1e-3)


def run(clusters, text: str, model=None, passes: int = 3, **options):
    made = model or partial(models.mlp, WIDTHS)
    job = Job(made, (torch.randn(16, 32), torch.randint(256, (16,))), optimizer=ADAM)
    program = Plan.parse(text).compile(shape_of(list(made())))
    return execute(program, job, cluster=clusters(len(program.ranks)), passes=passes, memory=True, **options).trace


def parameters(*layers: int) -> int:
    return sum((WIDTHS[l] * WIDTHS[l + 1] + WIDTHS[l + 1]) * 4 for l in layers)


@pytest.mark.parametrize("text", ["dp=2 bucket=flat", "pp=3 microbatches=4"])
def test_states_are_what_they_must_be(clusters, text):
    trace = run(clusters, text)
    for rank, series in enumerate(trace.series):
        layers = trace.program.placement[rank]
        tensors = 2 * len(layers)
        kinds = series.peak().by_kind
        assert kinds["parameters"] == parameters(*layers)
        assert kinds["optimizer"] == 2 * parameters(*layers) + 4 * tensors  # two moments, and a count for each tensor
        assert 0 < kinds["gradients"] <= parameters(*layers)
        rows = 16 // trace.program.replicas
        assert kinds["data"] == (0 in layers) * rows * 32 * 4 + (2 in layers) * rows * 8
        assert series.totals()[-1] == series.at_start, "nothing is left of a step"
        assert series.highest >= series.peak().bytes


def test_owners_by_layer(clusters):
    (series,) = run(clusters, "microbatches=1").series
    owners = {(kind, layer): size for kind, layer, size in series.peak().owners}
    for layer in range(3):
        assert owners["parameters", layer] == parameters(layer)
        assert owners["optimizer", layer] == 2 * parameters(layer) + 8
    assert series.peak().index == 2, "the optimizer step: its temporaries are as large as the last layer"
    assert owners["temporary", -1] > parameters(2)
    assert trace_of_layers(series) == {0, 1, 2}


def trace_of_layers(series) -> set[int]:
    kind = 3  # activations
    return {layer for layer, code, delta in zip(series.layers, series.kinds, series.deltas, strict=True)
            if code == kind and delta > 0 and layer >= 0}  # fmt: skip


def test_changes_belong_to_the_instructions_of_the_trace(clusters):
    trace = run(clusters, "pp=2 microbatches=4 schedule=gpipe")
    for rank, series in enumerate(trace.series):
        row = trace.program.ranks[rank]
        assert series.indices == sorted(series.indices)
        for time, index in zip(series.times, series.indices, strict=True):
            if index >= 0 and row[index].op is Op.FORWARD:
                assert trace.starts[rank][index] - 1e-3 <= time <= trace.ends[rank][index] + 1e-3
        assert series.times == sorted(series.times)
        received = {k for k, kind in zip(series.indices, series.kinds, strict=True) if kind == 4}
        assert received, "messages are buffers until they are received"
    assert not any(size < 0 for series in trace.series for size in series.peak().by_kind.values())


def test_keeping_gradients_for_a_check_costs_the_device_nothing(clusters):
    with_, without = (run(clusters, "dp=2", keep_gradients=kept).series[0] for kept in (True, False))
    assert with_.peak().bytes == without.peak().bytes
    assert with_.highest == without.highest


def test_only_the_last_passes_are_kept(clusters):
    trace = run(clusters, "microbatches=1", passes=SERIES + 3)
    assert len(trace.series) == 1
    assert trace.series[0].peak().bytes <= trace.series[0].highest


def test_following_does_not_load_the_compiler():
    """torch would, for every dispatch mode: seconds in every rank, at the first operator."""
    captured = "torch.export._trace" in sys.modules  # by an earlier test: ranks are then forked with the compiler
    with Cluster(1, device="cpu", start="spawn" if captured else "auto") as cluster:
        run(lambda ranks: cluster, "microbatches=1", passes=1)
        assert cluster.run(lambda: "torch._dynamo" in sys.modules) == [False]


def test_a_run_says_who_held_the_peak_if_it_was_asked(clusters):
    options = {"cluster": clusters(2), "steps": 3, "batch": 8, "progress": False}
    found = train(partial(models.build, "mlp-tiny"), data.for_model("mlp-tiny"), "pp=2 microbatches=2",
                  memory=True, **options)  # fmt: skip
    assert [peak.bytes for peak in found.memory] == found.peak_memory == [s.peak().bytes for s in found.trace.series]
    assert found.predicted.series
    for peak in found.memory:
        assert sum(peak.by_kind.values()) == peak.bytes
    plain = train(partial(models.build, "mlp-tiny"), data.for_model("mlp-tiny"), "pp=2 microbatches=2", **options)
    assert not plain.trace.series
    assert plain.losses == found.losses
    with pytest.raises(MiniparError, match="memory=True"):
        _ = plain.memory
