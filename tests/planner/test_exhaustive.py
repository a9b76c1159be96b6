"""The search over plans: nothing that bounds leave out is faster, and what does not fit says what would. What
it found runs.
"""

import json
from dataclasses import replace
from time import process_time

import pytest
import torch
from torch import nn

from minipar import models, sharding, train
from minipar.cli import main
from minipar.costs.hardware import hardware
from minipar.errors import PlanError
from minipar.models.sizes import sizes
from minipar.planner.exhaustive import search, solve
from minipar.planner.forms_found import operator_problem
from minipar.planner.intra import ilp
from minipar.planner.operator_graph import Machine
from minipar.planner.planned import difference
from minipar.planner.reasons import advice
from minipar.planner.space import space
from minipar.planner.way_out import smallest
from minipar.prediction.closed_form import closed_form
from minipar.prediction.estimating import estimate
from minipar.prediction.plan_words import check, refusal, table_of, words
from minipar.program.mesh import Mesh
from minipar.strategies import keys
from minipar.strategies.plan import Plan


def every(where):
    """All plans of a space that can be and fit, each by its formula: what the search must not miss."""
    found = []
    for outer in where.outer():
        for plain in where.inner(outer):
            for numbers in (plain, *where.offloaded(plain)):
                try:
                    check(numbers, where.model, where.machine)
                    cost = closed_form(numbers, where.model, where.machine)
                except PlanError:
                    continue
                if cost.memory <= where.machine.memory:
                    found.append(cost.time)
    return sorted(found)


@pytest.mark.parametrize(
    ("model", "device", "nodes", "batch", "pins"),
    [
        ("megatron-7.5b", "a100-40gb", 2, 32, "micro_batch_size=1 sequence_parallel=true"),
        ("llama3-8b", "h100", 1, 16, "checkpoint=none"),
        ("mixtral-8x7b", "a100-80gb", 2, 32, "micro_batch_size=2 checkpoint=1 schedule=1f1b"),
        ("resnet-50", "v100", 1, 64, "zero=1"),
    ],
)
def test_no_plan_of_the_space_is_faster(model, device, nodes, batch, pins):
    where = space(sizes(model), replace(hardware(device), nodes=nodes), batch, pins)
    all_of_them = every(where)
    found = solve(where, most=3, simulate=False)
    assert found.plan.time == pytest.approx(all_of_them[0], rel=1e-12)
    assert found.searched >= len(all_of_them)
    assert found.tried < 2 * found.searched
    assert [one.time for one in found.best] == sorted(one.time for one in found.best)


@pytest.fixture(scope="module")
def gpt3():
    began = process_time()
    found = search("gpt3-175b", "a100-80gb", 128, 8, 1536)
    return found, process_time() - began


def test_gpt3_on_1024_gpus(gpt3):
    found, seconds = gpt3
    assert seconds < 10
    assert len(found.best) == 20
    assert found.searched > 50_000
    best = found.plan
    assert best.numbers.ranks == 1024
    assert best.numbers.batch == 1536
    assert best.memory <= 80e9
    assert best.numbers.tp <= 8, "layers are shared inside nodes"
    assert 100 < best.tflops_per_gpu < 250
    published = estimate("tp=8 pp=8 dp=16 micro_batch_size=1 checkpoint=1", "gpt3-175b", "a100-80gb", 1536, nodes=128)
    assert best.time < published.time
    assert any("does not fit" in reason for reason in best.reasons)
    assert "Data parallel does not suffice" in advice(best, found.space)
    assert str(found).startswith("all plans: ")
    assert found._repr_html_().count("<tr>") == 21


def test_the_words_of_a_plan_are_an_estimate(gpt3):
    for one in gpt3[0].best[:3]:
        again = estimate(one.words, "gpt3-175b", "a100-80gb", 1536, nodes=128)
        assert again.time == pytest.approx(one.time)
        assert again.memory == one.memory


def test_pin_explain_difference_and_front():
    found = search("megatron-7.5b", "a100-80gb", 2, 8, 64, pins="sequence_parallel=true schedule=1f1b")
    other = found.pin("tp=8")
    assert other.plan.numbers.tp == 8
    assert other.plan.time >= found.plan.time
    told = found.explain("tp")
    assert told.rows[0].plan.time == pytest.approx(found.plan.time)
    assert {row.value for row in told.rows} == {"1", "2", "4", "8", "16"} or len(told.rows) >= 3
    fastest = min(one.cost.time for one in other.best)
    assert next(row for row in told.rows if row.value == "8").plan.time == pytest.approx(fastest)
    apart = difference(found.plan, other.plan)
    assert found.difference(other.plan) == apart == found.difference(other.plan.words)
    assert sum(apart.seconds.values()) == pytest.approx(other.plan.cost.time - found.plan.cost.time)
    assert any(key == "tp" for key, _, _ in apart.keys) == (found.plan.numbers.tp != 8)
    plans = found.front(4)
    assert [p.memory for p in plans] == sorted(p.memory for p in plans)
    assert [p.time for p in plans] == sorted((p.time for p in plans), reverse=True)
    assert plans[0].memory == smallest(found.space).memory


def test_the_space_follows_the_table_of_keys():
    """Whether the search takes a plan of the space for one that minipar runs is what compiling it says."""
    where = space(sizes("gpt-demo"), replace(hardware("laptop"), nodes=1, per_node=8), 64)
    outer = next(one for one in where.outer() if (one.pp, one.tp, one.ep, one.cp, one.microbatches) == (2, 1, 1, 1, 4))
    outcomes = set()
    for plain in (one for one in where.inner(outer) if one.every):
        for numbers in (plain, *where.offloaded(plain)):
            table = keys.words(words(numbers))
            try:
                Plan.parse({key: value for key, value in table.items() if key != "micro_batch_size"}).compile(layers=12)
                runs = True
            except PlanError:
                runs = False
            try:
                check(numbers, where.model)
                found = refusal(table_of(words(numbers)), numbers) == ""
            except PlanError:
                found = False
            assert found == runs, words(numbers)
            outcomes.add((numbers.schedule, numbers.zero, numbers.offload, runs))
    assert ("zb-h1", 1, ("activations", "optimizer"), True) in outcomes


def test_what_is_too_large_for_a_single_device_names_what_it_needs():
    with pytest.raises(PlanError, match=r"on 1 device: no plan fits in 79.85 GB; the smallest needs .* GB .*nodes="):
        search("llama3-70b", "h100", 1, 1, 64)


def test_an_impossible_budget_names_what_would_do():
    with pytest.raises(
        PlanError, match=r"no plan fits in 1 GB; the smallest needs .* GB .*possible is a budget"
    ) as told:
        search("megatron-7.5b", "a100-80gb", 1, 8, 16, memory=10**9)
    assert "nodes=" in str(told.value)
    need = float(str(told.value).split("the smallest needs ")[1].split(" GB")[0])
    found = search("megatron-7.5b", "a100-80gb", 1, 8, 16, memory=int((need + 0.01) * 1e9), most=1)
    assert found.plan.memory <= (need + 0.01) * 1e9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search("gpt3-175x", "a100-80gb", 1), "no such preset; there are .*gpt3-175b"),
        (lambda: search("gpt3-175b", "a1000", 1), "no such preset; there are .*a100-80gb"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="tq=8"), "plan key 'tq': unknown"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="tp"), "must be key=value"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="zero=4"), "zero=4"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="schedule=1f1b chunks=5"), "chunks=5: .*possible are 1$"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="chunks=5"), "chunks=5: .*possible are 1, 2, 3, 4, 6, 7$"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="tp=2 tp=4"), "'tp': given twice"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="dp=3"), "dp=3: no plan .* possible are dp=1, 2, 4, 8$"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="tp=8"), "tp=8: no plan .* possible are tp=1, 2, 4$"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="tp=4 pp=4"), "tp=4: .* with pp=4 .* are tp=1, 2$"),
        (lambda: search("gpt2-small", "h100", 1, 1, 8, pins="zero=2"), "zero=2: .* on 1 device .* is zero=0$"),
        (
            lambda: search("gpt2-small", "h100", 1, 13, 64),
            "batch=64 on 13 .*; possible are batch=52, batch=65, gpus-per-node=12$",
        ),
        (lambda: search("gpt2-small", "h100", 1, 8, 10**10), "batch=10000000000: .* to 1000000000"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8, pins="checkpoint=sqrt"), "checkpoint=sqrt: .* none, selective"),
        (lambda: search("gpt2-small", "h100", 1, 8, 8).explain("bucket"), "is not searched; possible are"),
        (lambda: search("gpt2-small", "h100", 0, 8, 8), "nodes=0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(PlanError, match=message):
        call()


def test_the_command_line(capsys):
    words = ["plan", "--model", "gpt2-small", "--hardware", "a100-80gb", "--nodes", "1", "--batch", "64"]
    assert main([*words, "--best", "3", "--explain", "tp", "--front", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) >= {"best", "searched", "seconds"}
    assert len(told["best"]) == 3
    assert set(told["best"][0]) == {"plan", "time", "tflops_per_gpu", "memory", "reasons"}
    assert isinstance(told["best"][0]["memory"], int)
    assert {row["value"] for row in told["explain"]} >= {"1", "2", "4"}
    assert main([*words, "--diff", "tp=2 zero=1 micro_batch_size=4", "--json"]) == 0
    apart = json.loads(capsys.readouterr().out)["diff"]
    assert ["tp", "", "2"] in apart["keys"]
    assert apart["seconds"]["collectives of shared layers"] > 0
    assert main([*words, "--diff", "tp=5"]) == 2
    assert "1 node of 8 are 8; possible is tp, pp, context_parallel and ep that divide 8" in capsys.readouterr().err
    assert main([*words, "--pin", "tp=2"]) == 0
    assert "tp=2" in capsys.readouterr().out
    assert main([*words, "--memory", "1MB"]) == 2
    assert "no plan fits" in capsys.readouterr().err
    assert main(["plan", "--model", "nope", "--hardware", "h100", "--batch", "8"]) == 2
    assert "there are" in capsys.readouterr().err


def test_the_table_is_readable_at_100_columns() -> None:
    found = search("gpt3-175b", "a100-80gb", nodes=16, batch=512, most=5, pins="sequence_parallel=true")
    text = str(found).splitlines()
    table = text[: text.index("")]
    assert max(map(len, table)) <= 100
    assert table[0].startswith("all plans: ")
    assert "\n".join(table).count("precision=bf16") == 1, "shared words stand above the plans"


def test_too_many_devices_are_refused_at_once() -> None:
    with pytest.raises(PlanError, match=r"nodes=99999999999: .* possible are 1 to 131072"):
        search("gpt3-175b", "a100-80gb", nodes=99999999999, batch=64)


def test_a_pin_is_remembered_and_may_have_commas() -> None:
    found = search("gpt2-small", "a100-80gb", 1, 8, 64, pins="pp=2, chunks=2,schedule=interleaved", most=1)
    assert dict(found.space.pins) == {"pp": "2", "chunks": "2", "schedule": "interleaved"}
    assert found.plan.numbers.chunks == 2
    other = found.pin("chunks=3")
    assert other.plan.numbers.chunks == 3
    assert other.space.pins["chunks"] == "3"
    waits = search("gpt2-small", "a100-80gb", 1, 8, 64, pins="micro_batch_size=8 offload=activations,optimizer", most=1)
    assert waits.plan.numbers.offload == ("activations", "optimizer")
    assert any("on the host; otherwise the plan takes -" in reason for reason in waits.plan.reasons), "nobody needs it"


def test_alternatives_are_formulas_beside_formulas() -> None:
    """Stages that differ are simulated; alternatives of the best plan are not. What has no formula is not searched."""
    with pytest.raises(PlanError, match=r"schedule=zb-v: its time has no formula.*possible are gpipe, .*1f1b"):
        search("gpt2-small", "a100-80gb", 1, 8, 64, pins="schedule=zb-v")
    found = search("gpt2-small", "a100-80gb", 1, 8, 64, pins="pp=8 tp=1")
    assert found.plan.simulated is not None
    told = found.explain("micro_batch_size")
    for row in told.rows:
        if row.plan is not None:
            assert row.plan.simulated is None
            assert row.slower == pytest.approx(row.plan.cost.time / found.plan.cost.time - 1)
    assert f"{found.plan.cost.time:.4g} s, and {found.plan.time:.4g} s where it is simulated" in str(told)


def test_what_is_not_possible_says_why() -> None:
    found = search("gpt2-small", "a100-80gb", 2, 7, 64, most=1)
    told = advice(found.plan, found.space)
    assert "14 replicas cannot divide a batch of 64 evenly; possible is batch=56 or 70" in told
    held = search("gpt2-small", "a100-80gb", 1, 8, 64, pins="pp=2", most=1)
    assert "Data parallel would suffice" in advice(held.plan, held.space)
    assert "Beside this plan it takes -" in advice(held.plan, held.space)


# What a search found runs ---------------------------------------------------------------------------------------------


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def test_the_forms_of_the_linear_program_are_trained(clusters):
    captured = sharding.capture_model(model(), torch.zeros(12, 8))
    machine = Machine(1e9, 1e9, {"tp": (1e-6, 1e-10)})
    problem = operator_problem(captured.layers, Mesh(tp=2), machine, gathered=False, outputs="R")
    found = ilp(problem.graph)
    assert found.time < problem.propagated().time
    said = problem.annotations(found)
    assert len(set(said.values())) > 2, "forms of several kinds"
    torch.manual_seed(0)
    x, y = torch.randn(12, 8), torch.randn(12, 4)
    run = train(
        model, (x, y), "tp=2", steps=2, batch=12, loss=nn.functional.mse_loss, dtype=torch.float64, check=True,
        annotations=said, progress=False, cluster=clusters(2),
    )  # fmt: skip
    assert run.max_error() < 1e-12
    assert run.predicted.time > 0 < run.trace.time, "predicted beside measured"


def test_a_plan_of_the_search_is_trained(clusters):
    found = search("mlp-tiny", "laptop", 1, 2, 8, runs=True, most=3, pins="pp=2 micro_batch_size=2 zero=0")
    plan = found.plan.plan
    assert plan.ranks == 2
    x = torch.randn(8, 32)
    with torch.no_grad():
        y = torch.randn_like(models.build("mlp-tiny")(x))
    run = train(
        lambda: models.build("mlp-tiny"), (x, y), plan, steps=1, batch=8, loss=nn.functional.mse_loss,
        dtype=torch.float64, check=True, progress=False, cluster=clusters(2),
    )  # fmt: skip
    assert run.max_error() < 1e-12
