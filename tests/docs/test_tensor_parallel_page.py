"""docs/tensor_parallel.md: every block runs, and prints what the page says."""

from __future__ import annotations

from tests.lending import lend
from tests.pages import run


def test_every_block_runs(capsys, clusters, monkeypatch):
    lend(clusters, monkeypatch)
    space = run("tensor_parallel.md")
    out = capsys.readouterr().out
    assert space["rules"] == {"0": "S1 on tp", "2": "P on tp", "4": "S1 on tp"}
    assert "R,S1 -> S1" in out
    assert "S1,S0 -> P" in out
    assert "expert" in out
    assert "all_reduce 3:input 128 forward" in out
    assert "('cp', 'tp') (0, 1) (0, 2)" in out
    assert "P/S" in out
    assert out.rstrip().endswith("True")
    assert out.count("True") == 3
