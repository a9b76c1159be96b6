"""Predictions beside published numbers: within their limits, held out as fitted, and on the docs' page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fit_efficiency import errors, fit, keys_of
from minipar.cli import main
from minipar.costs.stacks import REACHED, Efficiency
from minipar.prediction import validation
from minipar.prediction.estimating import estimate
from minipar.prediction.published import halves, rows

REPORT = validation.report()
PAGE = Path(__file__).parents[2] / "docs" / "estimate.md"


def test_exact_rows_are_at_most_half_a_per_cent_off() -> None:
    found = [row for row in REPORT["rows"] if row["tier"] == "exact"]
    assert len(found) == 10 + 10 + 4 + 3 * 6 * 3 + 4 * 3
    assert max(abs(row["error"]) for row in found) <= 0.005


def test_measured_rows_that_were_held_out() -> None:
    fitted, held = halves()
    assert not {row.id for row in fitted} & {row.id for row in held}
    assert len(fitted) + len(held) == sum(not row.why for row in rows())
    assert abs(len(fitted) - len(held)) <= len(REACHED) + 3
    for pair in validation.measured():
        assert pair.holds, pair
    away = [abs(row.ratio - 1) for row in held]
    assert sum(away) / len(away) <= 0.06


def test_the_ratios_are_those_of_the_estimates() -> None:
    for row in [row for row in rows() if not row.why][::16]:
        found = estimate(row.plan, row.model, row.gpu, row.batch, stack=row.stack)
        assert found.time / row.seconds == pytest.approx(row.ratio, abs=6e-4), row.id


def test_rows_that_ran_and_say_all_are_not_called_too_large() -> None:
    for row in rows():
        if row.stack == "torch-fsdp" and not row.why:
            assert estimate(row.plan, row.model, row.gpu, row.batch, stack=row.stack).fits, row.id


def test_rankings_hold() -> None:
    assert [one["what"] for one in REPORT["ranking"] if not one["holds"]] == []
    assert len(REPORT["ranking"]) == 5
    assert REPORT["holds"]


def test_the_numbers_are_those_of_the_script() -> None:
    pair = "gb200", "megatron-core"
    chosen = [row for row in halves()[0] if row.pair == pair]
    assert fit(chosen, keys_of(pair[1], chosen)) == REACHED[pair]
    for pair, share in REACHED.items():
        own = [key for key in vars(share) if getattr(share, key) != getattr(Efficiency(), key)]
        assert len(own) <= 6, pair


def test_a_worse_model_would_be_seen() -> None:
    chosen = [row for row in halves()[1] if row.pair == ("h100", "torch-fsdp")]
    worse = errors(chosen, replace(REACHED["h100", "torch-fsdp"], matmul=0.5))
    assert sum(map(abs, worse)) / len(worse) > 0.10


def test_an_estimate_says_how_far_it_may_be_off() -> None:
    row = next(row for row in rows() if row.pair == ("h100", "torch-fsdp"))
    found = estimate(row.plan, row.model, row.gpu, row.batch, stack=row.stack)
    assert found.low <= found.time <= found.high
    assert found.rows == 12
    assert "12 published rows like this" in str(found)
    alone = estimate("dp=8", "gpt2-xl", "mi300x per_node=8 like=nothing", 8)
    assert (alone.low, alone.high, alone.rows) == (alone.time, alone.time, 0)
    assert "no published row is like it" in str(alone)


def test_the_command_and_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"] == REPORT["tiers"]
    assert main(["validate"]) == 0
    printed = capsys.readouterr().out.strip()
    page = PAGE.read_text("utf-8")
    assert printed in page, "make the page anew: its last part is the output of `minipar validate`"
