"""The simulator in its shortest form. `order` says who waits for whom, and this fold over it adds times.

`simulate` gives the same times and is several times as fast; tests compare the two. Read this one first. It knows no
cables that ranks share: these need a clock (oversubscription.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

from minipar.costs.protocol import Costs
from minipar.program import COPIES, PORT, Op, Program, order
from minipar.program.rule import Place


def start_and_end(program: Program, costs: Costs) -> tuple[list[list[float]], list[list[float]]]:
    """When each instruction of each rank starts and ends, in the unit of the costs. Errors: those of `order`."""
    starts = [[0.0] * len(row) for row in program.ranks]
    ends = [[0.0] * len(row) for row in program.ranks]
    clock = [0.0] * len(program.ranks)
    arrival: dict[Place, float] = {}  # when the result of a SEND, a copy or a collective's last rank arrives
    free: dict[Hashable, float] = defaultdict(float)  # when a link, a copy's direction, a port or a group is free
    reached: dict[tuple[int, int], list[float]] = defaultdict(list)  # when the walk came to each RECV of a link

    for rank, k, ins, waited, joined in order(program):
        for _, writer, source in waited:
            ends[rank][writer] = max(arrival[source], starts[rank][writer])
            clock[rank] = max(clock[rank], arrival[source])
        if ins is None:
            continue
        starts[rank][k] = now = clock[rank]
        if ins.op is Op.SEND or ins.op in COPIES:
            # (a link has its op in its name: it is not the group of the same two ranks)
            lanes: list[Hashable] = [(Op.SEND, rank, ins.peer) if ins.op is Op.SEND else (rank, ins.stream)]
            lanes += [(rank, PORT)] if ins.stream == PORT else []
            occupied, delay = costs.transfer(rank, ins)
            starts[rank][k] = max([now, *(free[lane] for lane in lanes)])
            ends[rank][k] = starts[rank][k] + occupied
            free |= dict.fromkeys(lanes, ends[rank][k])
            arrival[rank, k] = ends[rank][k] + delay
        elif ins.op is Op.RECV:  # it is posted when the walk reaches the RECV `receives_ahead` places before it
            reached[ins.peer, rank].append(now)
            posted = len(reached[ins.peer, rank]) - 1 - program.receives_ahead
            starts[rank][k] = reached[ins.peer, rank][posted] if posted >= 0 else 0.0
        elif not ins.group:
            ends[rank][k] = clock[rank] = now + costs.compute(rank, ins)
        elif joined:
            begin = free[ins.group]
            end = max([begin, *(starts[r][i] for r, i in joined)]) + costs.collective(ins)
            for r, i in joined:
                starts[r][i], ends[r][i] = max(starts[r][i], begin), end
            free[ins.group] = arrival[rank, k] = end
    return starts, ends
