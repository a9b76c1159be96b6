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
from minipar.trace import Trace

REASONS = ("fill", "wait", "overhead")


class Idle(NamedTuple):
    """A time in which a rank computed nothing, and the reason, one of `REASONS`."""

    start: float
    end: float
    reason: str


def idle_times(trace: Trace, rank: int) -> list[Idle]:
    """The idle times of a rank, in order; together with its compute instructions they fill the trace's span."""
    row, starts, ends = trace.program.ranks[rank], trace.starts[rank], trace.ends[rank]
    first, last = trace.span
    messages = [] if any(ins.reads for ins in row) else _messages(trace, rank)
    found: list[Idle] = []
    writer: dict[Value, int] = {}
    now, there, begun = first, first, False  # end of the last compute; arrival of all that was read since then
    for k, ins in enumerate(row):
        for value in ins.reads:
            if value in writer:
                there = max(there, ends[writer.pop(value)])
        if ins.stream != "compute":
            writer.update(dict.fromkeys(ins.writes, k))
            continue
        if starts[k] > now:
            if not begun:
                found.append(Idle(now, starts[k], "fill"))
            elif messages:
                found += _cut(messages, now, starts[k])
            else:
                until = min(max(there, now), starts[k])
                found += [Idle(now, until, "wait"), Idle(until, starts[k], "overhead")]
        now, there, begun = max(now, ends[k]), first, True
    found.append(Idle(now, last, "fill"))
    return [piece for piece in found if piece.end > piece.start]


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
