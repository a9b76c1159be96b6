"""minipar.estimate: its parts add up, it agrees with what it is made of, and bad input is told what is possible."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import pytest

import minipar
from minipar.cli import main
from minipar.costs.hardware import PERFECT, PRESETS, Hardware
from minipar.errors import PlanError
from minipar.models.sizes import MODELS, Chain, ChainLayer, Transformer, llama, sizes
from minipar.prediction.closed_form import closed_form, replicas_of
from minipar.prediction.estimating import estimate, way_out
from minipar.prediction.fitting import smallest, ways_of_numbers
from minipar.prediction.plan_numbers import PlanNumbers
from minipar.prediction.plan_words import words
from minipar.prediction.replica import by_simulation
from minipar.strategies.schedules import registry
from minipar.strategies.schedules.registry import Times, find
from tests.prediction.on_machine import whole

GPT3 = "tp=8 pp=8 dp=2 micro_batch_size=1 checkpoint=selective sequence_parallel=true precision=bf16"


@pytest.mark.parametrize(
    ("plan", "model", "devices"),
    [
        (GPT3, "gpt3-175b", "a100-80gb"),
        ("ep=8 dp=2 zero=2 microbatches=2", "mixtral-8x7b", "h200"),
        ("context_parallel=4 zero=1", "llama3-8b sequence=32768", "b200"),
        ("pp=4 schedule=zb-h1 microbatches=8 split=4,4,3,3", "gpt2-small", "v100"),
        ("pp=3 microbatches=4 dp=2", "resnet-50", "laptop"),
    ],
)
def test_parts_add_up(plan: str, model: str, devices: str) -> None:
    found = minipar.estimate(plan, model, devices)
    assert sum(found.breakdown.values()) == pytest.approx(found.time)
    assert sum(found.memory_breakdown.values()) == found.memory
    assert min(found.breakdown.values()) > 0
    assert 0 < found.mfu < 1
    again = minipar.estimate(found.plan, model, devices)
    assert (again.time, again.memory) == (found.time, found.memory)


def test_a_perfect_device_takes_its_operations() -> None:
    machine = Hardware("ideal", 1e12, 1e12, 10**15, 1e18, 1e18, 0, 1e18, 0, efficiency=PERFECT)
    model = sizes("gpt2-small flash=false")
    found = estimate("microbatches=4", model, machine, batch=8)
    assert found.time == pytest.approx(8 * model.flops / 1e12, rel=1e-3)
    assert found.mfu == pytest.approx(1, rel=1e-3)
    again = estimate("microbatches=4 checkpoint=1", model, machine, batch=8)
    assert isinstance(model, Transformer)
    assert again.time - found.time == pytest.approx(8 * 12 * model.block_flops / 1e12, rel=1e-3)
    assert again.mfu < found.mfu
    assert again.tflops_per_gpu == pytest.approx(1, rel=1e-3)


def test_data_parallel_without_overlap_adds_a_ring_between_nodes() -> None:
    machine = replace(PRESETS["a100-80gb"], per_node=1, far_latency=0.0)
    one, four = (estimate(f"dp={dp} overlap=none", "gpt2-xl", machine, batch=dp) for dp in (1, 4))
    ring = 2 * 3 / 4 * 4 * MODELS["gpt2-xl"].parameters / (25e9 * machine.rates.far)
    assert four.time - one.time == pytest.approx(ring, rel=0.01)
    assert estimate("dp=4", "gpt2-xl", machine, batch=4).time < four.time


def test_rows_and_micro_batches_say_the_same() -> None:
    one = estimate("dp=2 pp=4 micro_batch_size=2", "gpt2-xl", "a100-80gb", 64)
    two = estimate("dp=2 pp=4 microbatches=16", "gpt2-xl", "a100-80gb", 64)
    assert one.cost == two.cost
    assert (one.numbers.microbatches, one.numbers.rows) == (16, 2)
    filled = estimate("tp=8 pp=4 micro_batch_size=2", "gpt3-175b", "a100-80gb", 64, nodes=16, gpus_per_node=8)
    assert filled.numbers.dp == 4


def test_a_torch_model_with_an_example() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
    found = estimate("pp=2 microbatches=4", model, "h100", 64, example=torch.zeros(2, 64))
    assert found.model.parameters == 64 * 256 + 256 + 256 * 10 + 10
    assert found.cost.model_flops == 3 * 64 * 2 * (64 * 256 + 256 * 10)
    with pytest.raises(PlanError, match="context_parallel=2: formulas divide transformers, and Sequential is a chain"):
        estimate("context_parallel=2", model, "h100", example=torch.zeros(2, 64))
    with pytest.raises(PlanError, match=r"model Sequential: must be a name, .* or estimate\(\.\.\., example=\)"):
        estimate("", model, "h100")


def test_plans_that_minipar_cannot_run_are_estimated_and_say_so() -> None:
    found = minipar.estimate("dp=2 pp=2 schedule=ampnet microbatches=4", "gpt2-medium", "a100-80gb")
    assert "not together with" in found.note
    assert f"minipar itself cannot run it: {found.note}" in str(found)
    assert minipar.estimate("tp=2 pp=2 microbatches=4", "gpt2-medium", "a100-80gb").note == ""


def test_without_flushes_every_micro_batch_may_be_an_update() -> None:
    plans = [f"dp=4 pp=2 schedule={name} microbatches=8 overlap=none" for name in ("pipedream", "pipedream-2bw")]
    often, once = (estimate(plan, "gpt-demo", "a100-80gb").cost.seconds for plan in plans)
    for what in ("gradient sums", "optimizer"):
        assert often[what] == pytest.approx(8 * once[what])


def test_one_replica_is_simulated_where_there_is_no_formula() -> None:
    """And where there is one, both give the same."""
    plan = "pp=4 microbatches=24 schedule=1f1b"
    formula, simulated = (estimate(plan, "gpt2-xl", "a100-80gb", simulate=flag) for flag in (False, True))
    assert simulated.time == pytest.approx(formula.time, rel=1e-3)
    assert simulated.memory == formula.memory
    doubled = estimate("pp=4 microbatches=16 schedule=chimera doubling=true", "gpt2-xl", "a100-80gb")
    plain = estimate("pp=4 microbatches=16 schedule=chimera", "gpt2-xl", "a100-80gb")
    assert doubled.time < plain.time
    assert doubled.memory > plain.memory
    for schedule, count in (("zb-h1", 40), ("1f1b", 40), ("gpipe", 13), ("interleaved", 24)):
        chunks = find(schedule).chunks
        numbers = PlanNumbers(pp=4, schedule=schedule, microbatches=count, chunks=chunks)
        form, times = find(schedule).form, Times(1.0, 1.5, 0.7)
        assert form is not None
        each = [Times(*(x / chunks for x in times))] * (4 * chunks)
        assert max(by_simulation(numbers)(each)) == pytest.approx(form(times, 4, count, chunks))


def test_experts_are_replicated_over_context_parallel_ranks() -> None:
    """Ranks of cp have the same experts, whose gradients are summed over dp x cp ranks, and shared out among them."""
    where = PRESETS["h200"]
    for plan, ranks in (("dp=2", 2), ("dp=2 context_parallel=2", 4), ("dp=2 ep=2 context_parallel=2", 4)):
        found = estimate(f"{plan} zero=1 overlap=none", "mixtral-8x7b", where)
        assert replicas_of(found.numbers, where).experts.ranks == ranks
        model = found.model
        assert isinstance(model, Transformer)
        experts = model.layers * model.expert_parameters // found.numbers.ep
        others = model.parameters - model.layers * model.expert_parameters
        shared = others / (ranks * found.numbers.ep) + experts / ranks
        assert found.memory_breakdown["optimizer"] == pytest.approx(12 * shared, rel=1e-6)
        words = f"{plan} overlap=none"
        formula = estimate(words, "mixtral-8x7b", where)
        assert formula.time == pytest.approx(whole(words, "mixtral-8x7b", where).time, rel=0.03)
    near = replicas_of(PlanNumbers(dp=4, cp=2, ep=2, tp=2), where).experts  # 2 of dp and 2 of cp are in a node
    assert near == (8, 2)
    alone = estimate("dp=2 ep=2 overlap=none", "mixtral-8x7b", where).breakdown["gradient sums"]
    both = estimate("dp=1 ep=2 context_parallel=2 overlap=none", "mixtral-8x7b", where).breakdown["gradient sums"]
    assert both == pytest.approx(alone, rel=0.01)


def test_a_schedule_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))

    @minipar.schedule("mine-estimated")
    def mine(rank: int, stages: int, microbatches: int):  # type: ignore[no-untyped-def]
        for i in range(microbatches):
            yield minipar.Forward(i)
        for i in reversed(range(microbatches)):
            yield minipar.Backward(i)

    one, two = (
        estimate(f"pp=4 microbatches=20 schedule={name}", "gpt2-xl", "a100-80gb")
        for name in ("mine-estimated", "gpipe")
    )
    assert one.time == pytest.approx(two.time, rel=1e-3)
    assert one.numbers.schedule == "mine-estimated"


def test_own_models_and_machines(tmp_path: Path) -> None:
    mine = llama(16, 2048, 16, 4096, 32000, kv_heads=4, ffn=5632, name="mine")
    machine = replace(PRESETS["h100"], name="half", flops="500TFLOP/s")
    one = estimate("dp=8 zero=1", mine, machine)
    text = "llama layers=16 hidden=2048 heads=16 sequence=4096 vocabulary=32000 kv_heads=4 ffn=5632"
    assert estimate("dp=8 zero=1", text, "h100 flops=500TFLOP/s").time == one.time
    (tmp_path / "model.toml").write_text(
        'kind = "llama"\nlayers = 16\nhidden = 2048\nheads = 16\nsequence = 4096\nvocabulary = 32000\nkv_heads = 4\n'
        "ffn = 5632\n"
    )
    (tmp_path / "machine.toml").write_text('like = "h100"\nflops = "500TFLOP/s"\n[efficiency]\nfar = 0.5\n')
    if sys.version_info >= (3, 11):
        two = estimate("dp=8 zero=1", str(tmp_path / "model.toml"), str(tmp_path / "machine.toml"))
        assert two.time == one.time
        assert estimate("dp=8 zero=1", tmp_path / "model.toml", tmp_path / "machine.toml").time == one.time
        assert two.machine.efficiency.far == 0.5
    chain = Chain((ChainLayer(1e9, 10**6, 1e3, 1e4, 1e5),) * 4, "chain")
    assert estimate("pp=2 microbatches=4", chain, "h100").numbers.pp == 2


def test_it_is_much_faster_than_a_millisecond() -> None:
    model, machine = MODELS["gpt3-175b"], PRESETS["a100-80gb"]
    plans = [PlanNumbers(dp=2, pp=8, tp=8, microbatches=m, zero=zero) for m in range(8, 28) for zero in range(4)]
    closed_form(plans[0], model, machine)

    def one_pass() -> float:
        start = process_time()
        for plan in plans:
            closed_form(plan, model, machine)
        return (process_time() - start) / len(plans)

    assert min(one_pass() for _ in range(5)) < 1e-3


@pytest.mark.parametrize(
    ("plan", "model", "devices", "told"),
    [
        ("tp=5", "gpt3-175b", "h100", "tp=5: must divide 96 heads; possible are 1, 2, 3, 4, 6, 8"),
        (
            "checkpoint=64MiB pp=2 schedule=interleaved microbatches=8",
            "gpt2-small",
            "h100",
            r"64.00MiB is too small; the least is .* on rank 1, with 2 stages",
        ),
        ("pp=2 split=1,2", "gpt2-xl", "h100", "sums to 3, but the model has 50 layers; possible is split=25,25"),
        ("", "gpt2-xl", "", "hardware '': none is named; there are laptop"),
        ("micro_batch_size=3", "gpt2-xl", "h100", "possible are batch=15 or 18"),
    ],
)
def test_what_cannot_be(plan: str, model: str, devices: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        estimate(plan, model, devices, 16)


def test_more_rows_than_there_are_are_refused() -> None:
    with pytest.raises(PlanError, match="batch=10000000000: must be a whole number from 1 to 1000000000"):
        estimate("dp=2", "gpt2-xl", "h100", 10**10)
    with pytest.raises(PlanError, match="microbatches=999999999999: with dp=2 a step has more than 1000000000 rows"):
        estimate("dp=2 microbatches=999999999999", "gpt2-xl", "h100")
    with pytest.raises(PlanError, match="nodes=999999999: with 8 devices each"):
        estimate("tp=2", "gpt2-xl", "h100", nodes=999999999)


@pytest.mark.parametrize(
    ("plan", "model", "devices", "told"),
    [
        ("pp=2", object(), "h100", r"model object: must be a name, .* or estimate\(\.\.\., example=\)"),
        (
            "pp=2",
            Path("somewhere/model"),
            "h100",
            "model 'somewhere/model': a file with a model's numbers is a .toml or a config.json",
        ),
        ("pp=2", Path("none.toml"), "h100", "none.toml: No such file or directory; possible are"),
        (None, "gpt2-xl", "h100", "plan None: must be a Plan, words such as"),
        ("pp=2 schedule=terapipe slices=99999", "gpt2-xl", "h100", "slices=99999: more than the 1024 tokens"),
    ],
)
def test_other_types_are_refused_in_words(plan: Any, model: Any, devices: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        estimate(plan, model, devices)


def test_an_example_is_of_a_torch_module() -> None:
    with pytest.raises(PlanError, match="model 'gpt2-xl': is no torch module, and needs no example="):
        estimate("", "gpt2-xl", "h100", example=object())


def test_the_command_prints_keys_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["estimate", GPT3, "--model", "gpt3-175b", "--hardware", "a100-80gb", "--nodes", "16", "--batch", "64"]
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"time", "tflops_per_gpu", "mfu", "memory", "breakdown"} <= set(found)
    assert found["batch"] == 64
    assert main(line) == 0
    assert "matrix products" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "tp=8 microbatches=4", "--model", "gpt3-175b", "--hardware", "a100-80gb", "--json"]) == 2
    told = capsys.readouterr().err
    assert "but a100-80gb has 84.99 GB; it fits devices of" in told
    found = estimate("tp=8 microbatches=4", "gpt3-175b", "a100-80gb")
    assert not found.fits
    way = smallest(found.numbers, found.model, found.machine)
    assert way is not None
    assert f"{way.ranks} devices of this kind, such as with {words(way)}" in told
    assert estimate(way, "gpt3-175b", "a100-80gb").fits
    found = estimate("dp=8", "llama2-7b", "a100-80gb", 64)
    ways = ways_of_numbers(found.numbers, found.model, found.machine)
    assert ways
    for change, size in ways:
        made = estimate(f"dp=8 {change}", "llama2-7b", "a100-80gb", 64)
        assert made.fits
        assert made.memory == size
        assert f"on as many devices it fits with {ways[0][0]} (" in way_out(found)
    assert main(["estimate", "", "--model", "gpt3-175b", "--hardware", "a100-80gb", "--nodes", "x"]) == 2
    capsys.readouterr()
    assert main(["estimate", "tp=8 dp=4", "--model", "gpt3-175b", "--hardware", "a100-80gb", "--nodes", "2"]) == 2
    assert "possible is dp=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "model", "batch", "by", "away"),
    [
        ("pp=2 microbatches=4", "gpt2-small", 8, "replica", 0.01),
        ("pp=4 microbatches=16 schedule=interleaved chunks=2", "gpt2-medium", 16, "replica", 0.02),
        ("pp=4 microbatches=8 schedule=zb-h1 checkpoint=selective", "gpt2-xl", 8, "replica", 0.03),
        ("dp=8 zero=3 microbatches=2", "llama3-8b", 16, "formula", 0.05),
        ("pp=4 microbatches=8 split=auto", "gpt2-small", 32, "replica", 0.03),
    ],
)
def test_the_simulated_program_is_near_the_estimate_and_each_says_who_it_is(
    plan: str, model: str, batch: int, by: str, away: float
) -> None:
    found = estimate(plan, model, "a100-80gb", batch)
    assert found.by == by
    assert found.time == pytest.approx(whole(plan, model, "a100-80gb", batch).time, rel=away)
    assert estimate(plan, model, "a100-80gb", batch, simulate=True).by == "replica"
