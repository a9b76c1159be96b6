"""bucket=auto: few messages have little latency, many begin early; the best size is in between, and can be computed.

    bucket=none   B3 B2 B1 B0                each message costs its latency
                    [ 3 ][ 2 ][ 1 ][ 0 ]
    best          B3 B2 B1 B0
                       [ 3,2 ][ 1,0 ]
    bucket=flat   B3 B2 B1 B0                nothing is hidden behind backward
                              [ 3,2,1,0 ]

Every size that makes other buckets is tried on the instructions themselves: compute in order, a message when its
gradients are there and the link is free. This is the rule by which `simulate` goes, for one stage that waits for no
other one; of several stages the one that ends last after its backward counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from minipar.program import Instruction, Op
from minipar.strategies.passes.data_parallel import MiB, all_reduce_gradients, reduced_groups
from minipar.strategies.passes.layers import Layout
from minipar.strategies.passes.priority import Seconds

MOST = 64  # sizes that are tried


def best_size(stages: Sequence[Sequence[Instruction]], layout: Layout, seconds: Sequence[Seconds]) -> float:
    """The size in MiB with which the last message of a step ends soonest, the largest of these.

    stages    of each stage one step's instructions, without collectives
    seconds   of each stage what an instruction takes: computing, or its messages on the link
    """
    tried = sizes(layout)
    if not tried:
        return 25.0
    tails = [_from_first_gradient(stages[s], layout, s) for s in range(layout.pp)]
    ends = [max(_end(tails[s], layout, s, size, seconds[s]) for s in range(layout.pp)) for size in tried]
    shortest = min(ends)
    return max(size for size, end in zip(tried, ends, strict=True) if end <= shortest * (1 + 1e-12))


def sizes(layout: Layout) -> list[float]:
    """Sizes in MiB that make different buckets: of the last groups of each stage together, one, two, three ..."""
    found: set[int] = set()
    for stage in range(layout.pp):
        groups = sorted(reduced_groups(layout, stage), reverse=True)
        found.update(accumulate(sum(layout.shape.groups[g].tensors) for g in groups))
    tried = sorted(found - {0})
    if len(tried) > MOST:
        tried = sorted({tried[round(k * (len(tried) - 1) / (MOST - 1))] for k in range(MOST)})
    return [size / MiB for size in tried]


def _from_first_gradient(instructions: Sequence[Instruction], layout: Layout, stage: int) -> Sequence[Instruction]:
    """The instructions from where the first gradient is complete: before, no message goes."""
    sharing = reduced_groups(layout, stage)
    last = {v.index: k for k, ins in enumerate(instructions) for v in ins.writes if v.kind == "grad"}
    return instructions[min((last[g] for g in sharing if g in last), default=0) :]


def _end(instructions: Sequence[Instruction], layout: Layout, stage: int, size: float, seconds: Seconds) -> float:
    """When a stage's last message ends, counted from the moment that its last backward ends without messages."""
    clock = link = 0.0
    for ins in all_reduce_gradients(instructions, layout, stage, 0, size, overlap=True):
        if ins.op is Op.ALL_REDUCE:
            link = max(clock, link) + seconds(ins)
        else:
            clock += seconds(ins)
    return max(0.0, link - clock)
