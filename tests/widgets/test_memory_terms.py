"""The formulas of a rank's memory with numbers give its bytes, and what is said to fit does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from minipar.costs.analytic import Division
from minipar.models.sizes import Transformer, sizes
from minipar.prediction.on_paper import details, per_rank
from minipar.prediction.rank_memory import KINDS
from minipar.strategies.plan import Plan
from minipar_widgets.memory_terms import Term, terms, verdict, ways_that_fit

PLANS = [
    ("", "gpt-tiny", 1),
    ("dp=4 zero=1 microbatches=2 precision=bf16", "gpt2-small", 2),
    ("dp=4 zero=2 pp=2 microbatches=4", "gpt-tiny-tied", 2),
    ("dp=3 zero=3 microbatches=2 precision=bf16 checkpoint=sqrt", "gpt2-medium", 1),
    ("pp=4 microbatches=8 schedule=zb-v", "gpt2-small", 1),
    ("pp=4 microbatches=8 schedule=chimera checkpoint=1", "gpt2-small", 1),
    ("pp=3 microbatches=4 schedule=pipedream", "gpt-tiny", 1),
    ("microbatches=2 offload=optimizer,activations", "gpt2-small", 1),
    ("dp=2 zero=3 offload=parameters", "gpt-tiny", 4),
    ("checkpoint=selective precision=bf16", "megatron-1.7b", 1),
]


def value(term: Term) -> float:
    """What the filled-in formula comes to."""
    text = term.filled.replace(",", "").replace("×", "*").replace("÷", "/")
    for unit, whole in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)):
        text = re.sub(rf"(\d) {unit}\b", rf"\1*{whole}", text)
    assert re.fullmatch(r"[\d.*/+() ]+", text), text
    return float(eval(text))


@pytest.mark.parametrize(("words", "model", "rows"), PLANS)
def test_formulas_with_numbers_give_the_bytes(words: str, model: str, rows: int) -> None:
    plan = Plan.parse(words)
    for detail in details(plan, model, plan.dp * plan.total_microbatches * rows):
        found = terms(plan, detail)
        assert [term.kind for term in found] == list(KINDS)
        assert sum(term.bytes for term in found) == detail.memory.total
        for term in found:
            assert term.bytes == getattr(detail.memory, term.kind)
            # (sizes are printed with two digits, shards are rounded up)
            assert value(term) == pytest.approx(term.bytes, rel=0.006, abs=2048), (term, words)


@pytest.mark.parametrize(("division", "experts"), [(Division(tp=4), 0), (Division(2, True, ep=2), 4)])
def test_formulas_of_tensor_and_expert_parallelism(division: Division, experts: int) -> None:
    plan, model = Plan.parse("dp=4 pp=2 microbatches=4 zero=1 precision=bf16"), sizes("gpt2-medium")
    assert isinstance(model, Transformer)
    for detail in details(plan, replace(model, experts=experts, top=2), 32, division):
        for term in terms(plan, detail):
            assert value(term) == pytest.approx(term.bytes, rel=0.006, abs=4096), term


def test_ways_that_fit_do() -> None:
    plan, model, capacity = Plan.parse("dp=8 pp=4 microbatches=8 zero=1 precision=bf16"), "megatron-18b", 50 * 10**9
    batch = 8 * 8
    assert max(rank.total for rank in per_rank(plan, model, batch)) > capacity
    found = ways_that_fit(plan, model, batch, capacity)
    assert 1 <= len(found) <= 3
    for words, peak in found:
        changed = replace(plan, **dict(word.split("=", 1) for word in words.split()))
        assert max(rank.total for rank in per_rank(changed, model, batch)) == peak <= capacity
    assert found == ways_that_fit(plan, model, batch, capacity)
    said = verdict(plan, model, batch, capacity, device="mine")
    assert said.startswith("Does not fit: rank 0 needs")
    assert found[0][0] in said


def test_verdict_says_what_is_free_or_where_it_would_fit() -> None:
    plan = Plan.parse("precision=bf16")
    assert verdict(plan, "gpt2-small", 1, 80 * 10**9, device="a100").startswith("Fits: the fullest rank, 0, needs")
    said = verdict(plan, "gpt2-xl", 1, 10**9)
    assert "No small change of the plan is enough" in said
    assert "a100-40gb" in said
    assert "no device of the presets holds it" in verdict(plan, "gpt3-175b", 1, 10**9)
