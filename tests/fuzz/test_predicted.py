"""Predicted beside measured, for keys that go together: some plans of `predicted.py`, and its report."""

from __future__ import annotations

import pytest

from minipar import Plan
from tests.fuzz.predicted import MEMORY, TITLE, Compared, memory_error, report

LONG = pytest.mark.extra("::test_memory_is_as_predicted")  # (of 10 and 20 seconds of a core)


@pytest.mark.parametrize(
    "words",
    [
        # short tensors that go in one message, on both sides
        "pp=2 microbatches=4 place=branches",
        # layers with several inputs, which their backward lets go of one after another
        pytest.param("pp=2 microbatches=4 ep=2", marks=LONG),
        # what a layer keeps of a slice, where there is no backward that needs it
        "pp=2 schedule=terapipe slices=4 microbatches=2 inference=true",
        # the very first micro-batch, while layers are weighed
        "sync=ps",
        # what an optimizer keeps on the host
        "offload=optimizer",
        # parameters that nobody updates, in bfloat16 alone
        "pp=2 microbatches=2 inference=true precision=bf16",
        # the shard that a rank reads of a tensor that it has whole
        pytest.param("microbatches=4 context_parallel=2 ep=2", marks=LONG),
        # versions that are pulled to the host
        "sync=ps schedule=pipedream microbatches=2 offload=parameters",
    ],
)
def test_memory_is_as_predicted(clusters, words: str) -> None:
    assert abs(memory_error(words, clusters(Plan.parse(words).ranks))) <= MEMORY


def test_the_report_counts_and_lists_what_is_further_away() -> None:
    found = [
        Compared("dp=2", 0.001, 0.01, slower=True),
        Compared("pp=2", -0.03, 0.01),
        Compared("ep=2", refused="no experts"),
    ]
    text = report(found)
    assert text.startswith(f"{TITLE}\n")
    assert "| peak memory | 2 | 1.55% | 3.0% | 1% | 1 |" in text
    assert "| step time | 2 | 1.00% | 1.0% | 5% | 2 |" in text
    assert "| pp=2 | -3.0% | +1.0% |" in text
    assert "| dp=2 |" not in text
    assert "four times as slow, as 1 were.)" in text
    assert Compared("tp=2", 0.001, -0.11).off
    assert not found[0].off
    assert "Of 1 nothing is predicted, or the model does not fit; 0 fail." in text


def test_what_was_not_measured_is_no_number_and_an_error_is_no_refusal() -> None:
    failed = Compared("tp=2", failed="ValueError: no")
    text = report([Compared("dp=2", 0.001), failed])
    assert "| step time | 0 | not measured | | 5% | |" in text
    assert "FAILED tp=2: ValueError: no" in text
    assert failed.missed
    assert not failed.off
    assert not Compared("ep=2", refused="no experts").missed
