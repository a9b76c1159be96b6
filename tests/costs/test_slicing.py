"""The lengths of token slices: the dynamic program against all cuts, and the reference's row."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from minipar import PlanError
from minipar.costs.slicing import best_slices, best_uniform, step_time, token_ranges


def reference(length: int, context: int) -> float:
    return 2 + length + 0.1 * length * (context + length / 2)


def test_the_row_of_the_reference():
    best, uniform = best_slices(32, 8, reference), best_uniform(32, 8, reference)
    assert step_time(best, 8, reference) == pytest.approx(176.8, abs=0.05)
    assert step_time(uniform, 8, reference) == pytest.approx(186.6, abs=0.05)
    assert step_time([32], 8, reference) == pytest.approx(681.6, abs=0.05)
    assert best[:6] == (4, 3, 2, 2, 2, 2)
    assert set(best[6:]) == {1}


def cuts(tokens: int):
    for count in range(tokens):
        for inner in combinations(range(1, tokens), count):
            yield [b - a for a, b in pairwise([0, *inner, tokens])]


@pytest.mark.parametrize("tokens", range(1, 11))
def test_it_is_the_best_of_all_cuts(tokens):
    draw = random.Random(tokens)
    for stages in (1, 2, 3, 8):
        table = {(n, c): draw.uniform(0.1, 3) * n for n in range(1, tokens + 1) for c in range(tokens)}
        for time in (reference, lambda n, c, table=table: table[n, c]):
            found = best_slices(tokens, stages, time)
            assert sum(found) == tokens
            best = min(step_time(lengths, stages, time) for lengths in cuts(tokens))
            assert step_time(found, stages, time) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("tokens", "stages"), [(0, 2), (4, 0)])
def test_sizes_of_less_than_one_are_refused(tokens, stages):
    with pytest.raises(PlanError, match="must be at least 1"):
        best_slices(tokens, stages, reference)


def test_ranges():
    assert list(map(len, token_ranges(3, 10))) == [4, 3, 3]
    assert token_ranges((1, 2), 3) == [range(1), range(1, 3)]
