"""How the rows of a batch are divided among replicas and micro-batches. Imports nothing of minipar."""

from __future__ import annotations

from itertools import pairwise

MOST_ROWS = 10**9  # of a step: more than the largest sets of data have


def split_rows(total: int, parts: int) -> list[range]:
    """Splits `total` rows into `parts` ranges. Their lengths differ by at most one, and the longer ones come first."""
    even, more = divmod(total, parts)
    edges = [k * even + min(k, more) for k in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(edges)]
