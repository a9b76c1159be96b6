"""A trace as columns: what the browser and the static picture draw from. 13 bytes an event, and its text.

Lanes are sorted by trace (0 the upper one), rank and stream; the events of a lane by start. An event is

    start  float64   on the time axis of the picture, from the first start of its trace
    length float32   (a receive has none: it is an arrival; when it was posted is in its text)
    kind   uint8     position in KINDS
    number int32     the micro-batch; -1: none
    name   uint32    position in `names`, texts in which `#` stands for the micro-batch
    index  uint32    position in the rank's program

Values derived from a program never disagree with it: `Columns.text(k)` is `str(instruction)`, which a test holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minipar import captions
from minipar.program import COMPUTE, TRANSFERS, Instruction, Op, version_of
from minipar.trace import Trace

KINDS = (
    "forward", "backward", "input gradient", "weight gradient", "recompute", "optimizer step", "reduce",
    "message", "receive", "collective", "copy",
)  # fmt: skip
CODES = {kind: code for code, kind in enumerate(KINDS)}
_CODE_OF = {op: CODES[captions.kind_of(Instruction(op, (), -1, 0))] for op in Op}
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

    lanes: list[Lane]
    start: np.ndarray
    length: np.ndarray
    kind: np.ndarray
    number: np.ndarray
    name: np.ndarray
    index: np.ndarray
    names: list[str] = field(repr=False)

    def __len__(self) -> int:
        return len(self.start)

    def text(self, k: int) -> str:
        """The instruction of event k as its program prints it."""
        return self.names[self.name[k]].replace("#", str(self.number[k]))


def columns(traces: Sequence[Trace]) -> Columns:
    """The columns of a predicted and a measured trace, or of one trace."""
    scale = captions.clock(traces).scale
    names: dict[str, int] = {}
    keys: dict[Any, int] = {}
    lanes: list[Lane] = []
    parts: list[tuple[np.ndarray, ...]] = []
    done = 0
    for t, trace in enumerate(traces):
        first = trace.span[0]
        for rank, row in enumerate(trace.program.ranks):
            if not row:
                continue
            start = (np.asarray(trace.starts[rank], float) - first) * scale
            end = (np.asarray(trace.ends[rank], float) - first) * scale
            kind = np.fromiter((_CODE_OF[ins[0]] for ins in row), np.uint8, len(row))
            start = np.where(kind == RECEIVE, end, start)
            number = np.fromiter((ins[2] for ins in row), np.int32, len(row))
            name = np.fromiter((_name(ins, keys, names) for ins in row), np.uint32, len(row))
            streams: dict[str, int] = {"compute": 0}
            stream = np.fromiter((streams.setdefault(ins[7], len(streams)) for ins in row), np.int32, len(row))
            order = np.lexsort((np.arange(len(row)), start, stream))
            parts.append(tuple(c[order] for c in (start, end - start, kind, number, name, np.arange(len(row)))))
            edges = np.searchsorted(stream[order], np.arange(len(streams) + 1))
            lanes += [Lane(t, rank, s, done + int(edges[k]), done + int(edges[k + 1])) for s, k in streams.items()]
            done += len(row)
    types = (np.float64, np.float32, np.uint8, np.int32, np.uint32, np.uint32)
    joined = [np.concatenate(c).astype(dtype) for c, dtype in zip(zip(*parts, strict=True), types, strict=True)]
    start, length, kinds, numbers, texts, index = joined
    return Columns(lanes, start, length, kinds, numbers, texts, index, list(names))


def _name(ins: Instruction, keys: dict[Any, int], names: dict[str, int]) -> int:
    """Position of the instruction's text in `names`; found by what it depends on, since printing takes long."""
    op, layers, microbatch, _, reads, writes, *_, peer, _, _, name = ins
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
