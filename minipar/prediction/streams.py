"""What ranks share, simulated or emulated: links, which carry messages in order, and groups, which run collectives in
order.

A collective occupies its group as a message occupies its link: it begins when its last rank has joined it and the one
before it has ended.
"""

from __future__ import annotations

from minipar.costs.protocol import Costs
from minipar.program import Instruction


class Link(list[float]):
    """A link's arrival times, in order of its sends; and who waits for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 0.0
        self.reached: list[float] = []
        self.waiters: list[int] = []

    def __bool__(self) -> bool:
        return True

    def send(self, now: float, occupied: float, delay: float) -> tuple[float, float]:
        """A message enters the link as soon as the link is free: when it begins and ends to occupy it."""
        start = now if now > self.free else self.free
        self.free = end = start + occupied
        self.append(end + delay)
        return start, end

    def reach(self, now: float, ahead: int) -> tuple[int, float]:
        """The receiver's walk reaches its next RECV: its position, and when it was posted, `ahead` receives before."""
        k = len(self.reached)
        self.reached.append(now)
        return k, self.reached[k - ahead] if k >= ahead else 0.0


class GroupStream(Link):
    """End times of a group's collectives, in order; the k-th is known when all its ranks have joined it."""

    def __init__(self, group: tuple[int, ...]) -> None:
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
    ) -> int:
        """A rank starts its next collective: its position. The last rank to join fixes its start and end."""
        k = self.joined[rank]
        self.joined[rank] = k + 1
        members = self.open.setdefault(k, [])
        members.append((rank, index, now))
        if len(members) == len(self.joined):
            before = self.free
            _, end = self.send(max(t for _, _, t in members), costs.collective(ins), 0.0)
            for r, i, t in members:
                starts[r][i], ends[r][i] = max(t, before), end
            del self.open[k]
        return k


# Where a value on its way comes from: its link or group, the position there, the index of the instruction.
Slot = tuple[Link, int, int]
