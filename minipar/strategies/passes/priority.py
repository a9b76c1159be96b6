"""Priority: gradients whose parameters the next forward needs first go first, and large ones can be overtaken.

Source: Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training" (P3), MLSys 2019; Peng et
al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration" (ByteScheduler), SOSP 2019.

    overlap=backward     B2 B1 B0                      STEP F0 F1 F2         messages in the order of backward
                           [ 2      ][ 1     ][ 0     ]

    overlap=priority     B2 B1 B0         STEP0 F0     STEP1 F1   STEP2 F2   pieces in the order of the next forward;
                           [2][1 ][ 0     ][ 1    ][ 2      ]                a layer starts as soon as it is updated

Messages of a group of ranks go one after another, in one order on all of them, so the order is decided here: whenever
the link is free, the most urgent of the messages that are ready is next. They enter the walk as soon as their gradient
is there and those before them have entered. The last piece of a gradient stands for all: it writes what STEP reads.

`bucket` is the size of a piece; gradients are never joined. "none" sends them whole, a message for each tensor.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from minipar.costs.protocol import Costs
from minipar.program import Instruction, Op, Part, grad
from minipar.strategies.passes.data_parallel import Bucket, MiB, reduce_groups, reduced_groups
from minipar.strategies.passes.layers import Layout

Seconds = Callable[[Instruction], float]  # what an instruction of this stage takes: computing, or on the link


def all_reduce_by_priority(
    instructions: Sequence[Instruction], layout: Layout, stage: int, step: int, bucket: Bucket, seconds: Seconds
) -> list[Instruction]:
    """One stage's instructions with the collectives that sum its gradients, in the order of their urgency."""
    sharing = reduced_groups(layout, stage)
    own = {layout.rank(r, stage) for r in range(layout.dp)}
    end, clock = len(instructions) - 1, [0.0]
    for ins in instructions:
        clock.append(clock[-1] + seconds(ins))
    place = dict.fromkeys(sharing, end)
    place |= {v.index: k for k, ins in enumerate(instructions) for v in ins.writes if v.kind == "grad"}
    urgency = first_uses(instructions)

    within = sorted((g for g in sharing if own.issuperset(sharing[g])), key=lambda g: (place[g], -g))
    queue = [ins for g in within for ins in pieces(g, layout, sharing[g], step, bucket)]
    ready = [clock[place[ins.layers[0]] + 1] for ins in queue]
    urgent = [urgency.get(ins.layers[0], end) for ins in queue]
    after: dict[int, list[Instruction]] = {}
    latest = 0
    for k in in_order(ready, [seconds(ins) for ins in queue], urgent):
        latest = max(latest, place[queue[k].layers[0]])
        after.setdefault(latest, []).append(queue[k])
    for g in sorted(sharing.keys() - set(within)):  # tied between stages: complete at another time on each of them
        after.setdefault(end, []).append(reduce_groups([g], layout, sharing[g], step, bucket))
    return [each for k, ins in enumerate(instructions) for each in (ins, *after.get(k, ()))]


def in_order(ready: Sequence[float], seconds: Sequence[float], urgent: Sequence[float]) -> list[int]:
    """List scheduling of one link: whenever it is free, the most urgent message that is ready; the least goes first.

    Equally urgent ones keep their order.
    """
    coming = sorted(range(len(ready)), key=lambda k: (ready[k], k), reverse=True)
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[-1]])
        while coming and ready[coming[-1]] <= now:
            k = coming.pop()
            heapq.heappush(waiting, (urgent[k], k))
        _, k = heapq.heappop(waiting)
        now += seconds[k]
        order.append(k)
    return order


def pieces(g: int, layout: Layout, ranks: tuple[int, ...], step: int, bucket: Bucket) -> list[Instruction]:
    """The messages that sum one gradient: equal pieces of at most `bucket` MiB, cut between numbers (of 8 bytes)."""
    whole = reduce_groups([g], layout, ranks, step, bucket)
    size = sum(layout.shape.groups[g].tensors)
    limit = max(8.0, bucket * MiB if isinstance(bucket, (int, float)) else float(size))
    count = int(-(-size // limit))
    if count < 2:
        return [whole]
    cuts = [k * size // count // 8 * 8 for k in range(count)] + [size]
    found = []
    for k in range(count):
        part = Part(Op.ALL_REDUCE, -1, cuts[k + 1] - cuts[k], cuts[k])
        found.append(whole._replace(writes=(grad(g),) if k == count - 1 else (), parts=(part,)))
    return found


def first_uses(instructions: Sequence[Instruction]) -> dict[int, int]:
    """For each parameter group the place of the first forward that needs it."""
    found: dict[int, int] = {}
    for k, ins in enumerate(instructions):
        for value in ins.reads if ins.op is Op.FORWARD else ():
            if value.kind == "param":
                found.setdefault(value.index, k)
    return found


def updates(step: Sequence[Instruction], instructions: Sequence[Instruction]) -> list[Instruction]:
    """The STEP of a stage as one for each group, the first needed first."""
    uses = first_uses(instructions)
    found = []
    for ins in step:
        for g in sorted(ins.layers, key=lambda g: (uses.get(g, len(uses)), g)):
            reads, writes, frees = (
                tuple(value for value in values if value.index == g) for values in (ins.reads, ins.writes, ins.frees)
            )
            found.append(ins._replace(layers=(g,), reads=reads, writes=writes, frees=frees))
    return found


def update_late(instructions: Sequence[Instruction], due: Sequence[Instruction]) -> list[Instruction]:
    """The next step's instructions, each STEP of the step before where its parameters are needed first."""
    uses = first_uses(instructions)
    before: dict[int, list[Instruction]] = {}
    for ins in due:
        before.setdefault(uses.get(ins.layers[0], len(instructions)), []).append(ins)
    found = [each for k, ins in enumerate(instructions) for each in (*before.get(k, ()), ins)]
    return found + before.get(len(instructions), [])


def seconds(costs: Costs, rank: int, ins: Instruction) -> float:
    """What an instruction of a rank takes."""
    return costs.collective(ins) if ins.group else costs.compute(rank, ins)


def guess(layout: Layout) -> Seconds:
    """Times where no costs are known: a layer's forward takes 1, its backward 2, and the messages of all gradients
    together as long as forward and backward of one micro-batch."""
    whole = sum(sum(group.tensors) for group in layout.shape.groups) or 1

    def seconds(ins: Instruction) -> float:
        if ins.op is Op.ALL_REDUCE:
            return 3.0 * layout.shape.layers * sum(part.bytes for part in ins.parts) / whole
        return {Op.FORWARD: 1.0, Op.RECOMPUTE: 1.0, Op.BACKWARD: 2.0}.get(ins.op, 0.0) * len(ins.layers)

    return seconds
