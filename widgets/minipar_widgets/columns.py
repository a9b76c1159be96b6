"""A trace as columns, 21 bytes per event. The browser and the static picture are drawn from them.

Lanes are sorted by trace (0 is the upper one), rank and stream; the events of a lane by start. An event is

    start  float64   on the time axis of the picture, from the first start of its trace
    length float32   (0 for a receive: it is drawn as an arrival, and its text says when it was posted)
    kind   uint8     position in KINDS; a kind with a shade (`forward 1`) is a kind of its own
    number int32     the micro-batch, counted on from step to step; -1: none
    index  uint32    position in the rank's program

Events that overlap on a stream get a further lane, `recv 0 (2)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from minipar.program import COMPUTE, TRANSFERS, Instruction, Op, version_of
from minipar.trace import Trace, labels
from minipar.trace.figure import LOOKS, SHADED
from minipar.trace.shades import MOST as SHADES
from minipar.trace.shades import Shades

KINDS = tuple(LOOKS)
CODES = {kind: code for code, kind in enumerate(KINDS)}
_CODE_OF = {op: CODES[labels.kind_of(Instruction(op, (), -1, 0))] for op in Op}
_MICROBATCH, _STREAM = itemgetter(2), itemgetter(7)
_SHADED = {(CODES[kind], shade): CODES[f"{kind} {shade}"] for kind in SHADED for shade in range(1, SHADES)}
_PLAIN = frozenset(COMPUTE)
RECEIVE = CODES["receive"]
MOST = 2_000_000  # events; more are refused


@dataclass(frozen=True)
class Lane:
    """One row of the picture: events `first` to `last` (not included) of one stream of a rank."""

    trace: int
    rank: int
    stream: str
    first: int
    last: int


@dataclass(frozen=True)
class Columns:
    """Events of one trace or two, lane by lane; see the top of the module."""

    traces: Sequence[Trace] = field(repr=False)
    lanes: list[Lane]
    start: np.ndarray
    length: np.ndarray
    kind: np.ndarray
    number: np.ndarray
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def named(self) -> tuple[np.ndarray, list[str], list[tuple[str, ...]]]:
        """For each event the position of its text in a list of texts in which `#` stands for the micro-batch; and for
        each text the words for the bar, the longest first, in which `#` stands for the number."""
        names: dict[str, int] = {}
        keys: dict[Any, int] = {}
        labelled: list[tuple[str, ...]] = []
        found = np.zeros(len(self), np.uint32)
        layers = [labels.by_layers(trace.program) for trace in self.traces]
        for lane in self.lanes:
            program = self.traces[lane.trace].program
            row = program.ranks[lane.rank]
            here = slice(lane.first, lane.last)
            for place, k in enumerate(self.index[here].tolist(), lane.first):
                found[place] = _name(row[k], keys, names)
                if len(names) > len(labelled):  # (the first of its text)
                    labelled.append(labels.words_of(program, row[k], layers[lane.trace], "#"))
        return found, list(names), labelled

    def text(self, k: int) -> str:
        """The instruction of event k as its program prints it."""
        places, names, _ = self.named
        return names[places[k]].replace("#", str(self.number[k] % self.per_step[self._trace_of(k)]))

    @property
    def per_step(self) -> list[int]:
        """For each trace, how many numbers a step has: a micro-batch is the rest of its number."""
        return [
            trace.program.microbatches if trace.program.steps > 1 and not trace.program.chunks else 1 << 30
            for trace in self.traces
        ]

    def _trace_of(self, k: int) -> int:
        return next(lane.trace for lane in self.lanes if lane.first <= k < lane.last)

    @cached_property
    def places(self) -> list[list[np.ndarray]]:
        """Per trace and rank the event of each instruction."""
        found = [[np.zeros(len(row), np.uint32) for row in trace.program.ranks] for trace in self.traces]
        for lane in self.lanes:
            found[lane.trace][lane.rank][self.index[lane.first : lane.last]] = np.arange(lane.first, lane.last)
        return found


def columns(traces: Sequence[Trace]) -> Columns:
    """The columns of one trace, or of a predicted and a measured one. The texts are made at their first use."""
    scale = labels.clock(traces).scale
    lanes: list[Lane] = []
    parts: list[tuple[np.ndarray, ...]] = []
    done = 0
    for t, trace in enumerate(traces):
        first, steps = trace.span[0], trace.program.steps
        shades = Shades(trace.program)
        for rank, row in enumerate(trace.program.ranks):
            if not row:
                continue
            start = (np.asarray(trace.starts[rank], float) - first) * scale
            end = (np.asarray(trace.ends[rank], float) - first) * scale
            kind = np.fromiter(map(_CODE_OF.__getitem__, trace.program.ops[rank]), np.uint8, len(row))
            number = np.fromiter(map(_MICROBATCH, row), np.int32, len(row))
            if steps > 1:
                number[:] = [labels.number_of(trace.program, ins) for ins in row]
            for k in np.flatnonzero(kind == CODES["reduce"]).tolist():
                number[k] = labels.number_of(trace.program, row[k])
            if any(row[k].name for k in np.flatnonzero(kind == CODES["all-reduce"])[:1].tolist()):
                kind[kind == CODES["all-reduce"]] = CODES["collective"]  # an imported trace does not say which it was
            if shades.names:
                both = zip(kind.tolist(), (shades.of(rank, ins) for ins in row), strict=True)
                kind[:] = [_SHADED.get(one, one[0]) for one in both]
            start = np.where(kind == RECEIVE, end, start)
            named = [*map(_STREAM, row)]
            streams = {name: k for k, name in enumerate(dict.fromkeys(["compute", *named]))}
            stream = np.fromiter(map(streams.__getitem__, named), np.int32, len(row))
            order = np.lexsort((start, stream))
            edges = np.searchsorted(stream[order], np.arange(len(streams) + 1)).tolist()
            pieces = []
            for name, k in streams.items():
                mine = order[edges[k] : edges[k + 1]]
                for n, places in enumerate(_separated(start[mine], end[mine])):
                    pieces.append(mine[places])
                    last = done + len(pieces[-1])
                    lanes.append(Lane(t, rank, name + (f" ({n + 1})" if n else ""), done, last))
                    done = last
            order = np.concatenate(pieces)
            parts.append((start[order], (end - start)[order], kind[order], number[order], order))
    types = (np.float64, np.float32, np.uint8, np.int32, np.uint32)
    joined = [np.concatenate(c).astype(dtype) for c, dtype in zip(zip(*parts, strict=True), types, strict=True)]
    return Columns(traces, lanes, *joined)


def _separated(start: np.ndarray, end: np.ndarray) -> Sequence[slice | np.ndarray]:
    """Divide the events of a stream, sorted by start, into lanes in which no two overlap: usually a single lane."""
    if not len(end) or (end[:-1] <= start[1:] + 1e-12 * abs(end[-1])).all():
        return [slice(None)]
    lanes: list[list[int]] = []
    free: list[float] = []
    for place, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        k = next((k for k, time in enumerate(free) if time <= first), len(free))
        if k == len(free):
            lanes.append([])
            free.append(0.0)
        lanes[k].append(place)
        free[k] = last
    return [np.array(lane) for lane in lanes]


def _name(ins: Instruction, keys: dict[Any, int], names: dict[str, int]) -> int:
    """Position of the instruction's text in `names`. Printing is slow, so equal texts are printed once: `keys` holds
    what a text depends on."""
    op, layers, microbatch, _, reads, writes, _, _, peer, _, _, name = ins
    key: Any
    if name:
        key = name
    elif op in _PLAIN:
        version = max(map(version_of, writes if op is Op.STEP else reads), default=-1) if layers else -1
        key = (op, layers, microbatch < 0, version)
    elif op in TRANSFERS:
        moved = reads if op is Op.SEND else writes
        key = (op, peer, *[(value[0], value[1]) for value in moved], *[microbatch] * (not moved))
    else:
        return names.setdefault(_template(ins), len(names))
    found = keys.get(key)
    if found is None:
        found = keys[key] = names.setdefault(_template(ins), len(names))
    return found


def _template(ins: Instruction) -> str:
    """The text with `#` for the micro-batch."""
    text = str(ins)
    if ins.microbatch < 0 or ins.name or "#" in text:
        return text
    return re.sub(rf" mb{ins.microbatch}(?!\d)", " mb#", text)
