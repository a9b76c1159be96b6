"""Interleaved 1F1B: every rank holds several chunks, so that the pipeline fills and drains in smaller steps.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021.

    p=2, m=4, 2 chunks (stages 0 2 on rank 0, 1 3 on rank 1); lower case is the second chunk, backward twice as long
    rank 0  F0 F1 f0 f1 F2    b0 b0 F3 b1 b1 f2 B0 B0 f3 B1 B1    b2 b2    b3 b3 B2 B2 B3 B3
    rank 1     F0 F1 f0 b0 b0 f1 b1 b1 F2 B0 B0 F3 B1 B1 f2 b2 b2 f3 b3 b3 B2 B2 B3 B3

A rank takes a group of g micro-batches through its first chunk, then the same ones through its next chunk. With g = p,
the first micro-batch of a group comes back when the last one has left. Larger groups need more memory: rank d keeps
min(((v-1)g+2(p-1-d)+1)/v, m) micro-batches, where 1 is a micro-batch's activations in all chunks of the rank. The time
is m(tF+tB) + (p-1)(tF+tB)/v where g = p divides m, for any tF and tB. The bubble is that of 1F1B divided by v; there
are v times as many messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from minipar.errors import PlanError
from minipar.program import Action, Backward, Forward
from minipar.strategies.schedules.registry import Times, schedule
from minipar.wording import several


def in_turns(times: Times, p: int, m: int, v: int) -> float:
    """Seconds of a step, where groups are of p micro-batches and p divides m: the bubble is a v-th of 1F1B's."""
    return m * times.both + (p - 1) * times.both / v + 2 * (p * v - 1) * times.message


@schedule(
    "interleaved",
    paper="Narayanan et al. 2021 (Megatron-LM)",
    time="m(tF+tB)+(p-1)(tF+tB)/v",
    peak="min(((v-1)g+2(p-1-d)+1)/v, m)",
    needs="group g: p <= g <= m, m mod g = 0 or >= p; time: g = p",
    chunks=2,
    form=in_turns,
)
def interleaved(rank: int, ranks: int, microbatches: int, chunks: int, group: int | None) -> Iterator[Action]:
    """1F1B over several chunks a rank: groups of micro-batches take turns at the chunks."""
    size = ranks if group is None else group
    _check(ranks, microbatches, size)
    order = [
        (i, c)
        for start in range(0, microbatches, size)
        for c in range(chunks)
        for i in range(start, min(start + size, microbatches))
    ]
    back = [(i, chunks - 1 - c) for i, c in order]
    warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * size, len(order))
    for i, c in order[:warm_up]:
        yield Forward(i, c)
    for forward, backward in zip(order[warm_up:], back, strict=False):
        yield Forward(*forward)
        yield Backward(*backward)
    for i, c in back[len(order) - warm_up :]:
        yield Backward(i, c)


def _check(ranks: int, microbatches: int, group: int) -> None:
    """PlanError for groups in which a rank would wait for a message that depends on its own later message."""
    rest = microbatches % group
    if ranks <= group <= microbatches and (rest == 0 or rest >= ranks):
        return
    name = f"schedule=interleaved: group={group} with pp={ranks} microbatches={microbatches}"
    if microbatches < ranks:
        raise PlanError(
            f"{name}: a group needs at least {several(ranks, 'micro-batch')}; possible are microbatches={ranks} or more"
        )
    possible = [g for g in range(ranks, microbatches + 1) if microbatches % g == 0 or microbatches % g >= ranks]
    raise PlanError(
        f"{name}: groups are of {ranks} to {microbatches}, the last one of {ranks} at least; "
        f"possible are group={','.join(map(str, possible))}"
    )
