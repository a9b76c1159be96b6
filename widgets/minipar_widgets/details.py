"""Details of the events of a timeline besides their times: texts, causes, idle times, memory. They take longer to find.

The engine derives everything (`critical_path`, `idleness`, `lifetimes`); this module makes arrays for the browser.
Events are numbered as in `columns.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from minipar.program import Program, Value
from minipar.trace import Trace, labels
from minipar.trace.critical_path import critical_path, messages, path_in_words
from minipar.trace.idleness import REASONS, Holders, idle_times
from minipar.trace.lifetimes import KINDS as KIND_OF_VALUE
from minipar.trace.lifetimes import live_values
from minipar.trace.memory_series import ALL_KINDS
from minipar_widgets.columns import Columns

IDLE = {reason: k for k, reason in enumerate(REASONS)}  # codes of idle times
_FINEST = 4096  # moments of a memory curve that are sent; longer ones keep the highest of each part
_VALUES = 50_000  # values that are sent by name

Arrays = dict[str, "array[Any]"]


def details(columns: Columns, memory: bool = True) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and lists for the browser.

    name, names                 for each event its text, with `#` for the micro-batch
    labels                      for each of these texts the words for the bar, the longest first, `#` for the number
    before, before_of           the events whose results event k reads: before_of[before[k] : before[k + 1]]
    path, path_words            the events of each trace's critical path, and what the last one is made of
    idle_start, _length, _kind  idle times, those of lane k (see `idle`) from `idle[k][2]` to `idle[k][3]`
    idle_then, _awaited, _by    the event that ends an idle time, the message or collective that arrived last before it,
                                and the event of another rank that held it up; -1: none
    memory                      per trace and rank a curve: times, and one column for each kind
    live                        values by name: when they are alive, how large they are (left out if there are too many)
    """
    name, names, labelled = columns.named
    arrays: Arrays = {"name": name}
    facts: dict[str, Any] = {"names": names, "labels": labelled}
    _causes(columns, arrays)
    paths = [critical_path(trace) for trace in columns.traces]
    arrays["path"] = array("I", [columns.places[t][e.rank][e.index] for t, path in enumerate(paths) for e in path])
    facts["path_words"] = path_in_words(columns.traces[-1], paths[-1])
    _idle(columns, arrays, facts)
    if memory:
        _memory(columns.traces, arrays, facts)
        _live(columns.traces, arrays, facts)
    return arrays, facts


def _causes(columns: Columns, arrays: Arrays) -> None:
    """The events whose results each event reads: the last writer of each value on its rank; for a RECV its SEND."""
    pairs: list[tuple[int, int]] = []
    for t, trace in enumerate(columns.traces):
        places = columns.places[t]
        pairs += [(places[r][k], places[rank][index]) for r, k, rank, index in reads(trace.program)]
    both = sorted(set(pairs))
    count = [0] * (len(columns) + 1)
    for event, _ in both:
        count[event + 1] += 1
    arrays["before"] = array("I", accumulate(count))
    arrays["before_of"] = array("I", [cause for _, cause in both])


def reads(program: Program) -> list[tuple[int, int, int, int]]:
    """(rank, index, rank, index): the first instruction reads a value that the second wrote, or receives one that it
    sent."""
    found = [(*receive, *send) for send, receive in messages(program)]
    for rank, row in enumerate(program.ranks):
        writer: dict[Value, int] = {}
        for k, ins in enumerate(row):
            found += [(rank, k, rank, j) for j in {writer[value] for value in ins.reads if value in writer}]
            for value in ins.writes:
                writer[value] = k
    return found


def _idle(columns: Columns, arrays: Arrays, facts: dict[str, Any]) -> None:
    scale = labels.clock(columns.traces).scale
    lanes: list[list[int]] = []
    rows: list[tuple[float, float, int, int, int, int]] = []
    for t, trace in enumerate(columns.traces):
        holders, zero = Holders(trace), trace.span[0]
        for rank in range(len(trace.program.ranks)):
            mine, places = idle_times(trace, rank), columns.places[t]
            lanes.append([t, rank, len(rows), len(rows) + len(mine)])
            for one in mine:
                by = holders.of(rank, one)
                then, awaited = (places[rank][k] if k >= 0 else -1 for k in (one.then, one.awaited))
                held = places[by[0]][by[1]] if by else -1
                start, length = (one.start - zero) * scale, (one.end - one.start) * scale
                rows.append((start, length, IDLE[one.reason], then, awaited, held))
    _add(arrays, "idle", {"start": "d", "length": "f", "kind": "B", "then": "i", "awaited": "i", "by": "i"}, rows)
    facts["idle"] = lanes


def _memory(traces: Sequence[Trace], arrays: Arrays, facts: dict[str, Any]) -> None:
    """The curves of all ranks, one after the other; `memory` says where each of them begins and ends."""
    scale, unit = labels.clock(traces).scale, 2**20 if traces[0].unit == "bytes" else 1
    times, total, where = array("d"), array("f"), []
    kinds = {kind: array("f") for kind in ALL_KINDS}
    most = 0.0
    for t, trace in enumerate(traces):
        for rank in range(len(trace.program.ranks)):
            curve = trace.memory(rank)
            sums = [sum(levels) / unit for levels in zip(*(curve.kinds[kind] for kind in ALL_KINDS), strict=True)]
            keep = coarse(sums)
            where.append([t, rank, len(times), len(times) + len(keep)])
            times.extend([(curve.times[k] - trace.span[0]) * scale for k in keep])
            total.extend(map(sums.__getitem__, keep))
            for kind, column in kinds.items():
                column.extend([curve.kinds[kind][k] / unit for k in keep])
            most = max(most, *sums) if sums else most
    shown = [kind for kind, column in kinds.items() if max(column, default=0) > 1e-12]
    arrays["memory_time"] = times
    for kind in shown:
        arrays[f"memory_{kind}"] = kinds[kind]
    arrays["memory_total"] = total
    facts["memory"] = where
    facts["memory_most"] = most
    facts["memory_kinds"] = shown
    facts["memory_unit"] = "MiB" if unit > 1 else "activations"


def coarse(total: Sequence[float]) -> Sequence[int]:
    """Which moments of a curve to keep: all, or the first, highest, lowest and last moment of each of equal parts."""
    if len(total) <= _FINEST:
        return range(len(total))
    parts = _FINEST // 4
    kept: set[int] = set()
    for part in range(parts):
        a, b = len(total) * part // parts, len(total) * (part + 1) // parts
        kept |= {a, max(range(a, b), key=total.__getitem__), min(range(a, b), key=total.__getitem__), b - 1}
    return sorted(kept)


def _live(traces: Sequence[Trace], arrays: Arrays, facts: dict[str, Any]) -> None:
    scale, unit = labels.clock(traces).scale, 2**20 if traces[0].unit == "bytes" else 1
    rows: list[tuple[float, float, float, int, int]] = []
    names: dict[str, int] = {}
    where = []
    for t, trace in enumerate(traces):
        zero, last = trace.span
        for rank in range(len(trace.program.ranks)):
            begin = len(rows)
            for life in sorted(live_values(trace, rank), key=lambda life: (life.start, str(life.value))):
                end = last + 1 if life.end is None else life.end
                kind = ALL_KINDS.index(KIND_OF_VALUE[life.value.kind])
                name = names.setdefault(str(life.value), len(names))
                if life.size:
                    rows.append(((life.start - zero) * scale, (end - zero) * scale, life.size / unit, kind, name))
            where.append([t, rank, begin, len(rows)])
        if len(rows) > _VALUES:
            return
    _add(arrays, "live", {"start": "d", "end": "d", "size": "f", "kind": "B", "name": "I"}, rows)
    facts["live"] = where
    facts["values"] = list(names)


def _add(arrays: Arrays, name: str, types: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> None:
    """Add the columns of a table, each as an array of its type."""
    columns = zip(*rows, strict=True) if rows else [()] * len(types)
    for (key, code), column in zip(types.items(), columns, strict=True):
        arrays[f"{name}_{key}"] = array(code, column)
