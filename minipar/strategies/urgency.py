"""Urgency: in which order messages travel on a link, and when what they bring is needed.

    ready      B2 B1 B0                  gradients as the backward completes them
    urgent     2, 1, 0                   the next forward needs layer 0 first
    order         2    0    1            the link is free after 2: by then 1 and 0 are ready, and 0 is more urgent

Sums of gradients by priority (`passes/priority.py`) go by it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from minipar.program import Instruction, Op, home


def in_order(ready: Sequence[float], seconds: Sequence[float], urgent: Sequence[float]) -> list[int]:
    """The order of messages on one link: whenever it is free, the most urgent message that is ready comes next.

    ready     for each message, the time when it is ready
    seconds   for each message, how long it occupies the link
    urgent    for each message, its urgency: the smallest number comes first; equally urgent ones keep their order
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


def first_uses(instructions: Sequence[Instruction]) -> dict[int, int]:
    """For each parameter group the place of the first forward that needs it, or of the fetch for this forward."""
    found: dict[int, int] = {}
    for k, ins in enumerate(instructions):
        for value in ins.reads if ins.op in (Op.FORWARD, Op.FETCH) else ():
            if home(value).kind == "param":
                found.setdefault(value.index, k)
    return found
