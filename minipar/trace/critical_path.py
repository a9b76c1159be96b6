"""The critical path of a trace: the chain of instructions whose times add up to the makespan.

    rank 0   F0 F1 ................ B0 .... B1 | STEP           found backwards from the last end: each instruction
    rank 1      F0 B0 F1 B1                                     waited for the one before it in the chain

The rule of execution says what waits for what: a rank walks its list in order, an instruction waits for the receive or
collective that writes what it reads, a stream works in order, and a collective waits for its last rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minipar.program import COLLECTIVES, PARTNERS, Instruction, Op, Program, Value
from minipar.program.rule import Place
from minipar.trace import labels
from minipar.wording import several

if TYPE_CHECKING:
    from minipar.trace import Event, Trace

RECEIVES = frozenset(PARTNERS.values())


def critical_path(trace: Trace) -> list[Event]:
    """The instructions on the critical path, in order; each waited for the one before it.

    For a collective the path has the rank that joined it last. In a predicted trace the durations (for a receive: its
    delay after the end of its SEND) add up to the makespan. In a measured trace there are small gaps.
    """
    rows, starts, ends = trace.program.ranks, trace.starts, trace.ends
    sender = {receive: send for send, receive in messages(trace.program)}
    members = collectives(trace.program)
    before = [_before(row) for row in rows]
    arrivals = _arrivals(trace, sender) if trace.kind == "measured" else {}

    def cause(place: Place) -> Place | None:
        if place in sender:
            return sender[place]
        rank, index = place
        there = {k: arrivals.get((rank, k), ends[rank][k]) for k in before[rank][index]}
        # It did not wait for what ended after it began. (For example, the end of a measured SEND is seen late.)
        in_time = [k for k in there if there[k] <= starts[rank][index]] or there
        best = max(in_time, key=lambda k: (there[k], rows[rank][k].stream == "compute", k), default=None)
        return None if best is None else (rank, best)

    everything = ((rank, index) for rank, row in enumerate(rows) for index in range(len(row)))
    place = max(everything, key=lambda p: (ends[p[0]][p[1]], rows[p[0]][p[1]].stream == "compute", p[1]), default=None)
    path: list[Place] = []
    seen: set[Place] = set()  # a program that cannot run may have a cycle, and its picture must not hang
    while place is not None and place not in seen:
        place = max(members.get(place, [place]), key=lambda p: (starts[p[0]][p[1]], p == place))
        seen.add(place)
        path.append(place)
        place = cause(place)

    events = {
        (e.rank, e.index): e for rank in {p[0] for p in path} for e in trace.events_of(rank) if (rank, e.index) in seen
    }
    return [events[p] for p in reversed(path)]


def path_in_words(trace: Trace, path: Sequence[Event]) -> str:
    """The critical path as a sentence: how many instructions it has, and what its time consists of."""
    if not path:
        return "there is no critical path"
    took: dict[str, float] = {}
    for event in path:
        kind, beside = labels.kind_of(event.instruction), event.instruction.op in COLLECTIVES
        if kind not in ("message", "receive"):
            kind = "collectives" if beside else kind
            took[kind] = took.get(kind, 0.0) + event.duration
    took["messages and gaps"] = max(0.0, trace.time - sum(took.values()))
    parts = [f"{kind} {labels.duration(trace, time)}" for kind, time in took.items() if time > trace.time * 0.0005]
    count, ranks = several(len(path), "instruction"), several(len({event.rank for event in path}), "rank")
    return (
        f"critical path, {count} on {ranks}: each waited for the one before it, and together they are the whole "
        f"{labels.duration(trace, trace.time)}: {' + '.join(parts)}. Only what is on it makes the step shorter."
    )


def _arrivals(trace: Trace, sender: Mapping[Place, Place]) -> dict[Place, float]:
    """An estimate of when each measured message arrived.

    A measured RECV ends when its rank checks for the message, perhaps long after it came. So a message counts as
    arrived when its SEND has ended, and when as much time has passed since the start of its SEND as the fastest message
    of the link took.
    """
    starts, ends = trace.starts, trace.ends
    fastest: dict[tuple[int, int], float] = {}
    for (rank, index), (source, k) in sender.items():
        transit = ends[rank][index] - starts[source][k]
        fastest[source, rank] = min(transit, fastest.get((source, rank), transit))
    return {
        (rank, index): min(ends[rank][index], max(ends[source][k], starts[source][k] + fastest[source, rank]))
        for (rank, index), (source, k) in sender.items()
    }


def messages(program: Program) -> list[tuple[Place, Place]]:
    """Every message as (place of its SEND, place of its RECV): the k-th receive of a link belongs to its k-th send.
    What workers push and what servers reply are messages, too."""
    sends: dict[tuple[Op, int, int], list[Place]] = {}
    receives: dict[tuple[Op, int, int], list[Place]] = {}
    for rank, row in enumerate(program.ranks):
        for index, ins in enumerate(row):
            if ins.op in PARTNERS:
                sends.setdefault((PARTNERS[ins.op], rank, ins.peer), []).append((rank, index))
            elif ins.op in RECEIVES:
                receives.setdefault((ins.op, ins.peer, rank), []).append((rank, index))
    return [pair for link, found in sends.items() for pair in zip(found, receives.get(link, []), strict=False)]


def collectives(program: Program) -> dict[Place, list[Place]]:
    """For the place of each collective, its places on all ranks: the k-th one of a group is the same on all ranks."""
    members: dict[tuple[tuple[int, ...], int], list[Place]] = {}
    for rank, row in enumerate(program.ranks):
        joined: dict[tuple[int, ...], int] = {}
        for index, ins in enumerate(row):
            if ins.op in COLLECTIVES:
                k = joined[ins.group] = joined.get(ins.group, -1) + 1
                members.setdefault((ins.group, k), []).append((rank, index))
    return {place: places for places in members.values() for place in places}


def _before(row: Sequence[Instruction]) -> list[list[int]]:
    """For each instruction of a rank, the instructions of the same rank that it may have waited for.

    These are the compute instruction before it, and the receives and collectives whose values were read since then. For
    communication it is also the instruction before it on its stream. A receive waits for none.
    """
    found: list[list[int]] = []
    compute: list[int] = []
    awaited: list[int] = []
    writer: dict[Value, int] = {}
    last: dict[str, int] = {}
    for index, ins in enumerate(row):
        awaited += [writer.pop(value) for value in ins.reads if value in writer]
        if ins.op in RECEIVES:
            found.append([])
        elif ins.stream == "compute":
            found.append(compute + awaited)
            compute, awaited = [index], []
        else:
            found.append(compute + awaited + ([last[ins.stream]] if ins.stream in last else []))
            last[ins.stream] = index
        if ins.stream != "compute":
            writer.update(dict.fromkeys(ins.writes, index))
    return found
