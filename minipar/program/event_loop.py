"""The clock of whatever must be decided as time goes by: ranks that share cores, servers, pipelines that never flush.

    rank 0   |--- F mb0 ---|--- F mb1 ---          while both compute on one core, each gets half of it
    rank 1        |--- F mb0 ---|

`order` (rule.py) needs no clock. Where what happens next depends on what all ranks do at the same moment, time has to
go forward for all of them together, from one event to the next. An event is a function that is called at its time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

Event = Callable[[], object]
Speeds = Callable[[Collection[int]], Mapping[int, float]]


def full_speed(working: Collection[int]) -> Mapping[int, float]:
    """Every rank has a core of its own."""
    return dict.fromkeys(working, 1.0)


@dataclass
class EventLoop:
    """Calls events in the order of their times; of one moment, first by their `turn`, then as they were announced.

    speeds   of the ranks that are at work at the same moment: how fast each goes on, of 1 for a rank alone
    now      the time that has been reached
    """

    speeds: Speeds = full_speed
    now: float = 0.0
    _announced: list[tuple[float, tuple[int, ...], int, Event]] = field(default_factory=list)
    _working: dict[int, float] = field(default_factory=dict)  # rank -> seconds of work left, at full speed
    _then: dict[int, Event] = field(default_factory=dict)
    _count: int = 0

    def at(self, time: float, event: Event, turn: tuple[int, ...] = ()) -> None:
        """Call `event` at this time."""
        heapq.heappush(self._announced, (time, turn, self._count, event))
        self._count += 1

    def work(self, rank: int, seconds: float, then: Event) -> None:
        """Let a rank that does nothing else work for so long, at full speed; then call `then`."""
        self._working[rank], self._then[rank] = max(0.0, seconds), then

    def is_working(self, rank: int) -> bool:
        """Whether the rank is at work."""
        return rank in self._working

    def run(self) -> None:
        """Until nothing is announced and nobody works."""
        working, announced = self._working, self._announced
        while working or announced:
            if not working:
                self.now, _, _, event = heapq.heappop(announced)
                event()
                continue
            speed = self.speeds(working)
            left = {rank: seconds / speed[rank] for rank, seconds in working.items()}
            first = min(left, key=left.__getitem__)
            end = self.now + left[first]
            until = min(end, announced[0][0]) if announced else end
            for rank in working:
                working[rank] = max(0.0, working[rank] - (until - self.now) * speed[rank])
            self.now = until
            if announced and announced[0][0] <= until:
                heapq.heappop(announced)[3]()
            else:
                del working[first]
                self._then.pop(first)()
