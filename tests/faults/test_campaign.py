"""The campaign of faults in a short form: every fault is explained and healed, and nothing is left behind."""

from __future__ import annotations

from tests.faults.campaign import run


def test_a_few_faults_are_explained_and_healed():
    page, problems = run(10, seed=3, seconds=150, show=False)
    assert not problems, "\n".join(problems)
    assert "| all |" in page
