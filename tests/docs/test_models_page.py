"""docs/models_and_data.md: every block runs."""

from __future__ import annotations

from tests.lending import lend
from tests.pages import blocks, run


def test_every_block_runs(clusters, monkeypatch):
    lend(clusters, monkeypatch)
    assert len(list(blocks("models_and_data.md"))) == 2
    run("models_and_data.md")
