"""The driver's check whether ranks wait for each other for ever.

A rank makes progress when it computes, begins another wait, or ends. It is a deadlock if all ranks that have not ended
wait in an operation of the communicator, or are stopped, and none has made progress for as long as the driver's
patience. A rank that computes is never part of a deadlock, however long it takes, and neither is one that sleeps, reads
or waits for input. A rank that waits in torch's own communication is recognised by its stack, which is read only when
the rank has used no CPU time for that long.

Where all ranks are provably blocked, nobody need be patient: after `SURE` seconds it is a deadlock. They are if each
one waits for another in an operation of the communicator that this machine carries, no thread of any rank has run
whenever we looked, and no rank has threads of the user, which may wait for a clock and then send. The making of a group
is doubtful, since ranks then try again from time to time.

A rank that was stopped (SIGSTOP) does not go on by itself. After `STOPPED` seconds it is a deadlock, even where the
others are at work, or the rank has no part in what they do: sooner or later they would wait for it.

A rank that waits for its GPU spins, and uses CPU time; its notes say that it waits (notes.py). Its GPU may wait
for another rank, or compute. So it counts as waiting only after several times the patience, in one and the same call.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from minipar.cluster import stacks
from minipar.cluster.failures import AT_WORK
from minipar.cluster.notes import Page, is_device_wait
from minipar.cluster.stacks import Entry, Frame

_TRIES = 5
_SHORTEST, _LONGEST = 0.02, 0.15  # seconds between two checks
SURE = 3.0  # seconds until ranks that are provably blocked are a deadlock
STOPPED = 0.5  # seconds until a process that was stopped counts as one that does not go on by itself
_OFTEN = 0.05  # seconds between two checks while a rank is stopped
_DOUBTFUL = "the making of a group"
_TICKS = 10  # of CPU time in each second that waits of a rank may use, since some look again and again
_AGAIN = 0.5  # seconds after which the stacks of ranks must be the same, where only these show what ranks wait for
_A_WHILE = 0.5  # seconds; who has waited for so long is not just between two messages
_FOR_DEVICES = 5  # times the patience, where a rank waits for its GPU: what one call waits for may take long


@dataclass(frozen=True)
class Seen:
    """One rank at one check. `since`: when its wait began, on the clock of time.monotonic; 0.0 if it does not wait."""

    operation: str
    since: float
    ticks: int  # of CPU time
    stopped: bool


_STOPPED = Seen("", 0.0, 0, True)


@dataclass(eq=False)
class Watchdog:
    """Checks the ranks of one run from time to time. Pauses of the driver itself do not count: it may have been
    stopped, and the ranks with it.

    patience   in seconds; without end: it never finds a deadlock
    local      whether all messages are carried by this machine's memory and sockets
    """

    patience: float = math.inf
    local: bool = True
    same: float = 0.0  # seconds for which nothing has changed
    lasted: float = 0.0  # seconds for which what `look` found has been so
    _seen: dict[int, Seen] = field(default_factory=dict)
    _stopped: dict[int, float] = field(default_factory=dict)  # for how many seconds each rank has been stopped
    _still: float = 0.0  # seconds for which all have slept, too
    _frames: dict[int, list[Frame]] = field(default_factory=dict)  # the stacks that were read last
    _waiting: dict[int, list[Frame]] = field(default_factory=dict)  # of ranks that seemed to wait in torch's own code
    _used: dict[int, int] = field(default_factory=dict)  # CPU time of each rank when that began
    _looked: float = field(default_factory=time.monotonic)

    @property
    def interval(self) -> float:
        """Seconds between two checks."""
        usual = min(max(self.patience / 5, _SHORTEST), _LONGEST)
        return min(usual, _OFTEN) if self._stopped else usual

    def due(self) -> bool:
        """Whether it is time for the next check."""
        return time.monotonic() - self._looked >= self.interval

    def look(self, ranks: list[Entry], others: list[Entry] | None = None) -> dict[int, str] | None:
        """If it is a deadlock: what each of these (rank, process, page) waits for, or does; else None. They are all
        ranks that have not ended, and the `others` those that have."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * self.interval), now
        seen = {rank: _see(process.pid, page) for rank, process, page in ranks}
        idle = [entry for entry in others or [] if stacks.stopped(entry[1].pid)]
        if found := self._never_go_on([*ranks, *idle], {**seen, **{rank: _STOPPED for rank, *_ in idle}}, passed):
            return found
        if seen != self._seen:
            self._seen, self.same, self._still, self._waiting = seen, 0.0, 0.0, {}
            return None
        self.same += passed
        self.lasted = self.same
        self._note_stillness(passed, [*ranks, *(others or [])])
        if self._still >= SURE and self._is_certain(ranks, [*ranks, *(others or [])]):
            return self._waits(ranks, seen)
        if self.same < self.patience:
            return None
        on_devices = any(is_device_wait(one.operation) for one in seen.values() if one.since)
        if on_devices and self.same < self.patience * _FOR_DEVICES:
            return None
        found = self._waits(ranks, seen)
        if found is None:
            self.same = 0.0  # one is busy without using CPU time: with a sleep, a file, a device
            return None
        # A rank may have begun to wait just now, and go on.
        before, by_stack = self._waiting, [rank for rank, one in seen.items() if not (one.since or one.stopped)]
        self._waiting = {rank: self._frames[rank] for rank in by_stack}
        if self._waiting == before:
            return found
        self.same -= min(self.same, _AGAIN)
        return None

    def _is_certain(self, ranks: list[Entry], living: list[Entry]) -> bool:
        """Whether no thread of the user can wake these ranks, which have all slept. One that sent something and ended
        since they were looked at has woken a rank: that one runs now, or has gone on."""
        if any(map(stacks.has_foreign_threads, living)):
            return False
        return {rank: _see(process.pid, page) for rank, process, page in ranks} == self._seen and _sleep(living)

    def _never_go_on(self, ranks: list[Entry], seen: dict[int, Seen], passed: float) -> dict[int, str] | None:
        """What each rank does, if some of them have been stopped for too long."""
        if self.patience == math.inf:
            return None
        before = self._stopped
        self._stopped = {rank: before[rank] + passed if rank in before else 0.0 for rank in seen if seen[rank].stopped}
        self.lasted = max(self._stopped.values(), default=-1.0)
        return self._doings(ranks, seen) if self.lasted >= min(self.patience, STOPPED) else None

    def waits(self, ranks: list[Entry]) -> dict[int, str] | None:
        """What each of these ranks waits for, if all of them have waited for a while; else None."""
        seen = {rank: _see(process.pid, page) for rank, process, page in ranks}
        if seen != self._seen or not seen:
            return None
        since = [time.monotonic() - one.since if one.since else self.same for one in seen.values()]
        return self._waits(ranks, seen) if min(since) >= _A_WHILE else None

    def _waits(self, ranks: list[Entry], seen: dict[int, Seen]) -> dict[int, str] | None:
        """What each rank waits for; None unless all of them wait."""
        found = self._doings(ranks, seen)
        return None if not found or AT_WORK in found.values() else found

    def _doings(self, ranks: list[Entry], seen: dict[int, Seen]) -> dict[int, str]:
        """What each rank waits for, or that it is at work."""
        now = time.monotonic()
        frames = self._frames = stacks.ask(entry for entry in ranks if not seen[entry[0]].stopped)
        same = {rank: self._stopped.get(rank, self.same) for rank in seen}
        return {rank: _describe(seen[rank], frames.get(rank, []), now, same[rank]) or AT_WORK for rank in seen}

    def _note_stillness(self, passed: float, ranks: list[Entry]) -> None:
        """Count for how long all ranks have slept, if all that have not ended wait for another one."""
        sure = self.local and self.patience < math.inf and all(_is_sure(one) for one in self._seen.values())
        used = {rank: stacks.cpu_and_state(process.pid)[0] for rank, process, _ in ranks} if sure else {}
        if not self._still:
            self._used = used
        bound = _TICKS * (self._still + passed + 1)
        quiet = sure and all(used[rank] - self._used.get(rank, 0) <= bound for rank in used)
        self._still = self._still + passed if quiet and _sleep(ranks) else 0.0


def _is_sure(seen: Seen) -> bool:
    doubtful = is_device_wait(seen.operation) or seen.operation.startswith(_DOUBTFUL)
    return bool(seen.since) and not seen.stopped and not doubtful


def _sleep(ranks: list[Entry]) -> bool:
    """Whether no thread of these ranks runs. Waits that look from time to time are asked again."""
    for _ in range(_TRIES):
        if all(stacks.sleeps(process.pid) for _, process, _ in ranks):
            return True
        time.sleep(0.001)
    return False


def _see(pid: int, page: Page) -> Seen:
    doing = page.read()
    if stacks.stopped(pid):
        return Seen(doing.last, doing.since, 0, True)
    ticks, _ = stacks.cpu_and_state(pid)
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
