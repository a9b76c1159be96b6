"""The clock for decisions that depend on time: ranks that share cores, servers, pipelines that never flush.

    rank 0   |--- F mb0 ---|--- F mb1 ---          while both compute on one core, each gets half of it
    rank 1        |--- F mb0 ---|

`order` (rule.py) needs no clock. But sometimes the next event depends on what all ranks do at the same moment. Then
time must advance for all ranks together, from one event to the next. An event is a function that is called at its time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

Event = Callable[[], object]
Speeds = Callable[[Collection[int]], Mapping[int, float]]


def full_speed(working: Collection[int]) -> Mapping[int, float]:
    """The speeds if every rank has a core of its own."""
    return dict.fromkeys(working, 1.0)


@dataclass
class EventLoop:
    """Calls events in the order of their times. Events of the same time are called in order of `turn`, then in the
    order in which they were announced.

    speeds   gives the speed of each rank from the set of working ranks; 1 is full speed
    now      the present time
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
        """Let an idle rank work for as long as `seconds` take at full speed; then call `then`."""
        self._working[rank], self._then[rank] = max(0.0, seconds), then

    def is_working(self, rank: int) -> bool:
        """Whether the rank is at work."""
        return rank in self._working

    def run(self) -> None:
        """Run until no event is announced and no rank works."""
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
