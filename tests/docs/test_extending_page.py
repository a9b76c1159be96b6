"""docs/extending.md: every block runs, and prints what the page shows."""

from __future__ import annotations

import pytest

from minipar.program import collectives
from minipar.strategies import draft
from minipar.strategies.schedules import registry
from tests.lending import lend
from tests.pages import blocks, run


@pytest.fixture(autouse=True)
def own_things(monkeypatch):
    """What the page registers is forgotten after it."""
    monkeypatch.setattr(registry, "_schedules", dict(registry._schedules))
    monkeypatch.setattr(draft, "_passes", {})
    monkeypatch.setattr(collectives, "_own", {})


def test_every_block_runs(capsys, clusters, monkeypatch):
    lend(clusters, monkeypatch)
    assert len(list(blocks("extending.md"))) == 8
    run("extending.md")
    said = capsys.readouterr().out
    assert "schedule=impatient: rank 0: Backward(0) comes before Forward(0)\n" in said  # the refusal
    assert "to-and-fro" in said
