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
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import itemgetter, le, sub
from typing import Any

from minipar.program import COMPUTE, TRANSFERS, Instruction, Op, version_of
from minipar.trace import Trace, labels
from minipar.trace.figure import COLLECTIVE, LOOKS, SHADED
from minipar.trace.shades import MOST as SHADES
from minipar.trace.shades import Shades

KINDS = tuple(LOOKS)
CODES = {kind: code for code, kind in enumerate(KINDS)}
_CODE_OF = {op: CODES[labels.kind_of(Instruction(op, (), -1, 0))] for op in Op}
_MICROBATCH, _STREAM = itemgetter(2), itemgetter(7)
_SHADED = {(CODES[kind], shade): CODES[f"{kind} {shade}"] for kind in SHADED for shade in range(1, SHADES)}
_PLAIN = frozenset(COMPUTE)
RECEIVE = CODES["receive"]
_REDUCE, _COLLECTIVE = CODES["reduce"], CODES["collective"]
_SPECIAL = frozenset((RECEIVE, _REDUCE, CODES["all-reduce"]))
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
    start: array[float]
    length: array[float]
    kind: array[int]
    number: array[int]
    index: array[int]

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def named(self) -> tuple[array[int], list[str], list[tuple[str, ...]]]:
        """For each event the position of its text in a list of texts in which `#` stands for the micro-batch; and for
        each text the words for the bar, the longest first, in which `#` stands for the number."""
        names: dict[str, int] = {}
        keys: dict[Any, int] = {}
        labelled: list[tuple[str, ...]] = []
        found = array("I", bytes(4 * len(self)))
        layers = [labels.by_layers(trace.program) for trace in self.traces]
        for lane in self.lanes:
            program = self.traces[lane.trace].program
            row = program.ranks[lane.rank]
            for place, k in enumerate(self.index[lane.first : lane.last], lane.first):
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
    def places(self) -> list[list[array[int]]]:
        """Per trace and rank the event of each instruction."""
        found = [[array("I", bytes(4 * len(row))) for row in trace.program.ranks] for trace in self.traces]
        for lane in self.lanes:
            mine = found[lane.trace][lane.rank]
            for place, k in enumerate(self.index[lane.first : lane.last], lane.first):
                mine[k] = place
        return found


def columns(traces: Sequence[Trace]) -> Columns:
    """The columns of one trace, or of a predicted and a measured one. The texts are made at their first use."""
    scale = labels.clock(traces).scale
    found = Columns(traces, [], array("d"), array("f"), array("B"), array("i"), array("I"))
    for t, trace in enumerate(traces):
        first, program = trace.span[0], trace.program
        shades = Shades(program)
        for rank, row in enumerate(program.ranks):
            if not row:
                continue
            starts = [(time - first) * scale for time in trace.starts[rank]]
            ends = [(time - first) * scale for time in trace.ends[rank]]
            kind = list(map(_CODE_OF.__getitem__, program.ops[rank]))
            if program.steps > 1:
                number = [labels.number_of(program, ins) for ins in row]
            else:
                number = list(map(_MICROBATCH, row))
            streams: defaultdict[str, list[int]] = defaultdict(list, compute=[])
            for k, stream in enumerate(map(_STREAM, row)):
                streams[stream].append(k)
            for k in [k for k, code in enumerate(kind) if code in _SPECIAL]:
                if kind[k] == RECEIVE:
                    starts[k] = ends[k]
                elif kind[k] == _REDUCE:
                    number[k] = labels.number_of(program, row[k])
                elif row[k].name:
                    kind[k] = _COLLECTIVE  # an imported trace does not say which it was
            if shades.names:
                both = zip(kind, (shades.of(rank, ins) for ins in row), strict=True)
                kind = [_SHADED.get(one, one[0]) for one in both]
            for name, places in streams.items():
                places.sort(key=starts.__getitem__)
                for n, mine in enumerate(_separated(places, starts, ends)):
                    done = len(found)
                    found.lanes.append(Lane(t, rank, name + (f" ({n + 1})" if n else ""), done, done + len(mine)))
                    found.start.extend(map(starts.__getitem__, mine))
                    found.length.extend(map(sub, map(ends.__getitem__, mine), map(starts.__getitem__, mine)))
                    found.kind.extend(map(kind.__getitem__, mine))
                    found.number.extend(map(number.__getitem__, mine))
                    found.index.extend(mine)
    return found


def labelled(found: Columns, lane: Lane) -> bool:
    """Whether a lane has collectives, which are labelled where ranks are few."""
    some = lane.last > lane.first
    return lane.stream != "compute" and some and KINDS[found.kind[lane.first]] in COLLECTIVE


def _separated(places: list[int], starts: Sequence[float], ends: Sequence[float]) -> list[list[int]]:
    """Divide the events of a stream, sorted by start, into lanes in which no two overlap: usually a single lane."""
    slack = 1e-12 * abs(ends[places[-1]]) if places else 0.0
    begins = [starts[k] + slack for k in islice(places, 1, None)]
    if all(map(le, map(ends.__getitem__, places), begins)):
        return [places]
    lanes: list[list[int]] = []
    free: list[float] = []
    for place in places:
        k = next((k for k, time in enumerate(free) if time <= starts[place]), len(free))
        if k == len(free):
            lanes.append([])
            free.append(0.0)
        lanes[k].append(place)
        free[k] = ends[place]
    return lanes


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
