"""docs/own_model.md: every block runs, and prints what the page shows."""

from __future__ import annotations

from tests.lending import lend
from tests.pages import blocks, run


def test_every_block_runs(capsys, clusters, monkeypatch):
    lend(clusters, monkeypatch)
    assert len(list(blocks("own_model.md"))) == 12
    run("own_model.md")
    said = capsys.readouterr().out
    assert "checked: steps 0, " in said
    assert "of 40 rows" in said
