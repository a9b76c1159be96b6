"""Counts as text."""

from __future__ import annotations

import pytest

from minipar import Plan, simulate
from minipar.trace import labels
from minipar.trace.terminal import text
from minipar.wording import plural, several


@pytest.mark.parametrize(
    ("count", "what", "words"),
    [
        (1, "rank", "1 rank"), (2, "rank", "2 ranks"), (0, "rank", "0 ranks"), (1.0, "activation", "1 activation"),
        (0.5, "activation", "0.5 activations"), (3, "micro-batch", "3 micro-batches"), (2, "process", "2 processes"),
        (2, "more rank", "2 more ranks"), (1_000_000, "instruction", "1000000 instructions"),
    ],
)  # fmt: skip
def test_one_and_several(count: float, what: str, words: str) -> None:
    assert several(count, what) == words


def test_plurals() -> None:
    assert [plural(word) for word in ("copy", "day", "pass", "box", "stage")] == [
        "copies", "days", "passes", "boxes", "stages"
    ]  # fmt: skip


def test_pictures_of_one_rank_say_so() -> None:
    trace = simulate(Plan(microbatches=1).compile(layers=1))
    said = "\n".join([labels.description([trace]), trace.summary(), repr(trace.program), text(trace), str(trace)])
    assert "timeline of 1 rank:" in said
    assert "1 rank, 3 instructions" in said
    for wrong in ("1 ranks", "1 activations", "1 stages", "1 layers"):
        assert wrong not in said
