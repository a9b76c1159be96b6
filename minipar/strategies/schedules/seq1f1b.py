"""Seq1F1B: 1F1B over slices of sequences. A backward of a slice runs as soon as it can.

Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training", 2024.

    p=2, m=2, slices=2: micro-batches 0 and 1 are one sequence, 2 and 3 the next one
    rank 0  F0 F1 F2       B1 B1 F3 B0 B0    B3 B3 B2 B2
    rank 1     F0 F1 B1 B1 F2 B0 B0 F3 B3 B3 B2 B2

The slices of a sequence go forward in order, and backward in reverse order (see `terapipe.py`). So a rank begins with
the forwards of a whole sequence, and of one more slice for each rank behind it. After that forwards and backwards of
slices take turns, as micro-batches do in 1F1B. With equal slices the time is that of TeraPipe. But rank d keeps at most
p - d + slices - 1 slices, where TeraPipe keeps all slices of all micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from minipar.program import Action, Backward
from minipar.strategies.schedules.one_f_one_b import warm_up_then_alternate
from minipar.strategies.schedules.registry import schedule


@schedule(
    "seq1f1b", paper="Sun et al. 2024", time="(m+(p-1)/slices)(tF+tB)", peak="(p-d+slices-1)/slices",
    needs="a causal model",
)  # fmt: skip
def seq1f1b(rank: int, stages: int, microbatches: int, slices: int) -> Iterator[Action]:
    """1F1B over slices of sequences: forwards in order, the backwards of a sequence in reverse order."""
    for action in warm_up_then_alternate(stages - 1 - rank + slices - 1, microbatches * slices):
        if isinstance(action, Backward):
            sequence, k = divmod(action.microbatch, slices)
            action = replace(action, microbatch=sequence * slices + slices - 1 - k)
        yield action
