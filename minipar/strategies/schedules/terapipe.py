"""TeraPipe: micro-batches are slices of a sequence of tokens. A causal model can take them one after another.

Source: Li et al., "TeraPipe: Token-Level Pipeline Parallelism for Training Large-Scale Language Models", 2021.

    p=3, slices=4, backward twice as long as forward                      a token sees itself and those before it:
    rank 0  F0 F1 F2 F3                   B3 B3 B2 B2 B1 B1 B0 B0                 keys of slice  0 1 2 3
    rank 1     F0 F1 F2 F3          B3 B3 B2 B2 B1 B1 B0 B0                       slice 0        x
    rank 2        F0 F1 F2 F3 B3 B3 B2 B2 B1 B1 B0 B0                             slice 1        x x
                                                                                  slice 2        x x x
    carry(l, 0) -> F1 -> carry(l, 1) -> F2 -> carry(l, 2) -> F3                   slice 3        x x x x
    grad_carry(l, 0) <- B1 <- grad_carry(l, 1) <- B2 <- grad_carry(l, 2) <- B3

`carry(l, i)` is what layer l keeps for the slices after i; an attention keeps the keys and values of the tokens so far.
`grad_carry(l, i)` is its gradient, which is the sum over all later slices. So backwards run in reverse order. Slice j
of the b-th micro-batch of rows is micro-batch b * slices + j; the slices of the next micro-batch of rows follow without
a gap. The pass `passes/slices.py` puts both values into the program.

The time is (sum t_j + (p-1) max t_j)(1 + tB/tF), where t_j is the time of the forward of slice j. Every rank keeps the
activations of all slices. `minipar.costs.slicing` finds the lengths for which this time is shortest.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.program import Action, Backward, Forward
from minipar.strategies.schedules.registry import schedule


@schedule(
    "terapipe",
    paper="Li et al. 2021",
    time="(sum t_j + (p-1) max t_j)(1 + tB/tF)",
    peak="slices",
    needs="a causal model",
)
def terapipe(rank: int, stages: int, microbatches: int, slices: int) -> Iterator[Action]:
    """Slices of a sequence as micro-batches: forwards in order, backwards in reverse order."""
    for i in range(microbatches * slices):
        yield Forward(i)
    for i in reversed(range(microbatches * slices)):
        yield Backward(i)
