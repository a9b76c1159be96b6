"""simulate(program, costs): what would happen, and when. A predicted Trace, without running anything.

The rule is the executor's, word for word (ARCHITECTURE.md, "How a program runs"):

  * a rank walks its list in order; a compute instruction starts when what it reads is there and the rank is free
  * transfers and collectives are started when the walk reaches them and awaited at the first read of what they write
  * a message occupies its link for bytes/bandwidth and arrives a latency later; messages of a link go in order
  * a collective ends at the latest arrival of its ranks plus its cost; collectives of a group go in order

Nothing is shared between ranks but links and groups, so no global clock is needed: each rank is walked as far as it
can go, and again when what it waits for is known. That makes the simulation linear in the number of instructions.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, Protocol

from minipar.costs.unit import UnitCosts
from minipar.errors import ProgramError
from minipar.program import Instruction, Op, Program, Value
from minipar.trace import Trace


class Costs(Protocol):
    """What a simulation must know of the devices and the model: seconds (or any one unit of time) and bytes."""

    def compute(self, rank: int, ins: Instruction) -> float: ...
    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]: ...
    def collective(self, ins: Instruction) -> float: ...
    def size(self, rank: int, value: Value) -> float: ...


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    input_gradient: float | None = None,
    weight_gradient: float | None = None,
    latency: float = 0.0,
    stage_factors: Sequence[float] = (),
) -> Trace:
    """The predicted trace of a program.

    costs     what things cost, such as a profile's; default `UnitCosts` of the keywords that follow: times of one
              micro-batch on one rank's whole share of the layers, the delay of a message, factors per stage
    Raises ProgramError if the program cannot run to its end (`verify` says why).
    """
    if costs is None:
        costs = UnitCosts(program, forward, backward, input_gradient, weight_gradient, latency, tuple(stage_factors))
        unit = "activations"
    else:
        unit = "bytes"
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of live tuples make every collection a full scan
    try:
        starts, ends = _walk(program, costs)
    finally:
        if collecting:
            gc.enable()
    return Trace(program, starts, ends, costs.size, "predicted", unit)


def _walk(program: Program, costs: Costs) -> tuple[list[list[float]], list[list[float]]]:
    count = len(program.ranks)
    starts = [[0.0] * len(instructions) for instructions in program.ranks]
    ends = [[0.0] * len(instructions) for instructions in program.ranks]
    place = [0] * count
    clock = [0.0] * count
    # value -> (arrivals of its link, position among them, index of its RECV) or (its collective, -1, index)
    pending: list[dict[Value, tuple[list[Any], int, int]]] = [{} for _ in range(count)]
    links: dict[tuple[int, int], _Link] = {}
    groups: dict[tuple[int, ...], _GroupStream] = {}
    ahead = program.receives_ahead
    SEND, RECV, ALL_REDUCE = Op.SEND, Op.RECV, Op.ALL_REDUCE

    ready = list(range(count - 1, -1, -1))
    while ready:
        rank = ready.pop()
        instructions, begin, end = program.ranks[rank], starts[rank], ends[rank]
        waiting, now, index, size = pending[rank], clock[rank], place[rank], len(program.ranks[rank])
        while index < size:
            ins = instructions[index]
            op = ins[0]
            if waiting and op is not RECV:
                blocked = False
                for value in ins[4]:
                    if value in waiting:
                        arrivals, k, writer = waiting[value]
                        if len(arrivals) <= k:
                            blocked = True
                            break
                        arrival = arrivals[k]
                        end[writer] = arrival
                        if arrival > now:
                            now = arrival
                        del waiting[value]
                if blocked:
                    arrivals.waiters.append(rank)
                    break
            if op is SEND:
                link = links.get((rank, ins.peer)) or links.setdefault((rank, ins.peer), _Link())
                occupied, delay = costs.transfer(rank, ins)
                begin[index] = start = now if now > link.free else link.free
                end[index] = link.free = start + occupied
                link.append(start + occupied + delay)
                if link.waiters:
                    ready += link.waiters
                    link.waiters = []
            elif op is RECV:
                link = links.get((ins.peer, rank)) or links.setdefault((ins.peer, rank), _Link())
                k = len(link.reached)
                link.reached.append(now)
                begin[index] = end[index] = link.reached[k - ahead] if k >= ahead else 0.0  # when it was posted
                waiting[ins.writes[0]] = (link, k, index)
            elif op is ALL_REDUCE:
                stream = groups.get(ins.group) or groups.setdefault(ins.group, _GroupStream(ins.group))
                begin[index] = now
                k = stream.join(rank, index, now, ins, costs, starts)
                for value in ins.writes:
                    waiting[value] = (stream, k, index)
                if stream.waiters and len(stream) > k:
                    ready += stream.waiters
                    stream.waiters = []
            else:
                begin[index] = now
                now += costs.compute(rank, ins)
                end[index] = now
            index += 1
        place[rank], clock[rank] = index, now

    for rank in range(count):
        if place[rank] < len(program.ranks[rank]):
            raise ProgramError(
                f"rank {rank} stops for ever at instruction {place[rank]} `{program.ranks[rank][place[rank]]}`; "
                "verify(program) says why"
            )
        for arrivals, k, writer in pending[rank].values():  # received or reduced, but read by nothing
            ends[rank][writer] = arrivals[k]
    return starts, ends


class _Link(list[float]):
    """A link's arrival times in order, when it is free again, when its receives were reached, and who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 0.0
        self.reached: list[float] = []
        self.waiters: list[int] = []


class _GroupStream(list[float]):
    """End times of a group's collectives in order; the k-th is known when all its ranks have joined it."""

    def __init__(self, group: tuple[int, ...]) -> None:
        super().__init__()
        self.group = group
        self.joined = dict.fromkeys(group, 0)
        self.open: dict[int, list[tuple[int, int, float]]] = {}
        self.waiters: list[int] = []

    def join(
        self, rank: int, index: int, now: float, ins: Instruction, costs: Costs, starts: list[list[float]]
    ) -> int:
        k = self.joined[rank]
        self.joined[rank] = k + 1
        members = self.open.setdefault(k, [])
        members.append((rank, index, now))
        if len(members) == len(self.group):
            free = self[-1] if self else 0.0
            for r, i, t in members:
                starts[r][i] = max(t, free)
            self.append(max(free, max(t for _, _, t in members)) + costs.collective(ins))
            del self.open[k]
        return k
