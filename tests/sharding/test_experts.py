"""Experts on real ranks: gradients of plain torch, collectives by number and bytes, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minipar import data, models, train
from minipar.cli import main
from minipar.errors import PlanError, RankError
from minipar.models.mixture_gpt import route
from minipar.program import Op, Program
from minipar.sharding import check_rule
from minipar.sharding.propagation import experts
from minipar.sharding.sharded import local_model
from minipar.training.training import Run, resume
from tests.conftest import Clusters

SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "context": 12, "experts": 4}
MODEL = partial(models.build, "gpt-moe-tiny", **SIZES)
TEXT = data.for_model("gpt-moe-tiny", **SIZES)


def run_of(clusters: Clusters, plan: str, ranks: int, **options: Any) -> Run:
    options = {"loss": models.mixture_loss, "dtype": torch.float64, "batch": 16, "steps": 2, **options}
    return train(MODEL, TEXT, plan, cluster=clusters(ranks), check=True, progress=False, **options)


def exchanged(program: Program) -> Counter[str]:
    """All-to-alls of rank 0, by what they exchange."""
    return Counter(ins.reads[0].kind for ins in program.ranks[0] if ins.op is Op.ALL_TO_ALL)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rules(ranks: int) -> None:
    torch.manual_seed(0)
    scores, x, made = torch.randn(4, 5, 8), torch.randn(4, 5, 8), torch.randn(8, 4, 8)
    weights, slots, _ = route(scores, 2, 1)
    assert (slots < 0).any()  # so that dropping is part of what is compared
    operators = torch.ops.minipar
    found = [
        [str(choice) for choice in check_rule(call.default, *given, ranks=ranks)]
        for call, given in (
            (operators.route, (scores, 2, 1)),
            (operators.dispatch, (x, slots, 8, 1)),
            (operators.combine, (made, weights, slots)),
        )
    ]
    assert found[0] == ["S0 -> S0,S0,S0", "I -> I,I,I"]
    assert found[1] == ["S0,S0 -> S1", "S2,R -> S2", "P,R -> P", "I,I -> I"]
    assert found[2] == ["S1,S0,S0 -> S0", "S2,R,R -> S2", "P,R,R -> P", "R,P,R -> P", "I,I,I -> I"]


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("ep=2", 2),
        ("ep=4", 4),
        ("ep=2 microbatches=2", 2),
        ("ep=2 dp=2", 4),
        ("ep=2 dp=2 zero=3", 4),
        ("ep=2 pp=2 microbatches=4", 4),
        ("ep=2 checkpoint=1", 2),
        ("ep=2 dp=2 zero=1 clip=0.5", 4),
        ("ep=2 pp=2 schedule=interleaved chunks=2 microbatches=4", 4),
        ("tp=2", 2),
        ("tp=2 sequence_parallel=true", 2),
        ("context_parallel=2", 2),
        ("pp=2 microbatches=2", 2),
    ],
)
def test_gradients_are_those_of_plain_torch(clusters: Clusters, plan: str, ranks: int) -> None:
    run = run_of(clusters, plan, ranks)
    assert run.max_gradient_error() < 1e-10
    assert run.max_parameter_error() < 1e-10
    assert run.losses == pytest.approx(run.reference.losses, rel=1e-12)


def test_two_all_to_alls_a_layer_and_direction(clusters: Clusters) -> None:
    run = run_of(clusters, "ep=2 microbatches=2", 2, steps=1)
    layers, microbatches = 2, 2
    assert exchanged(run.program) == {"output": 2 * layers * microbatches, "grad_output": 2 * layers * microbatches}
    # Each sends half of its queues: experts * places * rows of its own * width, of 8 bytes.
    queues = 4 * models.preset("gpt-moe-tiny", **SIZES).room * (16 // microbatches // 2) * 16 * 8
    for trace in (run.predicted, run.trace):
        assert {trace.sent(0, ins) for ins in run.program.ranks[0] if ins.op is Op.ALL_TO_ALL} == {queues // 2}


def test_targets_that_do_not_count(clusters: Clusters) -> None:
    x, y = TEXT.batch(0, 16)
    y = y.clone()
    y[1, 3:], y[9, 1:], y[10:12] = -100, -100, -100
    for plan in ("ep=2 microbatches=2", "ep=2 dp=2"):
        run = train(
            MODEL, (x, y), plan, cluster=clusters(2 if "dp" not in plan else 4), check=True, progress=False, steps=1,
            loss=models.mixture_loss, dtype=torch.float64,
        )  # fmt: skip
        assert run.max_gradient_error() < 1e-10


def test_the_balance_loss_is_part_of_the_gradient(clusters: Clusters) -> None:
    without = run_of(clusters, "ep=2", 2, steps=1, loss=partial(models.mixture_loss, balance=0.0))
    heavy = run_of(clusters, "ep=2", 2, steps=1, loss=partial(models.mixture_loss, balance=10.0))
    assert heavy.losses[0] > without.losses[0] + 10
    assert heavy.max_gradient_error() < 1e-10


def test_a_run_goes_on_with_another_ep(clusters: Clusters, tmp_path: Path) -> None:
    options: dict[str, Any] = {"loss": models.mixture_loss, "dtype": torch.float64, "progress": False}
    whole = train(MODEL, TEXT, "", cluster=clusters(1), steps=4, batch=16, **options)
    train(MODEL, TEXT, "ep=2", cluster=clusters(2), steps=2, batch=16, save=tmp_path, **options)
    rest = resume(tmp_path, MODEL, TEXT, "ep=4", cluster=clusters(4), steps=2, **options)
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-12)


def test_memory_is_followed(clusters: Clusters) -> None:
    run = run_of(clusters, "ep=2", 2, memory=True)
    assert run.predicted.peak_memory() == pytest.approx(run.trace.peak_memory(), rel=0.25)


def test_each_rank_has_its_experts_only() -> None:
    x, _ = TEXT.batch(0, 4)
    whole = MODEL()
    for index in range(2):
        shared = local_model(whole, index, 2, x, experts("ep"), "S0")
        held = dict(shared.named_parameters())
        for layer in (1, 2):
            for name in ("up", "down"):
                key = f"{layer}.mixture.experts.{name}"
                mine = dict(whole.named_parameters())[key].chunk(2)[index]
                assert torch.equal(held[key], mine)
        assert held["1.mixture.gate.weight"].shape == (4, 16)


def test_the_command_line_shows_two_all_to_alls_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", "--model", "gpt-moe-tiny", "--mesh", "ep=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    exchanges = [one for one in found["collectives"] if one["op"] == "all_to_all"]
    assert Counter(one["phase"] for one in exchanges) == {"forward": 2 * 4, "backward": 2 * 4}
    assert {one["axis"] for one in exchanges} == {"ep"}
    assert not any(row["state"] == "whole" for row in found["coverage"])


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        (
            "gpt-tiny",
            "ep=2",
            r"ep=2: the model has no experts \(\*.experts.up\); possible are dp=2 or a mixture such as",
        ),
        ("gpt-moe-tiny", "ep=3", "ep=3: must divide the 8 experts of 1.mixture.experts.up; possible are 1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_divided(clusters: Clusters, name: str, plan: str, message: str) -> None:
    with pytest.raises((PlanError, RankError), match=message):
        train(
            partial(models.build, name), data.for_model(name), plan, cluster=clusters(int(plan[-1])), batch=6, steps=1,
            loss=models.loss_of(name), progress=False,
        )  # fmt: skip
