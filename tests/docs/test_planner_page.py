"""docs/planner.md: every block runs, and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import minipar
from minipar.planner import exhaustive
from minipar.planner.exhaustive import search
from tests.lending import lend
from tests.pages import run

PINS = "micro_batch_size=1 sequence_parallel=true"


@pytest.fixture
def fewer_plans(monkeypatch, pytestconfig):
    """The search for GPT-3 sees a part of its space, but with --thorough. (tests/planner/test_exhaustive.py searches
    all of it.)"""

    def within(model, *arguments, **options):
        return search(model, *arguments, **options, **({"pins": PINS} if model == "gpt3-175b" else {}))

    if not pytestconfig.getoption("--thorough"):
        monkeypatch.setattr(exhaustive, "search", within)


def test_every_block_runs(capsys, clusters, monkeypatch, fewer_plans):
    lend(clusters, monkeypatch)
    space = run("planner.md")
    out = capsys.readouterr().out
    assert space["found"].plan.numbers.ranks == 1024
    assert "Data parallel does not suffice" in out
    assert "Data parallel suffices" in out
    assert space["best"].time < space["problem"].propagated().time
    assert "True" in out
    assert sum(space["times"][0]) == 12


def test_answers_to_questions_are_what_estimates_say():
    """The plans of docs/questions.md (`python -m docs.questions`), and nothing absurd in them."""
    text = Path("docs/questions.md").read_text(encoding="utf-8")
    asked = r'--model "(.*)" --hardware "(.*)" --nodes (\d+) --gpus-per-node (\d+) --batch (\d+)'
    asked += r".*\n\n`(.*)`\n\n.* takes (\S+) s"
    found = re.findall(asked, text)
    assert len(found) == text.count("\n## ") - text.count("no plan fits") >= 9
    for model, devices, nodes, each, batch, plan, seconds in found:
        one = minipar.estimate(plan, model, devices, int(batch), nodes=int(nodes), gpus_per_node=int(each))
        assert one.time == pytest.approx(float(seconds), rel=1e-3)
        assert one.fits
        assert one.mfu < 0.67 or "fp8" in plan, "no published run reaches more"
        assert "offload" not in plan or devices == "4090"
