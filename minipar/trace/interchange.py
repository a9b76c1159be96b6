"""Traces for other tools: Perfetto (Chrome Trace Event JSON).

    rank 0   compute |F0|F1|    |B0|        a process per rank, a thread per stream, a slice per instruction;
             send 1     \\                   an arrow from each SEND to the instruction that reads the sent value;
    rank 1   recv 0      \\                  a memory counter per rank, by kind
             compute      |F0|B0|

Formats: the Trace Event Format document, which chrome://tracing and Perfetto follow (complete, metadata, flow and
counter events; times in microseconds).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minipar.program import COLLECTIVES, TRANSFERS
from minipar.program.rule import Place
from minipar.trace import labels
from minipar.trace.critical_path import messages

if TYPE_CHECKING:
    from minipar.trace import Trace

Entry = dict[str, Any]


class Nanoseconds(NamedTuple):
    """Converts a trace's times to whole nanoseconds after `origin`. A unit of the forward becomes a millisecond."""

    origin: float
    scale: float

    def __call__(self, time: float) -> int:
        return round((time - self.origin) * self.scale)


def clock(trace: Trace) -> Nanoseconds:
    """The clock of a trace's export: 0 is the first start or end of any instruction."""
    origin = min(min(row) for rows in (trace.starts, trace.ends) for row in rows if len(row))
    return Nanoseconds(origin, 1e9 if labels.in_seconds(trace) else 1e6)


def spans(trace: Trace, now: Nanoseconds) -> dict[Place, tuple[int, int]]:
    """Start and end of every instruction in ns. A message that arrived before its receive was posted takes no time."""
    found = {}
    for rank, row in enumerate(trace.program.ranks):
        for k in range(len(row)):
            end = now(trace.ends[rank][k])
            found[rank, k] = (min(now(trace.starts[rank][k]), end), end)
    return found


# Perfetto -------------------------------------------------------------------------------------------------------------


def to_perfetto(trace: Trace, path: str | os.PathLike[str] | None = None) -> str:
    """The trace as Chrome Trace Event JSON; or, if `path` is given, the path that it was written to. It is
    compressed if `path` ends in `.gz`.

    There is a process for each rank (pid = rank) and a thread for each stream. Slices of a thread never overlap: if
    instructions of a stream overlap (receives, which are posted ahead), some get another thread, `recv 0 (2)`. Times
    are microseconds from the first event, exact to the nanosecond. If the trace counts in units of the forward, one
    unit is shown as 1 ms. Errors: MiniparError for an empty trace, and for times that are not finite or run backwards.
    """
    labels.check([trace])
    now = clock(trace)
    where = spans(trace, now)
    threads = _threads(trace, where)
    unit = "ms" if labels.in_seconds(trace) else "units of the forward, each shown as 1 ms"
    slices = _slices(trace, where, threads)
    # Flows come after slices: at equal times a reader keeps the order of the file, and needs an arrow's slice first.
    events = [*_names(trace, threads), *slices, *_flows(trace, where, threads), *_counters(trace, now)]
    whole = {
        "displayTimeUnit": "ms",
        "otherData": {
            "kind": trace.kind, "note": trace.note, "name": trace.program.name, "times": unit, "unit": trace.unit
        },
        "traceEvents": events,
    }  # fmt: skip
    text = json.dumps(whole)
    if path is None:
        return text
    _write(Path(path), text)
    return os.fspath(path)


def _write(path: Path, text: str) -> None:
    data = text.encode()
    path.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)


def _threads(trace: Trace, where: dict[Place, tuple[int, int]]) -> dict[Place, tuple[int, str]]:
    """The thread of every instruction: its number, different for all ranks, and its name."""
    numbers: dict[tuple[int, str], int] = {}
    found = {}
    for rank, row in enumerate(trace.program.ranks):
        lanes: dict[str, list[int]] = {}  # for each stream, the end of the last slice of each lane
        for k in sorted(range(len(row)), key=lambda k: (row[k].stream != "compute", where[rank, k])):
            ends = lanes.setdefault(row[k].stream, [])
            start, end = where[rank, k]
            lane = next((i for i, last in enumerate(ends) if last <= start), len(ends))
            ends[lane : lane + 1] = [end]
            name = row[k].stream + (f" ({lane + 1})" if lane else "")
            found[rank, k] = (numbers.setdefault((rank, name), len(numbers) + 1), name)
    return found


def _names(trace: Trace, threads: dict[Place, tuple[int, str]]) -> Iterable[Entry]:
    for rank in range(len(trace.program.ranks)):
        yield _meta("process_name", rank, 0, name=f"{labels.rank_name(trace.program, rank)} ({trace.kind})")
        yield _meta("process_sort_index", rank, 0, sort_index=rank)
    for rank, (tid, name) in dict.fromkeys((rank, thread) for (rank, _), thread in threads.items()):
        yield _meta("thread_name", rank, tid, name=name)
        yield _meta("thread_sort_index", rank, tid, sort_index=tid)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Entry:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slices(
    trace: Trace, where: dict[Place, tuple[int, int]], threads: dict[Place, tuple[int, str]]
) -> Iterable[Entry]:
    for event in trace.events:
        ins, (start, end) = event.instruction, where[event.rank, event.index]
        args = {
            "instruction": str(ins), "op": ins.op.name, "index": event.index, "layers": list(ins.layers),
            "microbatch": ins.microbatch, "step": ins.step, "stream": ins.stream, "bytes": event.bytes,
        }  # fmt: skip
        if ins.op in TRANSFERS:
            args["peer"] = ins.peer
        if ins.group:
            args["group"] = list(ins.group)
        for name, version in (("version_used", event.version_used), ("version_applied", event.version_applied)):
            if version is not None:
                args[name] = version
        yield {
            "ph": "X", "cat": "collective" if ins.op in COLLECTIVES else labels.kind_of(ins),
            "name": str(ins), "pid": event.rank,
            "tid": threads[event.rank, event.index][0], "ts": start / 1e3, "dur": (end - start) / 1e3, "args": args,
        }  # fmt: skip


def _flows(trace: Trace, where: dict[Place, tuple[int, int]], threads: dict[Place, tuple[int, str]]) -> Iterable[Entry]:
    """An arrow from each SEND to the first instruction that reads the value, or to the RECV if there is none."""
    for number, (send, receive) in enumerate(messages(trace.program), 1):
        rank, k = receive
        row = trace.program.ranks[rank]
        value = next(iter(row[k].writes), None)
        reader = next((i for i in range(k + 1, len(row)) if value is not None and value in row[i].reads), None)
        start = where[send][0]
        if reader is not None and where[rank, reader][0] >= start:
            target, arrival = (rank, reader), where[rank, reader][0]
        else:
            target, arrival = receive, max(*where[receive][:1], where[receive][1] - 1)
        common = {"cat": "message", "name": "message", "id": number}
        yield {"ph": "s", **common, "pid": send[0], "tid": threads[send][0], "ts": start / 1e3}
        yield {"ph": "f", "bp": "e", **common, "pid": rank, "tid": threads[target][0], "ts": arrival / 1e3}


def _counters(trace: Trace, now: Nanoseconds) -> Iterable[Entry]:
    unit = "bytes" if trace.unit == "bytes" else trace.unit
    for rank in range(len(trace.program.ranks)):
        curve = trace.memory(rank)
        kinds = {kind: column for kind, column in curve.kinds.items() if any(column)}
        for k, time in enumerate(curve.times if kinds else []):
            args = {kind: column[k] for kind, column in kinds.items()}
            yield {"ph": "C", "name": f"memory ({unit})", "pid": rank, "tid": 0, "ts": now(time) / 1e3, "args": args}
