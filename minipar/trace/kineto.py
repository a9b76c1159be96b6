"""Import of traces from torch's profiler (Kineto, Chrome Trace Event JSON).

    torch.profiler.profile(...).export_chrome_trace("rank0.json")     on every rank
    Trace.from_kineto(["rank0.json", "rank1.json"]).plot()

From a profiler's file it reads complete events (`ph` "X") with `ts` and `dur` in microseconds, `cat` and
`args.correlation`, and at top level `distributedInfo` and `baseTimeNanoseconds` (pytorch/kineto,
libkineto/src/output_json.cpp).
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minipar.errors import MiniparError
from minipar.program import Instruction, Op, Program
from minipar.program.verify.fields import STUMBLES

if TYPE_CHECKING:
    from minipar.trace import Trace

Source = str | os.PathLike[str] | dict[str, Any]
MESSAGE = re.compile(r"nccl|gloo:|mpi:|ucc:|c10d::", re.IGNORECASE)
CALL = re.compile(r"c10d::|record_param_comms", re.IGNORECASE)  # the caller's side of a message, not the message
BACKWARD = re.compile(r"autograd::engine|backward|AccumulateGrad|bwd", re.IGNORECASE)
STEP = re.compile(r"^Optimizer\.step#")
UPDATE = re.compile(r"adam|sgd|multi_tensor_apply", re.IGNORECASE)
COPIES = ("gpu_memcpy", "gpu_memset")
_SMALL, _SHORTER = 64 << 20, 100  # bytes; and how many times shorter a compressed trace may be


class CompleteEvent(NamedTuple):
    """One complete event: start and end in whole nanoseconds."""

    start: int
    end: int
    name: str
    cat: str
    thread: tuple[Any, Any]
    args: dict[str, Any]


def from_kineto(sources: Source | Sequence[Source]) -> Trace:
    """A measured trace from torch's profiler: a file (`.json`, `.json.gz`) or dict for each rank.

    The number of a rank comes from `distributedInfo`, or else from the file's position. If there are GPU kernels, these
    are the instructions. Otherwise the instructions are the outermost operators of each CPU thread, and Optimizer.step.
    Each keeps its name:

    FORWARD      compute; BACKWARD if autograd's engine launched it, STEP if an optimizer did
    SEND, RECV   messages, by their names; ALL_REDUCE for any collective
    FETCH        copies to the device (and on it); OFFLOAD copies from it

    Compute is on the stream `compute`, which counts as busy. Compute that overlaps it is on `compute (2)`, which does
    not count. The trace knows nothing about values, and so nothing about memory. Clocks of several machines are not
    corrected.
    Errors: MiniparError if a file cannot be read, is no JSON, has no traceEvents, no events to show, a duration
    that is negative or no number; or if two files are of one rank.
    """
    from minipar.trace import Trace

    many = [sources] if isinstance(sources, (str, os.PathLike, dict)) else list(sources)
    if not many:
        raise MiniparError("no trace to import: give a file, or a list with one file per rank")
    files = [_load(source, f"trace {k}") for k, source in enumerate(many)]
    ranked: dict[int, tuple[str, dict[str, Any]]] = {}
    for position, (label, data) in enumerate(files):
        rank = _rank(data, position)
        if rank in ranked:
            raise MiniparError(f"{ranked[rank][0]} and {label} are both of rank {rank}: give one file per rank")
        ranked[rank] = (label, data)
    order = {rank: row for row, rank in enumerate(sorted(ranked))}
    base = min(_base(*ranked[rank]) for rank in order)
    try:
        rows = [_instructions(*ranked[rank], row, order, _base(*ranked[rank]) - base) for rank, row in order.items()]
    except STUMBLES as error:
        raise MiniparError(f"{files[0][0]}: events that cannot be: {type(error).__name__}: {error}") from None
    notes = ["imported from torch's profiler, which says nothing of memory"]
    if list(order) != list(order.values()):
        notes.append("ranks " + ", ".join(f"{row} = {rank} of the job" for rank, row in order.items()))
    program = Program(
        tuple(tuple(ins for _, _, ins in row) for row in rows),
        layers=0, microbatches=1, groups=(), mesh=(("dp", len(rows)), ("pp", 1)), name="imported",
    )  # fmt: skip
    first = min(start for row in rows for start, _, _ in row)
    starts = [[(start - first) / 1e9 for start, _, _ in row] for row in rows]
    ends = [[(end - first) / 1e9 for _, end, _ in row] for row in rows]
    return Trace(program, starts, ends, lambda rank, value: 0, "measured", "bytes", (0,) * len(rows), "; ".join(notes))


# reading --------------------------------------------------------------------------------------------------------------


def _load(source: Source, label: str) -> tuple[str, dict[str, Any]]:
    """The name of a source for messages, and its contents."""
    data: Any = source
    if isinstance(source, (str, os.PathLike)):
        label = str(source)
        try:
            raw = Path(source).read_bytes()
            data = json.loads(_unpacked(raw, label) if raw[:2] == b"\x1f\x8b" else raw)
        except (OSError, EOFError, zlib.error) as error:
            raise MiniparError(f"{label} cannot be read: {error}") from None
        except (ValueError, RecursionError) as error:
            raise MiniparError(f"{label} is not JSON: {error}") from None
    if isinstance(data, list):  # the other form of the format has only the events
        data = {"traceEvents": data}
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise MiniparError(f"{label} is not a trace: it has no list traceEvents")
    return label, data


def _unpacked(raw: bytes, label: str) -> bytes:
    """The contents of a compressed file. MiniparError if it is as good as nothing but repetitions, as no trace is: that
    could fill the memory."""
    found, most = io.BytesIO(), max(_SMALL, len(raw) * _SHORTER)
    with gzip.open(io.BytesIO(raw)) as file:
        while part := file.read(1 << 20):
            found.write(part)
            if found.tell() > most:
                raise MiniparError(
                    f"{label} cannot be a trace: its {len(raw):,} bytes become more than {most:,}; unpack it first"
                )
    return found.getvalue()


def _rank(data: dict[str, Any], position: int) -> int:
    info = data.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and rank >= 0 else position


def _base(label: str, data: dict[str, Any]) -> int:
    base = data.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int):
        raise MiniparError(f"{label} has a baseTimeNanoseconds of {base!r}: it must be a whole number")
    return base


def _complete(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in data["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]


def _slice(label: str, event: dict[str, Any], shift: int = 0) -> CompleteEvent:
    name, ts, dur = str(event.get("name", "")), event.get("ts"), event.get("dur")
    if not (isinstance(ts, (int, float)) and isinstance(dur, (int, float)) and math.isfinite(ts + dur)):
        raise MiniparError(f"{label}: the event `{name}` has ts={ts!r} and dur={dur!r}: both must be numbers")
    if dur < 0:
        raise MiniparError(f"{label}: the event `{name}` at {ts} us has a negative duration, {dur} us")
    start = round(ts * 1000) + shift
    args = event.get("args")
    thread = (event.get("pid"), event.get("tid"))
    cat = str(event.get("cat", ""))
    return CompleteEvent(start, start + round(dur * 1000), name, cat, thread, args if isinstance(args, dict) else {})


def _outermost(slices: Iterable[CompleteEvent]) -> list[CompleteEvent]:
    """The slices of each thread that are not inside another slice."""
    ends: dict[tuple[Any, Any], int] = {}
    found = []
    for piece in slices:
        last = ends.get(piece.thread)
        if last is None or piece.start >= last or piece.end > last:
            found.append(piece)
            ends[piece.thread] = piece.end
    return found


class Inside:
    """Says whether a moment of a thread is inside one of these slices."""

    def __init__(self, slices: Iterable[CompleteEvent]) -> None:
        self.spans: dict[tuple[Any, Any], list[tuple[int, int]]] = {}
        for piece in _outermost(slices):
            self.spans.setdefault(piece.thread, []).append((piece.start, piece.end))

    def __call__(self, thread: tuple[Any, Any], time: int) -> bool:
        mine = self.spans.get(thread, [])
        k = bisect_right(mine, (time, math.inf)) - 1
        return k >= 0 and time < mine[k][1]


# instructions ---------------------------------------------------------------------------------------------------------

Timed = tuple[int, int, Instruction]


def _instructions(label: str, data: dict[str, Any], row: int, order: dict[int, int], shift: int) -> list[Timed]:
    """What one rank did, in the order of starts. `order` maps ranks of the job to ranks of the trace."""
    slices = [_slice(label, event, shift) for event in _complete(data)]
    slices.sort(key=lambda s: (s.start, -s.end))  # of slices that begin together, the outer one comes first
    on_gpu = [s for s in slices if s.cat == "kernel" or s.cat in COPIES]
    pieces = on_gpu or _on_cpu(slices)
    if not pieces:
        raise MiniparError(
            f"{label} has no events to show: complete events (ph X) of category kernel or cpu_op were looked for"
        )
    launches = {s.args["correlation"]: s for s in slices if s.cat.startswith("cuda_") and "correlation" in s.args}
    backward = Inside(s for s in slices if s.cat == "cpu_op" and BACKWARD.search(s.name))
    step = Inside(s for s in slices if STEP.match(s.name) and s.cat != "gpu_user_annotation")
    found: list[Timed] = []
    busy = -math.inf
    for piece in sorted(pieces, key=lambda s: (s.start, s.end)):
        if piece.cat in COPIES:
            ins = _copy(piece)
        elif MESSAGE.search(piece.name):
            ins = _message(piece, row, order)
        else:
            launch = launches.get(piece.args.get("correlation"), None if on_gpu else piece)
            op = _compute(piece, launch, backward, step)
            stream = "compute" if piece.start >= busy else "compute (2)"
            busy = piece.end if stream == "compute" else busy
            ins = Instruction(op, (), -1, 0, stream=stream, name=piece.name)
        found.append((piece.start, piece.end, ins))
    return found


def _on_cpu(slices: list[CompleteEvent]) -> list[CompleteEvent]:
    """The slices of a trace without kernels: outermost operators and optimizer steps of each thread, and messages."""
    sent = [s for s in slices if MESSAGE.search(s.name) and not CALL.search(s.name)]
    work = [s for s in slices if s.cat == "cpu_op" or (s.cat == "user_annotation" and STEP.match(s.name))]
    outer = _outermost(s for s in work if CALL.search(s.name) or not MESSAGE.search(s.name))
    return _outermost(sent) + [s for s in outer if not (sent and CALL.search(s.name))]


def _compute(piece: CompleteEvent, launch: CompleteEvent | None, backward: Inside, step: Inside) -> Op:
    if launch is not None:
        if step(launch.thread, launch.start):
            return Op.STEP
        if backward(launch.thread, launch.start):
            return Op.BACKWARD
    if BACKWARD.search(piece.name):
        return Op.BACKWARD
    return Op.STEP if launch is None and UPDATE.search(piece.name) else Op.FORWARD


def _copy(piece: CompleteEvent) -> Instruction:
    words = piece.name.split()
    if len(words) > 1 and words[1] in ("DtoH", "HtoD", "DtoD", "PtoP"):
        op = Op.OFFLOAD if words[1] == "DtoH" else Op.FETCH
        return Instruction(op, (), -1, 0, stream=f"copy {words[1]}", name=piece.name)
    return Instruction(Op.FETCH, (), -1, 0, stream="copy", name=piece.name)


def _message(piece: CompleteEvent, row: int, order: dict[int, int]) -> Instruction:
    """A message or collective. The other ranks are known only if the profiler wrote them, as it does for NCCL."""
    what = str(piece.args.get("Collective name") or piece.name).lower()
    for word, op, other in (("send", Op.SEND, "Dst Rank"), ("recv", Op.RECV, "Src Rank")):
        if word in what:
            peer = order.get(piece.args.get(other, -1), -1)
            stream = f"{word} {peer}" if peer >= 0 else word
            return Instruction(op, (), -1, 0, stream=stream, peer=peer, name=piece.name)
    listed = re.findall(r"\d+", str(piece.args.get("Process Group Ranks", "")))
    group = tuple(sorted(order[int(rank)] for rank in listed if int(rank) in order)) or tuple(order.values())
    if row not in group:
        group = tuple(order.values())
    stream = "group " + ",".join(map(str, group))
    return Instruction(Op.ALL_REDUCE, (), -1, 0, stream=stream, group=group, name=piece.name)
