"""The driver's check whether ranks wait for each other for ever.

A rank makes progress when it computes, begins another wait, or ends. It is a deadlock if all ranks that have not ended
wait in an operation of the communicator, or are stopped, and none has made progress for as long as the driver's
patience. A rank that computes is never part of a deadlock, however long it takes, and neither is one that sleeps, reads
or waits for input. A rank that waits in torch's own communication is recognised by its stack, which is read only when
the rank has used no CPU time for that long.

A rank that waits for its GPU spins, and uses CPU time; its notes say that it waits (device_waits.py). Its GPU may wait
for another rank, or compute. So it counts as waiting only after several times the patience, in one and the same call.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from minipar.cluster import device_waits, stacks
from minipar.cluster.notes import Page
from minipar.cluster.stacks import Frame

_STOPPED = "T"
_SHORTEST, _LONGEST = 0.02, 0.5  # seconds between two checks
_FOR_DEVICES = 5  # times the patience, where a rank waits for its GPU: what one call waits for may take long


@dataclass(frozen=True)
class Seen:
    """One rank at one check. `since`: when its wait began, on the clock of time.monotonic; 0.0 if it does not wait."""

    operation: str
    since: float
    ticks: int  # of CPU time
    stopped: bool


class Watchdog:
    """Checks the ranks of one run from time to time. Pauses of the driver itself do not count: it may have been
    stopped, and the ranks with it."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.interval = min(max(patience / 5, _SHORTEST), _LONGEST)
        self._seen: dict[int, Seen] = {}
        self._same = 0.0  # seconds for which nothing has changed
        self._looked = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for the next check."""
        return time.monotonic() - self._looked >= self.interval

    def look(self, ranks: list[tuple[int, int, Page]]) -> dict[int, str] | None:
        """If it is a deadlock: what each of these (rank, pid, page) waits for; else None. They are all ranks that have
        not ended."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        seen = {rank: _see(pid, page) for rank, pid, page in ranks}
        if seen != self._seen:
            self._seen, self._same = seen, 0.0
            return None
        self._same += min(passed, 2 * self.interval)
        if self._same < self.patience:
            return None
        on_devices = any(device_waits.is_one(one.operation) for one in seen.values() if one.since)
        if on_devices and self._same < self.patience * _FOR_DEVICES:
            return None
        frames = stacks.ask(entry for entry in ranks if not seen[entry[0]].stopped)
        texts = {rank: _describe(seen[rank], frames.get(rank, []), now, self._same) for rank in seen}
        if all(texts.values()):
            return {rank: text or "" for rank, text in texts.items()}
        self._same = 0.0  # one is busy without using CPU time: with a sleep, a file, a device
        return None


def _see(pid: int, page: Page) -> Seen:
    doing = page.read()
    ticks, state = stacks.cpu_and_state(pid)
    if state == _STOPPED:
        return Seen(doing.last, doing.since, 0, True)
    # A wait may use CPU time itself, since it checks whether something has arrived: so its ticks do not count.
    return Seen(doing.operation, doing.since, 0 if doing.since else ticks, False)


def _describe(seen: Seen, frames: list[Frame], now: float, same: float) -> str | None:
    """The wait of a rank in words; None if it does not wait in communication."""
    place = stacks.where(frames)
    below = f"\n{place}" if place else ""
    if seen.stopped:
        last = f", last seen {seen.operation}" if seen.operation else ""
        return f"stopped (SIGSTOP) for at least {same:.1f} s{last}"
    if seen.since:
        return f"{seen.operation}, {_since(now - seen.since)}{below}"
    if stacks.waits_in_torch(frames):
        return f"torch's own {frames[-1][2]}, for at least {same:.1f} s{below}"
    return None


def _since(seconds: float) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    return f"since {moment} ({seconds:.1f} s)"
