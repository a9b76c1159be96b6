"""Why a rank does not compute: its idle time as fill, wait and overhead.

    rank 1   fill....|F0|wait.|F1|B0|wait..|B1|ovh|STEP|fill...

fill       before the rank's first compute instruction and after its last one: the pipeline fills and drains
wait       until the message, collective or copy arrived for which the rank waited
overhead   the rest: nothing was missing, but nothing was computed (only measured traces have much of it)

An imported trace does not say what its instructions read. There the time during a message, collective or copy counts as
wait.
"""

from __future__ import annotations

from bisect import bisect
from typing import NamedTuple

from minipar.program import Value
from minipar.program.rule import Place
from minipar.trace import Trace
from minipar.trace.critical_path import collectives, messages

REASONS = ("fill", "wait", "overhead")


class Idle(NamedTuple):
    """A time in which a rank computed nothing, and the reason, one of `REASONS`.

    then     the index of the compute instruction that ends it; -1: there is none
    awaited  the index of the message, collective or copy of the rank that arrived last, of those that `then` reads; -1:
             there is none, or this is not known
    """

    start: float
    end: float
    reason: str
    then: int = -1
    awaited: int = -1


def idle_times(trace: Trace, rank: int) -> list[Idle]:
    """The idle times of a rank, in order; together with its compute instructions they fill the trace's span."""
    row, starts, ends = trace.program.ranks[rank], trace.starts[rank], trace.ends[rank]
    first, last = trace.span
    busy = [] if any(ins.reads for ins in row) else _messages(trace, rank)
    found: list[Idle] = []
    writer: dict[Value, int] = {}
    now, there, begun = first, first, False  # end of the last compute; arrival of all that was read since then
    latest = -1  # what arrived last
    for k, ins in enumerate(row):
        for value in ins.reads:
            if value in writer:
                source = writer.pop(value)
                latest = source if latest < 0 or ends[source] > there else latest
                there = max(there, ends[source])
        if ins.stream != "compute":
            writer.update(dict.fromkeys(ins.writes, k))
            continue
        if starts[k] > now:
            if not begun:
                found.append(Idle(now, starts[k], "fill", k, latest))
            elif busy:
                found += [piece._replace(then=k) for piece in _cut(busy, now, starts[k])]
            else:
                until = min(max(there, now), starts[k])
                found += [Idle(now, until, "wait", k, latest), Idle(until, starts[k], "overhead", k)]
        now, there, begun, latest = max(now, ends[k]), first, True, -1
    found.append(Idle(now, last, "fill"))
    return [piece for piece in found if piece.end > piece.start]


class Holders:
    """Which instruction of which rank holds up a rank that waits."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.sender = {receive: send for send, receive in messages(trace.program)}
        self.members = collectives(trace.program)
        ends = ((max(trace.ends[r], default=0.0), r) for r in range(len(trace.program.ranks)) if len(trace.ends[r]))
        rank = max(ends, default=(0.0, 0))[1]
        last = trace.ends[rank]
        self.last = (rank, max(range(len(last)), key=lambda k: (last[k], k), default=0))

    def of(self, rank: int, idle: Idle) -> Place | None:
        """Rank and index of what the rank waited for: the compute whose result a message carried; what the last rank of
        a collective did before it; at the end, the last instruction of all. None: nobody held it up, or this is not
        known."""
        if idle.then < 0:
            return self.last if self.last[0] != rank else None
        place = (rank, idle.awaited)
        if idle.awaited < 0 or idle.reason == "overhead":
            return None
        if place in self.sender:
            source = self.sender[place]
            sent = {*self.trace.program.ranks[source[0]][source[1]].reads}
            return self._before(source, sent)
        if place in self.members:
            latest = max(self.members[place], key=lambda one: self.trace.starts[one[0]][one[1]])
            return self._before(latest, set()) if latest[0] != rank else None
        return None

    def _before(self, place: Place, values: set[Value]) -> Place:
        """The last compute before a message or collective; where values are given, the last that wrote one of them."""
        rank, index = place
        row = self.trace.program.ranks[rank]
        for k in range(index - 1, -1, -1):
            if row[k].stream == "compute" and (not values or values & {*row[k].writes}):
                return rank, k
        return place


def idle_split(trace: Trace, rank: int) -> dict[str, float]:
    """Idle time of a rank for each of `REASONS`."""
    total = dict.fromkeys(REASONS, 0.0)
    for piece in idle_times(trace, rank):
        total[piece.reason] += piece.end - piece.start
    return total


def _messages(trace: Trace, rank: int) -> list[tuple[float, float]]:
    """The times in which a rank communicates or copies; times that overlap are joined."""
    found: list[tuple[float, float]] = []
    rows = zip(trace.program.ranks[rank], trace.starts[rank], trace.ends[rank], strict=True)
    for start, end in sorted((s, e) for ins, s, e in rows if ins.stream != "compute" and s < e):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _cut(busy: list[tuple[float, float]], start: float, end: float) -> list[Idle]:
    """A gap of an imported trace, cut where communication begins or ends."""
    found: list[Idle] = []
    k = max(0, bisect(busy, (start, start)) - 1)
    while k < len(busy) and busy[k][0] < end:
        s, e = max(start, busy[k][0]), min(end, busy[k][1])
        if e > s:
            found += [Idle(start, s, "overhead"), Idle(s, e, "wait")]
            start = e
        k += 1
    return [*found, Idle(start, end, "overhead")]
