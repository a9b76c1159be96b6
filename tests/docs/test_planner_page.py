"""docs/planner.md: every block runs, and prints what the page says."""

from __future__ import annotations

from tests.pages import run


def test_every_block_runs(capsys):
    space = run("planner.md")
    out = capsys.readouterr().out
    assert space["found"].plan.numbers.ranks == 1024
    assert "Data parallel does not suffice" in out
    assert "Data parallel suffices" in out
    assert space["best"].time < space["problem"].propagated().time
    assert "True" in out
    assert sum(space["times"][0]) == 12
    assert space["free"].time < space["chain"](space["graph"].within(0.9 * space["free"].memory)).time
