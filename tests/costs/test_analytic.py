"""Formulas for activations and operations, compared with the papers' tables and with minipar's own layers;
also of ranks that share layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minipar import models
from minipar.costs import analytic
from minipar.costs.analytic import WHOLE, Division, block_bytes
from minipar.errors import PlanError
from minipar.execution.measuring.profiler import profile
from minipar.models import GPT, Branchy, Mixture, shapes, table
from minipar.models.sizes import Transformer, of_preset, sizes
from minipar.prediction.on_paper import per_rank
from minipar.strategies.plan import Plan

GiB = 2**30


def gpt(name: str) -> GPT:
    found = table.numbers(name)
    assert isinstance(found, GPT)
    return found


# Korthikanti et al. 2022: name, tensor-parallel, stages, chunks, rows of a micro-batch, GPUs, rows of a step
RUNS = {
    "22b": (8, 1, 1, 4, 8, 4),
    "175b": (8, 8, 3, 1, 64, 64),
    "530b": (8, 35, 3, 1, 280, 280),
    "1t": (8, 64, 1, 1, 512, 512),
}
# table 2 times the layers of the model, in GiB: nothing / TP / TP+SP / TP+selective / TP+SP+selective
BLOCKS = {
    "22b": ("316.5", "59.3", "39.6", "29.2", "9.6"),
    "175b": ("256.5", "51.8", "32.1", "29.2", "9.6"),
    "530b": ("402.0", "86.1", "50.2", "53.3", "17.4"),
    "1t": ("612.5", "131.2", "76.6", "81.2", "26.6"),
}
# figures 1 and 7: GiB on the first stage, TP only and SP + selective; percent of TP only: SP, selective, both, full
FIRST_STAGE = {
    "22b": (59.25, 9.5625, 66.77, 49.37, 16.14, 7.59),
    "175b": (66.84375, 12.3515625, 61.96, 56.52, 18.48, 8.70),
    "530b": (114.0234375, 23.076171875, 58.33, 61.90, 20.24, 9.52),
    "1t": (131.25, 26.5625, 58.33, 61.90, 20.24, 9.52),
}
UTILISATION = {"22b": (1.10, 41.7), "175b": (13.75, 51.4), "530b": (37.83, 56.0), "1t": (71.49, 56.3)}


@pytest.mark.parametrize("size", RUNS)
def test_korthikanti_table_2(size: str) -> None:
    model, (tp, _, _, rows, _, _) = gpt(f"korthikanti-{size}"), RUNS[size]
    found = (
        block_bytes(model, rows),
        block_bytes(model, rows, tp=tp),
        block_bytes(model, rows, tp=tp, sequence_parallel=True),
        block_bytes(model, rows, selective=True, tp=tp),
        block_bytes(model, rows, selective=True, tp=tp, sequence_parallel=True),
    )
    for value, printed in zip(found, BLOCKS[size], strict=True):
        assert model.layers * value / GiB == pytest.approx(float(printed), abs=0.0501)


@pytest.mark.parametrize("size", RUNS)
def test_korthikanti_memory_of_the_first_stage(size: str) -> None:
    model, (tp, pp, chunks, rows, _, _) = gpt(f"korthikanti-{size}"), RUNS[size]
    interleaved = 1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1.0  # times the activations of 1F1B
    factor = model.layers * interleaved / GiB
    base = block_bytes(model, rows, tp=tp)
    both = block_bytes(model, rows, selective=True, tp=tp, sequence_parallel=True)
    only_tp, reduced, *percents = FIRST_STAGE[size]
    assert factor * base == only_tp
    assert factor * both == reduced
    found = (
        block_bytes(model, rows, tp=tp, sequence_parallel=True),
        block_bytes(model, rows, selective=True, tp=tp),
        both,
        2 * model.context * rows * model.width,  # the input of a block
    )
    assert [round(100 * value / base, 2) for value in found] == percents


def test_the_paper_s_single_formulas() -> None:
    model = gpt("gpt3-175b")
    size = 2048 * 3 * 12288  # s b h
    assert block_bytes(model, 3) == size * (34 + 5 * 96 * 2048 // 12288) == size * 114
    assert block_bytes(model, 3, selective=True) == 34 * size
    assert block_bytes(model, 3, element=4) == size * (66 + 9 * 16)
    costs = analytic.layer_costs("gpt3-175b", 3, element=2)
    assert costs.saved[1] + costs.output[0] == 114 * size  # the layers' table says the same
    selective = analytic.layer_costs("gpt3-175b", 3, element=2, selective=True)
    assert selective.saved[1] + selective.output[0] == 34 * size
    # embedding's mask, last norm's and logits' inputs, logits: section 4.3 with one stage
    extra = sum(costs.saved) + sum(costs.output) - 96 * 114 * size
    assert extra == size + 4 * size + 4 * 2048 * 3 * 50257


@pytest.mark.many(2)
@pytest.mark.parametrize("name", models.presets())
@pytest.mark.parametrize("rows", [1, 3])
def test_every_byte_of_minipar_s_own_layers(name: str, rows: int) -> None:
    numbers = models.preset(name)
    if isinstance(numbers, (GPT, Mixture)):
        x = y = torch.randint(numbers.vocab, (rows, numbers.context))
    else:
        ends = (64, 10) if isinstance(numbers, Branchy) else (numbers.widths[0], numbers.widths[-1])
        x, y = torch.randn(rows, ends[0]), torch.randint(ends[1], (rows,))
    measured = profile(models.build(name), (x, y), models.loss_of(name), [rows], repeats=1)
    costs = analytic.layer_costs(name, rows)
    assert costs.output == measured.output_bytes[rows]
    assert costs.gradient == measured.grad_output_bytes[rows]
    assert costs.saved == measured.saved_bytes[rows]


# Narayanan et al. 2021, table 1: GPUs, rows of a step, TFLOP/s of each GPU, seconds
MEGATRON: dict[str, Any] = {
    "1.7b": (32, 512, 137, 3.53), "3.6b": (64, 512, 138, 3.70), "7.5b": (128, 512, 142, 3.70),
    "18b": (256, 1024, 135, 9.40), "39b": (512, 1536, 138, 14.45), "76b": (1024, 1792, 140, 16.06),
    "145b": (1536, 2304, 148, 24.82), "310b": (1920, 2160, 155, 37.61), "530b": (2520, 2520, 163, 54.08),
    "1t": (3072, 3072, 163, 102.63),
}  # fmt: skip


@pytest.mark.parametrize("size", MEGATRON)
def test_megatron_s_operations(size: str) -> None:
    model, (gpus, batch, rate, seconds) = gpt(f"megatron-{size}"), MEGATRON[size]
    one = of_preset(model)
    found = batch * (one.flops + one.layers * one.block_flops)  # a recomputation adds a forward
    s, l, h, v = model.context, model.layers, model.width, model.vocab
    assert found == pytest.approx(96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h)), rel=1e-12)
    assert found / (gpus * rate * 1e12) == pytest.approx(seconds, abs=0.0051)


@pytest.mark.parametrize("size", RUNS)
def test_korthikanti_s_utilisation(size: str) -> None:
    model, (*_, gpus, batch) = gpt(f"korthikanti-{size}"), RUNS[size]
    seconds, percent = UTILISATION[size]
    found = batch * of_preset(model).flops / (seconds * gpus * 312e12)
    assert 100 * found == pytest.approx(percent, abs=0.051)


def test_layer_costs_count_operations() -> None:
    model = of_preset(gpt("gpt2-small"))
    costs = analytic.layer_costs("gpt2-small", 5)
    assert sum(costs.forward) + sum(costs.backward) == 5 * model.flops
    assert (model.core_flops, model.block_flops - model.core_flops) == (4 * 1024**2 * 768, 24 * 1024 * 768**2)
    assert analytic.layer_costs("mlp-tiny", 7).forward == (2 * 7 * 32 * 64, 2 * 7 * 64 * 64, 2 * 7 * 64 * 256)


def test_a_model_by_name_or_by_numbers() -> None:
    shallow = analytic.layer_costs("gpt3-175b", 1, layers=4)
    assert shallow == analytic.layer_costs(table.numbers("gpt3-175b"), 1, fused=False, layers=4)
    assert shallow != analytic.layer_costs(table.numbers("gpt3-175b", layers=4), 1)
    assert len(shallow.forward) == 6


def test_the_input_half_has_the_whole_backward_of_the_attention_core():
    """24 s h^2 + 8 s^2 h operations of a block's 48 s h^2 + 8 s^2 h; the rest are for the weights."""
    gpt = table.numbers("gpt2-small")
    s, h = gpt.context, gpt.width
    whole, given = analytic.layer_costs(gpt, 1).backward, analytic.input_flops(gpt, 1)
    assert given[1] == 24 * s * h**2 + 8 * s**2 * h
    assert whole[1] - given[1] == 24 * s * h**2
    assert given[1] / whole[1] == pytest.approx(0.59, abs=0.005)
    assert (given[0], given[-1]) == (0, whole[-1] / 2)
    again = analytic.input_flops("gpt2-small", 1, selective=True)
    assert again[1] - given[1] == of_preset(gpt).core_flops
    assert analytic.input_flops("mlp-tiny", 3) == tuple(n / 2 for n in analytic.layer_costs("mlp-tiny", 3).backward)


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-moe-tiny", "mlp-tiny"])
def test_the_input_half_of_a_model_in_halves_of_tensor_parallel_ranks(name):
    if name != "gpt-tiny":
        assert len(analytic.input_flops(name, 2)) == len(analytic.layer_costs(name, 2).backward)
        return
    half = analytic.input_flops(name, 2, division=analytic.Division(tp=2))
    assert half == tuple(n / 2 for n in analytic.input_flops(name, 2))


# Tensor and expert parallelism ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-tiny-tied", "gpt2-small"])
def test_undivided_is_the_model(name: str) -> None:
    gpt, shape = table.numbers(name), shapes.shape(name, element_size=1)
    assert isinstance(gpt, GPT)
    groups, experts = analytic.groups(gpt, WHOLE)
    assert experts == 0
    assert [(g.layers, sum(g.tensors)) for g in groups] == [(g.layers, sum(g.tensors)) for g in shape.groups]


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_activations_of_a_block_are_those_of_the_paper(tp: int, sequence: bool, selective: bool) -> None:
    gpt = table.numbers("korthikanti-22b")
    assert isinstance(gpt, GPT)
    costs = analytic.layer_costs("korthikanti-22b", 4, 2, selective=selective, division=Division(tp, sequence))
    s, b, h, a = gpt.context, 4, gpt.width, gpt.heads
    core = 0 if selective else 5 * a * s / h
    wanted = s * b * h * (34 + core) / tp if sequence else s * b * h * (10 + (24 + core) / tp)
    assert costs.saved[1] + costs.output[0] == pytest.approx(wanted, abs=0.5)
    whole = analytic.block_bytes(gpt, 4, 2, selective=selective, tp=tp, sequence_parallel=sequence)
    assert costs.saved[1] + costs.output[0] == whole


def test_tensor_parallel_ranks_hold_the_matrices_once() -> None:
    gpt = table.numbers("gpt2-xl", vocab=50304, heads=16)
    assert isinstance(gpt, GPT)
    one, _ = analytic.groups(gpt, WHOLE)
    part, _ = analytic.groups(gpt, Division(tp=8))
    h = gpt.width
    for whole, mine in zip(one, part, strict=True):
        alone = {0: gpt.context * h, gpt.layers + 1: 2 * h}.get(whole.layers[0], 6 * h)  # norms, second biases
        alone = 0 if len(whole.layers) == 2 else alone  # the words' vectors are cut altogether
        assert sum(whole.tensors) - alone == 8 * (sum(mine.tensors) - alone)


def mixture(experts: int, top: int = 1) -> Transformer:
    """GPT-2 small with experts in place of perceptrons."""
    model = sizes("gpt2-small flash=false")
    assert isinstance(model, Transformer)
    return replace(model, experts=experts, top=top, capacity=1.0, expert_bias=True)


def test_experts_are_divided_among_replicas() -> None:
    gpt = table.numbers("gpt2-small")
    assert isinstance(gpt, GPT)
    h, mlp = gpt.width, 8 * gpt.width**2 + 5 * gpt.width
    dense = sum(sum(g.tensors) for g in analytic.groups(gpt, WHOLE)[0])
    groups, experts = analytic.groups(mixture(8), Division(ep=4))
    assert experts == gpt.layers
    assert sum(sum(g.tensors) for g in groups) == dense + gpt.layers * (mlp * (8 // 4 - 1) + 8 * h)
    plan = Plan.parse("dp=8 zero=1 precision=bf16")
    states = [per_rank(plan, mixture(8), 8, Division(ep=ep))[0] for ep in (1, 2, 8)]
    assert states[0].parameters > states[1].parameters > states[2].parameters
    # With one expert on each rank nobody shares its optimizer state, which is as large as it is in a dense model of it.
    whole = 12 * gpt.layers * mlp
    shared = dense - gpt.layers * mlp + gpt.layers * 8 * h
    assert states[2].optimizer == pytest.approx(whole + 12 * shared / 8, rel=1e-5)


def test_a_token_s_experts_keep_what_one_mlp_does_each() -> None:
    one, two = (analytic.layer_costs(mixture(4, top), 1, 2).saved[1] for top in (1, 2))
    size = 1024 * 768
    assert two - one == 8 * 2 * size + 2 * size
    assert analytic.layer_costs(mixture(4, 2), 1, 2).forward[1] == pytest.approx(
        analytic.layer_costs("gpt2-small", 1, 2).forward[1] + 16 * size * 768 + 2 * size * 4  # (the router)
    )


@pytest.mark.parametrize(
    ("division", "model", "says"),
    [
        (Division(tp=5), "gpt2-small", "tp=5: must divide 12 heads; possible are 1, 2, 3, 4, 6, 12"),
        (Division(ep=2), "gpt2-small", "ep=2: gpt2-small has no experts; possible is ep=1"),
        (Division(ep=3), mixture(8), "ep=3: must divide the dp=4 replicas that it is of; possible are 1, 2, 4"),
        (Division(tp=2), "mlp-tiny", "tp=2: formulas divide transformers"),
    ],
)
def test_what_cannot_be_is_refused(division: Division, model: str | Transformer, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        per_rank(Plan(dp=4), model, 4, division)
