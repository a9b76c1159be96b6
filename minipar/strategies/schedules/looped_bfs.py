"""Looped breadth-first: all micro-batches go through the first chunks, then all of them through the next.

Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022 (arXiv 2211.05953).

    p=2, m=4, 2 chunks (stages 0 2 on rank 0, 1 3 on rank 1); lower case is the second chunk, backward twice as long
    rank 0  F0 F1 F2 F3 f0 f1 f2 f3          b3 b3 b2 b2 b1 b1 b0 b0 B3 B3 B2 B2 B1 B1 B0 B0
    rank 1     F0 F1 F2 F3 f0 f1 f2 f3 b3 b3 b2 b2 b1 b1 b0 b0 B3 B3 B2 B2 B1 B1 B0 B0

The time is m(tF+tB) + (p-1)(tF+tB)/v where m >= p, for any tF and tB, as for interleaved 1F1B. Every rank keeps the
activations of all m micro-batches. But all micro-batches use the parameters of a chunk one after another: where these
are sharded (zero=3), they are gathered only twice a step. And gradients of late stages are complete early.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action, Backward, Forward
from minipar.strategies.schedules.registry import schedule


@schedule(
    "looped-bfs", paper="Lamy-Poirier 2022 (Breadth-First)", time="m(tF+tB)+(p-1)(tF+tB)/v", peak="m",
    needs="time: m >= p", chunks=2,
)  # fmt: skip
def looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    """GPipe over several chunks a rank: all micro-batches through one chunk, then through the next."""
    for c in range(chunks):
        for i in range(microbatches):
            yield Forward(i, c)
    for c in reversed(range(chunks)):
        for i in reversed(range(microbatches)):
            yield Backward(i, c)
