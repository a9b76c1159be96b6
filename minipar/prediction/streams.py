"""What ranks share, simulated or emulated: links, which carry messages in order, and groups, which run collectives in
order.

A collective occupies its group as a message occupies its link: it begins when its last rank has joined it and the one
before it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from minipar.costs.protocol import Costs
from minipar.program import Instruction


class Link(list[float]):
    """The arrival times of a link's messages, in order.

    free      when the link is free again
    reached   when the receiver's walk reached each RECV
    waiters   ranks that wait for the next arrival
    """

    def __init__(self) -> None:
        super().__init__()
        self.free = 0.0
        self.reached: list[float] = []
        self.waiters: list[int] = []

    def __bool__(self) -> bool:
        return True

    def send(self, now: float, occupied: float, delay: float) -> tuple[float, float]:
        """Send a message as soon as the link is free. Returns when it begins and when it ends to occupy the link."""
        start = now if now > self.free else self.free
        self.free = end = start + occupied
        self.append(end + delay)
        return start, end

    def reach(self, now: float, ahead: int) -> tuple[int, float]:
        """The receiver's walk reaches its next RECV. Returns the RECV's number, and when it was posted: when the walk
        reached the RECV `ahead` places before it."""
        k = len(self.reached)
        self.reached.append(now)
        return k, self.reached[k - ahead] if k >= ahead else 0.0


class GroupStream(Link):
    """End times of a group's collectives, in order; the k-th is known when all its ranks have joined it."""

    def __init__(self, group: Iterable[int]) -> None:
        super().__init__()
        self.joined = dict.fromkeys(group, 0)
        self.open: dict[int, list[tuple[int, int, float]]] = {}

    def join(
        self,
        rank: int,
        index: int,
        now: float,
        ins: Instruction,
        costs: Costs,
        starts: list[list[float]],
        ends: list[list[float]],
        room: float = 0.0,
    ) -> int:
        """A rank joins its next collective. Returns the collective's number. When the last rank joins, start and end of
        the collective become known. `room`: when the cables that it needs are free."""
        k = self.joined[rank]
        self.joined[rank] = k + 1
        members = self.open.setdefault(k, [])
        members.append((rank, index, now))
        if len(members) == len(self.joined):
            before = max(self.free, room)
            _, end = self.send(max(room, *(t for _, _, t in members)), costs.collective(ins), 0.0)
            for r, i, t in members:
                starts[r][i], ends[r][i] = max(t, before), end
            del self.open[k]
        return k


# Where a value that is under way comes from: its link or group, its number there, the index of the instruction.
Slot = tuple[Link, int, int]
