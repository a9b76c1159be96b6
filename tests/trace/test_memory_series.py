"""Series: curves, peaks and owners computed from changes; writing JSON and reading it again."""

from __future__ import annotations

import pytest

from minipar import Plan, simulate
from minipar.trace import Trace
from minipar.trace.memory_series import ALL_KINDS, Series


@pytest.fixture
def series() -> Series:
    made = Series(before={("parameters", 0): 100, ("data", -1): 7})
    made.add(1.0, 0, 50, "activations", 0)
    made.add(2.0, 0, 30, "temporary", 1)
    made.add(2.5, 0, -30, "temporary", 1)
    made.add(3.0, 1, 25, "gradients", 0)
    made.add(4.0, 1, -50, "activations", 0)
    return made


def test_the_peak_says_when_and_who(series):
    peak = series.peak()
    assert (peak.bytes, peak.index) == (187, 0)
    assert {kind: size for kind, size in peak.by_kind.items() if size} == {
        "parameters": 100, "data": 7, "activations": 50, "temporary": 30,
    }  # fmt: skip
    assert tuple(peak.by_kind) == ALL_KINDS
    assert peak.owners == [("parameters", 0, 100), ("activations", 0, 50), ("temporary", 1, 30), ("data", -1, 7)]
    assert "at instruction 0" in str(peak)


def test_nothing_at_all():
    assert Series().peak().bytes == 0
    assert Series().curve().peak == 0


def test_the_curve_adds_up(series):
    curve = series.curve(0.5)
    assert curve.times == [0.5, 1.0, 2.0, 2.5, 3.0, 4.0]
    assert curve.total == [107, 157, 187, 157, 182, 132] == series.totals()
    for k, total in enumerate(curve.total):
        assert sum(column[k] for column in curve.kinds.values()) == total


def test_a_trace_with_series_uses_them(series):
    trace = simulate(Plan(microbatches=1).compile(layers=2))
    tracked = Trace(trace.program, trace.starts, trace.ends, trace.size, "measured", "bytes", series=[series])
    assert tracked.peak_memory() == [187]
    assert tracked.peak_by_kind(0)["temporary"] == 30
    assert trace.peak_memory() != tracked.peak_memory(), "without series: the values' lifetimes"
