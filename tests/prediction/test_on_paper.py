"""Estimates of plans: times compared with closed forms, memory with the formulas; and bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minipar.costs.hardware import PERFECT, Hardware
from minipar.errors import PlanError
from minipar.models import table
from minipar.models.sizes import Transformer, of_preset
from minipar.prediction import on_paper
from minipar.prediction.plan_numbers import own_layers, split_of
from minipar.program import Op
from minipar.strategies.layout import even_split
from minipar.strategies.plan import Plan
from tests.prediction.on_machine import simulated

DEVICE = "flops=8GFLOP/s bandwidth=100MB/s latency=1ms host_bandwidth=400MB/s"
DEMO = table.numbers("gpt-demo")
assert isinstance(DEMO, table.GPT)
MODEL = of_preset(DEMO)
WORK = 16 * MODEL.flops / 8e9  # seconds of a step on one device
STATES = 4 * MODEL.parameters


def test_one_device_takes_its_operations_however_the_batch_is_cut() -> None:
    for plan in ("", "microbatches=16", "microbatches=3"):
        assert on_paper.predict(plan, "gpt-demo", DEVICE, 16).trace.time == pytest.approx(WORK, rel=1e-3)


def test_recomputing_all_layers_adds_a_forward() -> None:
    """But for the layer that goes backward at once, and what one row's layers can do without."""
    found = on_paper.predict("microbatches=16 checkpoint=1", "gpt-demo", DEVICE, 16)
    assert 1.25 * WORK < found.trace.time <= WORK + 16 * MODEL.layers * MODEL.block_flops / 8e9


def test_selective_recomputation_adds_the_attention_cores() -> None:
    found = on_paper.predict("microbatches=4 checkpoint=selective", "gpt-demo", DEVICE, 16)
    cores = MODEL.layers * MODEL.core_flops * 16
    assert found.trace.time == pytest.approx(WORK + cores / 8e9, rel=1e-6)


def test_data_parallel_without_overlap_is_compute_and_a_ring() -> None:
    found = on_paper.predict("dp=4 overlap=none bucket=flat", "gpt-demo", DEVICE, 16)
    ring = 2 * 3 / 4 * STATES / 100e6 + 2 * 3 * 1e-3
    assert found.trace.time == pytest.approx(WORK / 4 + ring, rel=1e-3)


def test_messages_of_a_step() -> None:
    """The bytes that cross the cut are those of one row's output, there and back, for each micro-batch."""
    found = on_paper.predict("pp=2 microbatches=8", "gpt-demo", DEVICE, 8)
    assert sum(sum(row) for row in [found.trace.bytes_by_link().values()]) == 8 * 2 * 4 * 128 * 192


def test_memory_is_the_formula() -> None:
    plan = Plan.parse("pp=2 dp=2 zero=1 microbatches=8 checkpoint=1")
    found = on_paper.predict(plan, "gpt-demo", DEVICE, 16)
    assert found.ranks == on_paper.per_rank(plan, "gpt-demo", 16)
    assert found.memory == [rank.total for rank in found.ranks]


@pytest.mark.parametrize(
    "plan",
    ["dp=4 overlap=none", "dp=2 pp=2 microbatches=4", "pp=4 microbatches=8 schedule=zb-h1", "dp=4 zero=3 overlap=none",
     "pp=2 microbatches=4 schedule=interleaved", "pp=2 dp=2 microbatches=4 zero=1 checkpoint=1"],
)  # fmt: skip
def test_an_emulated_device_and_a_machine_with_the_same_numbers_take_the_same_time(plan: str) -> None:
    """A machine whose kernels reach the peak, and whose memory is infinitely fast, is an emulated device."""
    machine = Hardware("emulated", 8e9, 8e9, 10**12, 1e30, 1e8, 1e-3, 1e8, 1e-3, per_node=64, efficiency=PERFECT)
    for model in (
        "megatron-1.7b",
        "mlp-wide",
    ):  # (their attention is no kernel of its own, whose backward takes longer)
        emulated = on_paper.predict(plan, model, DEVICE, 16)
        sizes = on_paper.model_of(model)
        if isinstance(sizes, Transformer):
            sizes = replace(sizes, flash=False)
        numbers = on_paper.own_numbers(Plan.parse(plan), sizes)
        even = even_split(own_layers(sizes), len(split_of(numbers, sizes)))
        trace = simulated(numbers._replace(rows=16 / numbers.dp / numbers.microbatches, split=even), sizes, machine)
        assert trace.time == pytest.approx(emulated.time, rel=1e-6)
        assert trace.memory(0).peak == pytest.approx(emulated.trace.memory(0).peak, rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "model", "device", "batch", "words"),
    [
        ("", "gpt-demo", "pcie", 16, "needs flops="),
        ("", "gpt-none", DEVICE, 16, "no such preset"),
        ("dp=4 microbatches=8", "gpt-demo", DEVICE, 16, "batch=16: fewer rows than the 32 micro-batches"),
        ("pp=2 schedule=terapipe", "gpt-demo", DEVICE, 16, "no formula for slices"),
        ("pp=99", "gpt-demo", DEVICE, 16, "99"),
    ],
)
def test_what_cannot_be(plan: str, model: str, device: str, batch: int, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        on_paper.predict(plan, model, device, batch)
    assert words in caught.value.reason


def test_halves_of_a_backward_follow_the_operators() -> None:
    """A block's input half takes longer than its weight half, by two backwards of the attention core."""
    trace = on_paper.predict("pp=2 microbatches=4 schedule=zb-h1", "gpt-demo", DEVICE, 4).trace
    took: dict[Op, list[float]] = {Op.BACKWARD_INPUT: [], Op.BACKWARD_WEIGHT: []}
    for ins, start, end in zip(trace.program.ranks[0], trace.starts[0], trace.ends[0], strict=True):
        if ins.op in took:
            took[ins.op].append(end - start)
    blocks = len(trace.program.placement[0]) - 1  # (the embedding is no block)
    core = MODEL.core_flops / 8e9
    differences = [a - b for a, b in zip(*took.values(), strict=True)]
    assert differences == pytest.approx([2 * blocks * core] * 4)
