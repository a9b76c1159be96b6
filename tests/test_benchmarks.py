"""The benchmarks' table, and one real benchmark."""

from __future__ import annotations

import json

import pytest

from benchmarks import NAMES, table
from benchmarks.harness import Row
from minipar.cli import main


@pytest.mark.parametrize(
    ("value", "must", "aim", "missed"),
    [
        (0.5, 1.0, 0.9, ""),
        (0.95, 1.0, 0.9, "aim"),
        (1.1, 1.0, 0.9, "must"),
        (9.0, None, None, ""),
        (1.0, 1.0, None, ""),
    ],
)
def test_misses_are_named(value, must, aim, missed):
    row = Row("thing", value, "s", must, aim)
    assert row.missed == missed
    text = table([row.as_dict()])
    assert ("MISSED" in text) == (missed == "must")
    assert ("aim missed" in text) == (missed == "aim")


def test_bench_prints_rows_with_targets(capsys):
    assert main(["bench", "partition", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in found["rows"]]
    assert all("partition" in name for name in names)
    assert all(row["value"] > 0 for row in found["rows"])
    assert found["missed"] == sum(row["missed"] == "must" for row in found["rows"])


def test_every_benchmark_can_be_imported():
    import importlib

    for name in NAMES:
        assert callable(importlib.import_module(f"benchmarks.{name}").measure)


def test_the_browser_s_benchmark_finds_where_a_page_draws():
    from benchmarks.widgets import _RENDER
    from minipar import simulate
    from minipar_widgets import Timeline

    assert Timeline(simulate("pp=2 microbatches=2")).to_html().count(_RENDER) == 1
