"""An emulated device, inside a rank: real work, real messages, but nothing ends before the device would have ended it.

    device     |--------- F 0:2 mb0 ---------|          `now`: where the emulated device is in time
    real work  |--work--|.......sleep........|          on the clock that all ranks of a machine share
    message                                  |--bytes/bandwidth--|--latency--| arrives

Short delays do not add up: an instruction that is woken late still ends when its device would have. Real work that
takes longer than the emulated time cannot be hidden: it counts as an overrun, and the device goes on from the clock.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from minipar.cluster import threads
from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle
from minipar.prediction.program_costs import ProgramCosts
from minipar.prediction.streams import Link
from minipar.program import COLLECTIVES, COMPUTE, Instruction, Op, tier

# How far the clock may be past the emulated end of an event before the device is put back to the clock: a thread that
# sleeps is woken some tenths of a millisecond late, more where ranks outnumber cores.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Delays:
    """What the driver tells a rank: seconds by index of instruction (absent: as long as it takes), and its links."""

    compute: dict[int, float]
    collective: dict[int, float]
    transfer: dict[int, tuple[float, float]]  # absent: from the bytes of the message
    links: bool  # whether messages and collectives are delayed at all
    bandwidth: float | None
    latency: float
    host_bandwidth: float | None = None
    disk_bandwidth: float | None = None


def delays(costs: ProgramCosts, rank: int) -> Delays:
    """The delays of one rank."""
    row = list(enumerate(costs.program.ranks[rank]))
    return Delays(
        {k: costs.compute(rank, ins) for k, ins in row if ins.op in COMPUTE and costs.delays(ins)},
        {k: costs.collective(ins) for k, ins in row if ins.op in COLLECTIVES and costs.device.links},
        {
            k: costs.transfer(rank, ins)
            for k, ins in row
            if (ins.op is Op.SEND and costs.device.messages_by_costs) or (ins.op is Op.PUSH and costs.device.links)
        },
        costs.device.links,
        costs.device.bandwidth,
        costs.device.latency or 0.0,
        costs.device.host_bandwidth,
        costs.device.disk_bandwidth,
    )


@dataclass(frozen=True)
class Pacing:
    """What the driver tells emulated parameter servers.

    replies   of each server what its answer to a worker's step takes: (seconds on the link, latency). By worker and
              step
    updates   seconds that an update takes on each server; None: as long as it takes
    """

    replies: tuple[dict[tuple[int, int], tuple[float, float]], ...]
    updates: tuple[float, ...] | None


@dataclass
class Pace:
    """An emulated parameter server: one thread that receives, updates and sends, one thing after another.

    Real work is done at once, but counts as done when the device would have done it. Times are of the clock that all
    processes of a machine share.

    now    the emulated time of the event that is being handled
    busy   until when the device is busy
    """

    now: float = 0.0
    busy: float = 0.0
    _timers: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def hear(self, moment: float) -> None:
        """A message came at this emulated time; 0 means now."""
        self.now = moment or time.perf_counter()

    def later(self, moment: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (moment, next(self._number), then))

    def work(self, seconds: float, then: Callable[[float, float], None]) -> float:
        """Keep the device busy for `seconds` after all earlier work; returns when that ends. `then` is called with
        its begin and end, when the clock has reached the end."""
        begin = max(self.now, self.busy)
        self.busy = end = begin + seconds
        self.later(end, lambda: then(begin, end))
        return end

    def left(self, most: float) -> float:
        """Seconds until the next thing is due, at most `most`."""
        return max(0.0, min(most, self._timers[0][0] - time.perf_counter())) if self._timers else most

    @property
    def idle(self) -> bool:
        return not self._timers

    def go_on(self) -> bool:
        """Do the next thing if it is due; returns whether it was."""
        clock = time.perf_counter()
        if not self._timers or self._timers[0][0] > clock:
            return False
        moment, _, then = heapq.heappop(self._timers)
        self.now = moment if clock - moment < TOLERANCE else clock
        then()
        return True


@dataclass
class Joined:
    """A collective that this rank has joined, and when each rank did."""

    seconds: float  # that it takes
    times: Tensor  # emulated time of joining, per rank of the group; complete when `handle` is
    handle: Handle
    before: Joined | None  # the group's collective before it, in this pass
    last: float | None = None  # when the last rank did, once that is known
    end: float | None = None  # once that is known

    def arrived(self) -> None:
        """The times of all ranks are there."""
        self.last = float(self.times.max())


@dataclass
class EmulatedDevice:
    """The emulated device of one rank: its time, its links, and which instructions took longer than they should."""

    delays: Delays
    now: float = 0.0
    links: dict[int | str, Link] = field(default_factory=lambda: defaultdict(Link))  # by peer, or direction of copies
    latest: dict[tuple[int, ...], Joined] = field(default_factory=dict)  # each group's last collective
    overruns: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """A new pass through the program."""
        self.now = time.perf_counter()
        self.links.clear()
        self.latest.clear()
        self.overruns = []

    def computed(self, index: int) -> None:
        """The real work of a compute instruction is done: wait for the emulated device."""
        duration = self.delays.compute.get(index)
        if duration is None:
            self.now = max(self.now, time.perf_counter())
        else:
            self.wait(self.now + duration, index)

    def sent(self, index: int, peer: int, size: int) -> float:
        """Send a message of `size` bytes now; returns when it arrives."""
        d = self.delays
        occupied, latency = d.transfer.get(index, (size / d.bandwidth if d.bandwidth else 0.0, d.latency))
        self.links[peer].send(self.now, occupied, latency)
        return self.links[peer][-1]

    def copied(self, ins: Instruction, size: int) -> float | None:
        """Begin an OFFLOAD or FETCH of `size` bytes now; returns when it ends. None: when the real copy ends."""
        to_disk = any(tier(value) == "disk" for value in (ins.reads[0], ins.writes[0]))
        rate = self.delays.disk_bandwidth if to_disk else self.delays.host_bandwidth
        if rate is None:
            return None
        return self.links[ins.stream].send(self.now, size / rate, 0.0)[1]

    def join(self, index: int, group: tuple[int, ...], comm: Communicator) -> Joined:
        """This rank starts its next collective in a group, and tells the others when."""
        times = torch.zeros(len(group), dtype=torch.float64)
        times[group.index(comm.rank)] = self.now
        handle = comm.iallreduce(times, group)
        self.latest[group] = joined = Joined(self.delays.collective[index], times, handle, self.latest.get(group))
        return joined

    def wait(self, until: float, index: int) -> None:
        """Go on at the emulated time `until`, or now if that is long past: then the instruction is an overrun."""
        until = max(until, self.now)
        left = until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        if left > -TOLERANCE:
            self.now = until
        else:
            self.overruns.append(index)
            self.now = time.perf_counter()

    def arrived(self, moment: float, index: int) -> None:
        """A message is there: go on when it has arrived on the emulated link, or now where links are not emulated."""
        if self.delays.links:
            self.wait(moment, index)
        else:
            self.now = max(self.now, time.perf_counter())

    def ended(self, joined: Joined | None, index: int) -> None:
        """A collective is done: go on when it has ended on the emulated links, or now where they are not emulated."""
        if joined is None:
            self.now = max(self.now, time.perf_counter())
            return
        for each in _without_end(joined):
            each.handle.wait()
            each.arrived()
        end = end_of(joined)
        assert end is not None
        self.wait(end, index)


def _without_end(joined: Joined) -> list[Joined]:
    """A collective, and those before it in its group, whose ends are not known: the earliest one comes first."""
    found: list[Joined] = []
    each: Joined | None = joined
    while each is not None and each.end is None:
        found.append(each)
        each = each.before
    return found[::-1]


def end_of(joined: Joined) -> float | None:
    """When a collective ends; None while that is not known. Those of a group go in order. (Two threads ask: both find
    the same.)"""
    for each in _without_end(joined):
        if each.last is None:
            return None
        before = each.before.end if each.before is not None else None
        each.end = max(each.last, before or 0.0) + each.seconds
    return joined.end


def _wait_and(seconds: float, call: Callable[[], None]) -> None:
    time.sleep(seconds)
    call()


def stamp_later(moment: float, stamp: Callable[[], None]) -> None:
    """Call `stamp` at this moment, from another thread; at once if it is past."""
    left = moment - time.perf_counter()
    if left > 0:
        threads.start(partial(_wait_and, left, stamp), "waits for an emulated moment")
    else:
        stamp()
