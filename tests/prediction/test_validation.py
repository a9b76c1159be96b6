"""Predictions beside published numbers: within their limits, with all fitted rows marked, and on the docs' page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fit_efficiency import fit
from minipar.cli import main
from minipar.costs.hardware import FITTED
from minipar.prediction import validation

REPORT = validation.report()
PAGE = Path(__file__).parents[2] / "docs" / "estimate.md"


def test_exact_rows_are_at_most_half_a_per_cent_off() -> None:
    rows = [row for row in REPORT["rows"] if row["tier"] == "exact"]
    assert len(rows) == 10 + 10 + 4 + 3 * 6 * 3 + 4 * 3
    assert max(abs(row["error"]) for row in rows) <= 0.005


def test_measured_rows_that_were_not_fitted() -> None:
    rows = [row for row in REPORT["rows"] if row["tier"] == "calibrated"]
    held = [abs(row["error"]) for row in rows if not row["fitted"]]
    assert (len(rows), len(held)) == (18, 15)
    assert sum(held) / len(held) <= 0.08
    assert max(held) <= 0.15


def test_rankings_hold() -> None:
    assert [one["what"] for one in REPORT["ranking"] if not one["holds"]] == []
    assert len(REPORT["ranking"]) == 5
    assert REPORT["holds"]


def test_the_constants_are_those_of_the_script() -> None:
    found = fit()
    assert len(REPORT["fitted"]["constants"]) == len(REPORT["fitted"]["rows"]) == 4
    assert sum(row["fitted"] for row in REPORT["rows"]) == 4
    for name in REPORT["fitted"]["constants"]:
        assert getattr(found, name) == getattr(FITTED, name)


def test_a_worse_model_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    worse = replace(validation.A100, efficiency=replace(FITTED, matmul=0.5))
    errors = [abs(row.error) for row in validation.calibrated(worse) if not row.fitted]
    assert sum(errors) / len(errors) > 0.08


def test_the_command_and_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"] == REPORT["tiers"]
    assert main(["validate"]) == 0
    printed = capsys.readouterr().out.strip()
    page = PAGE.read_text("utf-8")
    assert printed in page, "make the page anew: its last part is the output of `minipar validate`"
