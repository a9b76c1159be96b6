"""docs/models_and_data.md: every block runs, and prints what the page shows."""

from __future__ import annotations

from tests.lending import lend
from tests.pages import blocks, run


def test_every_block_runs(capsys, clusters, monkeypatch):
    lend(clusters, monkeypatch)
    assert len(list(blocks("models_and_data.md"))) == 3
    run("models_and_data.md")
    assert "expert" in capsys.readouterr().out
