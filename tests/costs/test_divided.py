"""Costs of tensor and expert parallelism: Korthikanti's table 2, and parts that add up to the whole model."""

from __future__ import annotations

import pytest

from minipar.costs import analytic
from minipar.costs.analytic import WHOLE, Division
from minipar.errors import PlanError
from minipar.models import shapes, table
from minipar.models.table import GPT
from minipar.prediction.memory_formula import per_rank
from minipar.strategies.plan import Plan


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


def test_experts_are_divided_among_replicas() -> None:
    gpt = table.numbers("gpt2-small")
    assert isinstance(gpt, GPT)
    h, mlp = gpt.width, 8 * gpt.width**2 + 5 * gpt.width
    dense = sum(sum(g.tensors) for g in analytic.groups(gpt, WHOLE)[0])
    groups, experts = analytic.groups(gpt, Division(experts=8, ep=4))
    assert experts == gpt.layers
    assert sum(sum(g.tensors) for g in groups) == dense + gpt.layers * (mlp * (8 // 4 - 1) + 8 * h)
    plan = Plan.parse("dp=8 zero=1 precision=bf16")
    states = [per_rank(plan, "gpt2-small", 8, Division(experts=8, ep=ep))[0] for ep in (1, 2, 8)]
    assert states[0].parameters > states[1].parameters > states[2].parameters
    # With one expert on each rank nobody shares its optimizer state, which is as large as it is in a dense model of it.
    whole = 12 * gpt.layers * mlp
    shared = dense - gpt.layers * mlp + gpt.layers * 8 * h
    assert states[2].optimizer == pytest.approx(whole + 12 * shared / 8, rel=1e-5)


def test_a_token_s_experts_keep_what_one_mlp_does_each() -> None:
    one, two = (analytic.layer_costs("gpt2-small", 1, 2, division=Division(experts=4, top=k)).saved[1] for k in (1, 2))
    size = 1024 * 768
    assert two - one == 8 * 2 * size + 2 * size
    assert analytic.layer_costs("gpt2-small", 1, 2, division=Division(experts=4, top=2)).forward[1] == pytest.approx(
        analytic.layer_costs("gpt2-small", 1, 2).forward[1] + 16 * size * 768 + 2 * size * 4  # (the router)
    )


@pytest.mark.parametrize(
    ("division", "model", "says"),
    [
        (Division(tp=5), "gpt2-small", "tp=5: must divide 12 heads; possible are 1, 2, 3, 4, 6, 12"),
        (Division(tp=0), "gpt2-small", "tp=0: must be a whole number of at least 1"),
        (Division(ep=2), "gpt2-small", "ep=2: there are no experts to share out"),
        (Division(experts=8, ep=3), "gpt2-small", "ep=3: must divide dp=4 and experts=8; possible are 1, 2, 4"),
        (Division(experts=4, top=5), "gpt2-small", "top=5: a token goes to at most 4 experts"),
        (Division(tp=2), "mlp-tiny", "tp and ep: formulas are for transformers"),
    ],
)
def test_what_cannot_be_is_refused(division: Division, model: str, says: str) -> None:
    with pytest.raises(PlanError, match=says.replace("(", r"\(")):
        per_rank(Plan(dp=4), model, 4, division)
