"""The simulator's rule on a machine with fewer cores than ranks: ranks that compute at the same time share the cores.

    4 ranks, 2 cores     the system moves the ranks; while k of them compute, each has the speed min(1, 2/k)
    1.9 cores            as 2 cores, but ranks that compute at the same time slow each other down by 5 %

Speeds now depend on what all ranks do at the same moment. So time must advance for all ranks together, from one event
(a compute instruction ends, a message arrives) to the next (program/event_loop.py). This is slower than `simulate`
without `cores`, and gives the same times if there are enough cores. Ranks that all do the same need no such clock: they
always compute at the same time, at the same speed.

The same clock serves ranks of several hosts, whose messages share the cables between the hosts: a message, or a
collective, waits until those that were there before leave it room.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Hashable
from functools import partial

from minipar.costs.protocol import Costs, SharingCosts
from minipar.prediction.streams import GroupStream, Link, Slot
from minipar.program import COPIES, PORT, Instruction, Op, Program, Value
from minipar.program.event_loop import EventLoop


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def speed_of_each(working: int, cores: float) -> float:
    """The speed of each rank while so many compute; 1 is that of a rank alone."""
    return min(1.0, cores / working) if working else 1.0


def _speeds(working: Collection[int], cores: float) -> dict[int, float]:
    return dict.fromkeys(working, speed_of_each(len(working), cores))


def walk_shared(program: Program, costs: Costs, cores: float) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of every instruction. If the program does not verify, ranks may stop before the end."""
    count = len(program.ranks)
    loop = EventLoop(partial(_speeds, cores=cores))
    starts = [[0.0] * len(row) for row in program.ranks]
    ends = [[0.0] * len(row) for row in program.ranks]
    place = [0] * count
    pending: list[dict[Value, Slot]] = [{} for _ in range(count)]
    links: dict[tuple[int, int], Link] = defaultdict(Link)
    lanes: dict[tuple[int, str], Link] = defaultdict(Link)
    groups: dict[tuple[int, ...], GroupStream] = {}
    ports = [0.0] * count
    taken: dict[Hashable, float] = defaultdict(float)  # until when a cable between hosts has no room
    sharing = costs if isinstance(costs, SharingCosts) and costs.shares else None

    def cables(rank: int, ins: Instruction) -> tuple[Collection[Hashable], float]:
        return sharing.cables(rank, ins) if sharing is not None else ((), 0.0)

    def room(lanes: Collection[Hashable]) -> float:
        return max((taken[lane] for lane in lanes), default=0.0)

    def arrived(rank: int, value: Value) -> bool:
        """Whether a value has arrived. If not, the rank continues when it arrives."""
        if value not in pending[rank]:
            return True
        stream, k, writer = pending[rank][value]
        if len(stream) <= k:
            stream.waiters.append(rank)
        elif stream[k] > loop.now:
            loop.at(stream[k], partial(advance, rank))
        else:
            ends[rank][writer] = max(stream[k], starts[rank][writer])
            del pending[rank][value]
            return True
        return False

    def wake(stream: Link) -> None:
        for rank in stream.waiters:
            loop.at(loop.now, partial(advance, rank))
        stream.waiters.clear()

    def finish(rank: int) -> None:
        ends[rank][place[rank]] = loop.now
        place[rank] += 1
        advance(rank)

    def advance(rank: int) -> None:
        """Walk a rank until it computes or waits."""
        row, now = program.ranks[rank], loop.now
        while place[rank] < len(row):
            index, ins = place[rank], row[place[rank]]
            if not all(arrived(rank, value) for value in ins.reads):
                return
            starts[rank][index] = now
            if ins.op is Op.SEND:
                link = links[rank, ins.peer]
                lanes_taken, seconds = cables(rank, ins)
                free = max(now, ports[rank]) if ins.stream == PORT else now
                free = max(free, room(lanes_taken))
                starts[rank][index], ends[rank][index] = link.send(free, *costs.transfer(rank, ins))
                taken.update(dict.fromkeys(lanes_taken, starts[rank][index] + seconds))
                if ins.stream == PORT:
                    ports[rank] = ends[rank][index]
                wake(link)
            elif ins.op is Op.RECV:
                link = links[ins.peer, rank]
                k, starts[rank][index] = link.reach(now, program.receives_ahead)
                pending[rank] |= dict.fromkeys(ins.writes, (link, k, index))
            elif ins.op in COPIES:
                lane = lanes[rank, ins.stream]
                starts[rank][index], ends[rank][index] = lane.send(now, *costs.transfer(rank, ins))
                pending[rank] |= dict.fromkeys(ins.writes, (lane, len(lane) - 1, index))
            elif ins.group:  # a collective
                stream = groups.get(ins.group) or groups.setdefault(ins.group, GroupStream(ins.group))
                lanes_taken, seconds = cables(rank, ins)
                k = stream.join(rank, index, now, ins, costs, starts, ends, room(lanes_taken))
                if lanes_taken and len(stream) > k:
                    taken.update(dict.fromkeys(lanes_taken, stream[k] - costs.collective(ins) + seconds))
                pending[rank] |= {value: (stream, k, index) for value in ins.writes if value not in ins.frees}
                wake(stream)
            else:
                return loop.work(rank, costs.compute(rank, ins), partial(finish, rank))
            place[rank] += 1

    for rank in range(count):
        loop.at(0.0, partial(advance, rank))
    loop.run()
    for rank in range(count):
        for arrivals, k, writer in pending[rank].values():
            if len(arrivals) > k:
                ends[rank][writer] = max(arrivals[k], starts[rank][writer])
    return starts, ends
