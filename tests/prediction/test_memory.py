"""Memory predicted from one layer at a time, compared with the measured memory: every strategy, every rank."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from minipar import Plan, data, models, train
from minipar.cli import main
from minipar.costs.analytic import weight_costs
from minipar.execution.execution import Job, execute, profile_job
from minipar.models.sizes import sizes
from minipar.prediction.memory import with_memory
from minipar.prediction.on_paper import per_rank
from minipar.prediction.program_costs import ProgramCosts, microbatch_rows
from minipar.prediction.rank_memory import KINDS
from minipar.prediction.recorded import Workspace
from minipar.prediction.simulator import simulate
from minipar.trace import Trace
from minipar.trace.memory_series import Series
from tests.toys import toy

pytestmark = pytest.mark.many(6)

ADAM = partial(torch.optim.AdamW, lr=1e-3)


def peaks_by_instruction(series: Series) -> dict[int, int]:
    """The highest live bytes during each instruction that changed anything."""
    found: dict[int, int] = {}
    for index, total in zip(series.indices, series.totals()[1:], strict=True):
        found[index] = max(found.get(index, 0), total)
    return found


def compare(clusters, name: str, text: str, optimizer=ADAM, batch: int = 17) -> tuple[Trace, Trace]:
    """Predicted and measured, of a batch that does not split evenly."""
    plan = Plan.parse(text)
    cluster = clusters(plan.ranks)
    job = Job(partial(models.build, name), data.for_model(name), batch, optimizer=optimizer)
    rows = microbatch_rows(batch, plan.dp, plan.total_microbatches)
    (facts,) = cluster.run_on([0], profile_job, job, rows, True, plan, plan.splits)
    program = plan.compile(facts.shape, costs=facts.profile)
    costs = ProgramCosts(program, facts.profile, batch)
    measured = execute(program, job, cluster=cluster, passes=2, memory=True, keep_gradients=False).trace
    predicted = simulate(program, costs)
    shares = [Trace(program, predicted.starts, predicted.ends, costs.size, data=measured.data)]
    return with_memory(shares[0], facts.tapes, costs), measured


@pytest.mark.parametrize(
    "text",
    ["pp=2 dp=2 zero=2", "pp=2 microbatches=4 schedule=zb-h1", "pp=2 checkpoint=1"],
)  # fmt: skip
def test_branches(clusters, text):
    """Outputs that several layers read, the sums of their gradients, and joins of several inputs."""
    run = train(partial(models.build, "branchy"), data.for_model("branchy"), text, steps=3, batch=17, optimizer=ADAM,
                memory=True, cluster=clusters(Plan.parse(text).ranks), progress=False)  # fmt: skip
    for got, expected in zip(run.memory, run.predicted.peak_memory(), strict=True):
        assert got.bytes == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("text", ["pp=2 microbatches=4 schedule=zb-v"])
def test_so_is_every_instruction_and_every_kind(clusters, text):
    """Not only the highest moment: a prediction that is right by luck would not be right everywhere."""
    predicted, measured = compare(clusters, "gpt-tiny", text)
    for mine, real in zip(predicted.series, measured.series, strict=True):
        levels = peaks_by_instruction(mine)
        for index, level in peaks_by_instruction(real).items():
            assert levels.get(index, level) == pytest.approx(level, rel=0.01)
        for kind, size in real.peak().by_kind.items():
            assert mine.peak().by_kind[kind] == pytest.approx(size, rel=0.01, abs=1024)
        assert mine.peak().index == real.peak().index
        assert abs(mine.totals()[-1] - mine.at_start) < 1024, "a step leaves nothing"


def test_temporaries_matter(clusters):
    """What the lifetimes of values alone would say is too little: that is why there are tapes."""
    predicted, measured = compare(clusters, "mlp-tiny", "dp=2 microbatches=2")
    values = Trace(predicted.program, predicted.starts, predicted.ends, predicted.size, data=predicted.data)
    for derived, real in zip(values.peak_memory(), measured.peak_memory(), strict=True):
        assert derived < 0.9 * real


def test_workspace_of_a_step():
    one_by_one = Workspace((10, 30, 20), {(0, 1): 35, (1, 2): 40}, 40)
    assert one_by_one.of([0]) == 10
    assert one_by_one.of([0, 1]) == 35
    assert one_by_one.of([0, 1, 2]) == 40
    assert one_by_one.of([]) == 0
    all_at_once = Workspace((10, 30, 20), {(0, 1): 40, (1, 2): 50}, 60)
    assert all_at_once.of([1, 2]) == 50


def wide() -> torch.nn.Sequential:
    layers = (layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU()))
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(
    "text",
    [
        "dp=2 local_steps=2",
        "dp=2 compress=topk:0.5",
        "dp=2 compress=topk:0.2 bucket=0.3",
        "dp=2 compress=powersgd:64",
        "dp=2 compress=bf16 bucket=none overlap=none",
    ],
)
def test_averages_and_compressed_sums(clusters, text):
    """Copies of parameters, residuals, numbers and their places, factors: all that a sum needs besides gradients."""
    rows = tuple(torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)))
    run = train(wide, rows, text, cluster=clusters(2), steps=4, batch=64, loss=torch.nn.functional.mse_loss,
                optimizer=ADAM, memory=True, progress=False)  # fmt: skip
    for got, expected in zip(run.memory, run.predicted.peak_memory(), strict=True):
        assert got.bytes == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("dp=2 overlap=priority bucket=none", 1e-3),
        ("dp=2 overlap=priority offload=optimizer", 1e-2),
        ("dp=2 zero=1 precision=bf16", 1e-3),
        ("dp=2 zero=1 precision=bf16 offload=optimizer", 1e-3),
    ],
)
def test_updates_layer_by_layer_and_in_bfloat16(clusters, text, bound):
    """A STEP of one layer among layers without parameters; rows as they were given; float32 slices are the
    optimizer's."""
    rows = tuple(torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)))
    run = train(wide, rows, text, cluster=clusters(2), steps=4, batch=64, loss=torch.nn.functional.mse_loss,
                optimizer=ADAM, memory=True, progress=False)  # fmt: skip
    for rank, expected in enumerate(run.predicted.peak_memory()):
        assert run.memory[rank].bytes == pytest.approx(expected, rel=bound)
        if "bf16" in text:
            mine, theirs = run.memory[rank].by_kind, run.predicted.peak_by_kind(rank)
            for kind in ("parameters", "optimizer", "data"):
                assert mine[kind] == pytest.approx(theirs[kind], rel=1e-3), kind


def test_gradients_are_not_copied_where_only_parameters_are_averaged(clusters):
    """No buffer for sums that there are not: local_steps costs no more than one replica alone."""
    rows = tuple(torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0)))
    peaks = [
        max(peak.by_kind["gradients"] + peak.by_kind["temporary"] for peak in run.memory)
        for text in ("dp=1", "dp=2 local_steps=2")
        for run in [train(wide, rows, text, cluster=clusters(Plan.parse(text).ranks), steps=4, batch=64,
                          loss=torch.nn.functional.mse_loss, optimizer=ADAM, memory=True, progress=False)]
    ]  # fmt: skip
    assert peaks[1] <= 1.01 * peaks[0]


def activations():
    """Layers without parameters between the others, one of them the first of its stage."""
    make = torch.nn.Linear, torch.nn.GELU, torch.nn.Tanh
    torch.manual_seed(0)
    return torch.nn.Sequential(*(make[k % 3](64, 64) if k % 3 == 0 else make[k % 3]() for k in range(13)))


@pytest.mark.parametrize("text", ["schedule=zb-h1 split=7,6", "schedule=zb-h1 split=8,5", "schedule=dualpipe"])
def test_what_weight_halves_hold_of_layers_before_them(clusters, text):
    rows = torch.randn(48, 64), torch.randn(48, 64)
    run = train(activations, rows, f"pp=2 microbatches=4 {text}", steps=3, batch=48, optimizer=ADAM, memory=True,
                loss=torch.nn.functional.mse_loss, cluster=clusters(2), progress=False)  # fmt: skip
    for got, expected in zip(run.memory, run.predicted.peak_memory(), strict=True):
        assert got.bytes == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("text", ["microbatches=2", "pp=2 microbatches=4 split=6,4"])
def test_of_several_tensors_a_graph_may_keep_one(clusters, text):
    """(tensor, (skip, counter)): backward frees the counter as the first thing, and the tensor when it has used it."""
    rows = tuple(torch.randn(2, 400, 16, generator=torch.Generator().manual_seed(0)))
    run = train(partial(toy, ("linear", "tuples", "linear", "tuples"), 16), rows, text, steps=3, batch=400, memory=True,
                loss=torch.nn.functional.mse_loss, optimizer=ADAM, progress=False,
                cluster=clusters(Plan.parse(text).ranks))  # fmt: skip
    for got, expected in zip(run.memory, run.predicted.peak_memory(), strict=True):
        assert got.bytes == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["gpt-tiny-tied", "gpt-moe-tiny"])
def test_the_formula_is_near_the_tapes(clusters, name):
    """What `minipar memory` and estimates count, and what `train` predicts: between the bytes that stay, and all bytes
    with those that a layer needs for a moment."""
    plans = [
        *("microbatches=3 accumulate=2", "dp=2 zero=1 microbatches=2", "dp=2 zero=2 microbatches=2"),
        *("dp=2 zero=3 microbatches=2", "pp=3 microbatches=8", "pp=3 microbatches=4 schedule=gpipe"),
        *("microbatches=4 checkpoint=2", "pp=2 microbatches=4 checkpoint=sqrt schedule=gpipe"),
        *("pp=2 microbatches=4 schedule=interleaved", "pp=2 microbatches=4 schedule=chimera"),
        *("pp=2 microbatches=4 split=1,5", "pp=2 dp=2 microbatches=2 bucket=none zero=2"),
    ]
    job = Job(partial(models.build, name), data.for_model(name), 24, loss=models.loss_of(name), optimizer=ADAM)
    counts = {n for plan in map(Plan.parse, plans) for n in microbatch_rows(24, plan.dp, plan.total_microbatches)}
    (facts,) = clusters(1).run_on([0], profile_job, job, tuple(sorted(counts)), True, Plan(), False)
    for plan in map(Plan.parse, plans):
        program = plan.compile(facts.shape, costs=facts.profile)
        costs = ProgramCosts(program, facts.profile, 24)
        tapes = with_memory(simulate(program, costs), facts.tapes, costs)
        for formula, series in zip(per_rank(plan, name, 24), tapes.series, strict=True):
            found = series.peak().by_kind
            stays = sum(size for kind, size in found.items() if kind not in ("data", "temporary"))
            # (Buffers of sharding are counted as if the largest ones met at the peak.)
            apart = max(0, formula.buffers - found["buffers"]) if plan.zero >= 2 else 0
            assert 0.98 * stays <= formula.total <= 1.12 * (stays + found["temporary"]) + apart, plan
            assert found["optimizer"] == pytest.approx(formula.optimizer, rel=0.01)
            assert found["gradients"] <= 1.3 * formula.gradients


@pytest.mark.parametrize("name", ["gpt-tiny-tied", "gpt-tiny-dropout", "gpt-moe-tiny", "mlp-wide"])
def test_the_formula_of_backwards_in_halves_is_near_the_tapes(clusters, name):
    """Between the halves wait the inputs of matrices and norms, and the gradients of their outputs. (Of so many rows
    that no tensors are short enough to go in one message, which would hold them all as long as one is needed.)"""
    plans = [
        *("pp=2 schedule=zb-h1", "pp=3 schedule=zb-h1", "pp=2 schedule=zb-h2", "pp=3 schedule=zb-h2"),
        *("pp=2 schedule=zb-v", "pp=3 schedule=zb-v", "pp=2 schedule=dualpipe", "pp=2 schedule=dualpipe-v"),
        *("pp=2 schedule=zb-h1 checkpoint=1", "pp=2 schedule=zb-h1 checkpoint=2"),
    ]
    job = Job(partial(models.build, name), data.for_model(name), 192, loss=models.loss_of(name), optimizer=ADAM)
    (facts,) = clusters(1).run_on([0], profile_job, job, (24,), True, Plan(), True)
    kept = weight_costs(sizes(name), 24, 4)[1]
    assert list(kept) == pytest.approx(facts.profile.saved_weight_bytes[24], rel=1e-3)
    for plan in (Plan.parse(f"{words} microbatches=8") for words in plans):
        program = plan.compile(facts.shape, costs=facts.profile)
        costs = ProgramCosts(program, facts.profile, 192)
        tapes = with_memory(simulate(program, costs), facts.tapes, costs)
        for formula, series in zip(per_rank(plan, name, 192), tapes.series, strict=True):
            found = series.peak().by_kind
            stays = sum(size for kind, size in found.items() if kind not in ("data", "temporary"))
            assert 0.98 * stays <= formula.total <= 1.05 * (stays + found["temporary"]), plan


@pytest.mark.parametrize(
    ("name", "text"),
    [("gpt-tiny", "pp=2 schedule=terapipe"), ("gpt-tiny", "pp=2 place=0,1,0,1,0,1 microbatches=2"),
     ("branchy", "pp=2 place=branches")],
)  # fmt: skip
def test_the_command_answers_from_the_program_where_there_is_no_formula(clusters, capsys, name, text):
    assert main(["memory", text, "--model", name, "--batch", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["per_rank"]
    run = train(partial(models.build, name), data.for_model(name), text, cluster=clusters(2), steps=3, batch=8,
                loss=models.loss_of(name), optimizer=ADAM, memory=True, progress=False)  # fmt: skip
    for mine, real, kinds in zip(told, run.memory, map(run.trace.peak_by_kind, range(2)), strict=True):
        assert mine["total"] == sum(mine[kind] for kind in KINDS)
        assert mine["total"] == pytest.approx(real.bytes - kinds.get("data", 0), rel=0.02)


def test_the_command_says_for_which_models_it_can_build_a_program(capsys):
    assert main(["memory", "pp=2 schedule=terapipe", "--model", "gpt2-xl"]) == 2
    assert "possible are `minipar memory` of a model that can be built (gpt-tiny, " in capsys.readouterr().err
