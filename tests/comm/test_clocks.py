"""Clocks of several hosts are made one: what they differ by is measured with messages and taken out of traces."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import cloudpickle
import pytest

from minipar.cluster import Cluster, worker
from minipar.comm import clocks, communicator
from minipar.comm.clocks import Reading, corrected

# Ranks cannot import this file by name; its functions travel as those of a notebook do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

AHEAD = 1000.0  # seconds that the clock of host "right" is ahead


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIPAR_HOST", "left,right,right")
        with Cluster(3, device="cpu") as made:
            yield made


def read() -> tuple[Reading, float]:
    """With clocks that differ: what is read, and how far it is from the truth."""
    rank, real = worker.context().rank, time.perf_counter
    time.perf_counter = (lambda: real() + AHEAD) if rank else real  # type: ignore[assignment]
    try:
        found = clocks.read(communicator.create())
    finally:
        time.perf_counter = real
    return found, abs(found.seconds - (-AHEAD if rank else 0.0))


def test_what_clocks_differ_by_is_read_with_its_error(three: Cluster) -> None:
    (first, _), *others = three.run(read)
    assert first[1:] == (0.0, 0.0)
    for found, wrong in others:
        assert wrong <= found.error < 0.1
        assert found.error > 0
    assert others[0][0][1:] == others[1][0][1:], "ranks of one host have one clock"


def test_on_one_host_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIPAR_HOST", raising=False)
    with Cluster(2, device="cpu") as two:
        for found in two.run(lambda: clocks.read(communicator.create())):
            assert found[1:] == (0.0, 0.0)


def test_times_between_two_readings_are_corrected_in_proportion() -> None:
    before, after = Reading(100.0, 5.0, 1e-4), Reading(200.0, 5.2, 1e-4)
    assert corrected([100.0, 150.0, 200.0], before, after) == pytest.approx([105.0, 155.1, 205.2])
    same = Reading(100.0, 0.0, 0.0)
    assert corrected([1.5, 2.5], same, same) == [1.5, 2.5]
    assert corrected([100.0, 101.0], before, before) == [105.0, 106.0]
