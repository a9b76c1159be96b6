"""The simulator's rule on a machine with fewer cores than ranks: ranks that compute at once share the cores.

    4 ranks, 2 cores     each rank keeps to one core (affinity.py); k that compute on one run at the speed 1/k
    3 ranks, 2 cores     the system moves them; while k compute, each of them runs at the speed min(1, 2/k)
    1.9 cores            as 2, but whenever ranks compute at once they get 5 % less done: they are in each other's way

Speeds now depend on what all ranks do at the same moment, so time has to go forward for all of them together: from
one event (a compute instruction ends, a message arrives) to the next. Slower than `simulate` without `cores`, and
equal to it when there are cores enough.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence

from minipar.costs.protocol import Costs
from minipar.costs.unit import UnitCosts
from minipar.prediction.streams import GroupStream, Link, Slot
from minipar.program import COPIES, PORT, Op, Program, Value

_LATENCY = 0.05  # of a message, in forwards of a rank
_MOST = 20_000  # instructions: up to here best_way takes less than half a second


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ways(ranks: int, cores: Sequence[int]) -> list[list[int]]:
    """How ranks can be dealt to cores: there and back, and round. None where they are better left to the system: cores
    enough, or some that would have a rank more than others."""
    if ranks <= len(cores) or ranks % len(cores):
        return []
    there, back = list(cores), list(reversed(cores))
    turns = range(ranks // len(cores))
    return [[core for turn in turns for core in (back if turn % 2 else there)], there * len(turns)]


def best_way(program: Program, cores: float) -> int:
    """In which of the `ways` of affinity.py the program's ranks share cores with the least time, if all layers are
    equal: Chimera's first and last rank, say, are busy at the same times, and better not on one core.

    The first one where ranks send each other nothing, decide as they run or serve, and of very long programs.
    """
    found = ways(len(program.ranks), range(math.ceil(cores)))
    fixed = program.in_flight is None and program.serving is None and sum(map(len, program.ranks)) <= _MOST
    sends = any(ins.op is Op.SEND for row in program.ranks for ins in row)
    if not found or found[0] == found[1] or not fixed or not sends:
        return 0

    def time(way: int) -> float:
        _, ends = walk_shared(program, UnitCosts(program, latency=_LATENCY), cores, way)
        return max(max(row, default=0.0) for row in ends)

    return min(range(len(found)), key=time)


def _speeds(working: Collection[int], homes: list[int] | None, cores: float) -> dict[int, float]:
    """How fast each of the ranks that compute goes on, of 1 for a rank alone. `homes`: the core that each keeps to."""
    if homes is None:
        return dict.fromkeys(working, min(1.0, cores / len(working)) if working else 1.0)
    share = cores / math.ceil(cores) if len(working) > 1 else 1.0
    busy = [homes[rank] for rank in working]
    return {rank: share / busy.count(homes[rank]) for rank in working}


def walk_shared(
    program: Program, costs: Costs, cores: float, way: int = 0
) -> tuple[list[list[float]], list[list[float]]]:
    """Start and end of every instruction, as far as the ranks get (all the way, in a program that verifies).

    way   in which ranks are dealt to cores, of the `ways` of affinity.py
    """
    count = len(program.ranks)
    found = ways(count, range(math.ceil(cores)))
    homes = found[way] if found else None
    starts = [[0.0] * len(row) for row in program.ranks]
    ends = [[0.0] * len(row) for row in program.ranks]
    place = [0] * count
    working: dict[int, float] = {}  # rank -> seconds of work left, at full speed
    pending: list[dict[Value, Slot]] = [{} for _ in range(count)]
    links: dict[tuple[int, int], Link] = {}
    groups: dict[tuple[int, ...], GroupStream] = {}
    lanes: dict[tuple[int, str], Link] = {}
    ports = [0.0] * count
    now = 0.0

    def wait_until(rank: int) -> float | None:
        """When what the rank's next instruction reads is there: a time, or None while that is unknown."""
        latest = 0.0
        for value in program.ranks[rank][place[rank]].reads:
            if value in pending[rank]:
                arrivals, k, writer = pending[rank][value]
                if len(arrivals) <= k:
                    return None
                ends[rank][writer] = max(arrivals[k], starts[rank][writer])
                latest = max(latest, arrivals[k])
        return latest

    def advance(rank: int) -> bool:
        """Walk a rank at the time `now` until it computes or waits; whether it moved."""
        row, first = program.ranks[rank], place[rank]
        while place[rank] < len(row) and rank not in working:
            index, ins = place[rank], row[place[rank]]
            if ins.op is not Op.RECV:
                due = wait_until(rank)
                if due is None or due > now:
                    break
                for value in ins.reads:
                    pending[rank].pop(value, None)
            starts[rank][index] = now
            if ins.op is Op.SEND:
                link = links.setdefault((rank, ins.peer), Link())
                free = max(now, ports[rank]) if ins.stream == PORT else now
                starts[rank][index], ends[rank][index] = link.send(free, *costs.transfer(rank, ins))
                if ins.stream == PORT:
                    ports[rank] = ends[rank][index]
            elif ins.op is Op.RECV:
                link = links.setdefault((ins.peer, rank), Link())
                k, starts[rank][index] = link.reach(now, program.receives_ahead)
                for value in ins.writes:
                    pending[rank][value] = (link, k, index)
            elif ins.op in COPIES:
                lane = lanes.setdefault((rank, ins.stream), Link())
                starts[rank][index], ends[rank][index] = lane.send(now, *costs.transfer(rank, ins))
                for value in ins.writes:
                    pending[rank][value] = (lane, len(lane) - 1, index)
            elif ins.group:  # a collective
                stream = groups.setdefault(ins.group, GroupStream(ins.group))
                k = stream.join(rank, index, now, ins, costs, starts, ends)
                for value in ins.writes:
                    if value not in ins.frees:
                        pending[rank][value] = (stream, k, index)
            else:
                working[rank] = costs.compute(rank, ins)
                break
            place[rank] += 1
        return place[rank] > first

    while True:
        while sum(advance(rank) for rank in range(count)):
            pass
        speed = _speeds(working, homes, cores)
        moments = [now + left / speed[rank] for rank, left in working.items()]
        for rank in range(count):
            if rank not in working and place[rank] < len(program.ranks[rank]):
                due = wait_until(rank)
                if due is not None:
                    moments.append(due)
        if not moments:
            break
        then = min(moments)
        done = [rank for rank, left in working.items() if now + left / speed[rank] <= then]
        for rank in working:
            working[rank] -= (then - now) * speed[rank]
        now = then
        for rank in done:
            del working[rank]
            ends[rank][place[rank]] = now
            place[rank] += 1

    for rank in range(count):
        for arrivals, k, writer in pending[rank].values():
            if len(arrivals) > k:
                ends[rank][writer] = max(arrivals[k], starts[rank][writer])
    return starts, ends
