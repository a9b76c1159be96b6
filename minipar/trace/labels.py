"""The words and units that all pictures of traces have in common. Imports no drawing library.

A picture shows one trace, or two of the same ranks on one time axis: the predicted one first, the measured one second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from minipar.errors import MiniparError
from minipar.program import COLLECTIVES, MOVED, Instruction, Mesh, Op, Program, span
from minipar.trace import Trace
from minipar.trace.shades import Shades
from minipar.wording import several

_KINDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradient",
    Op.RECOMPUTE: "recompute",
    Op.STEP: "optimizer step",
    Op.REDUCE: "reduce",
    Op.SEND: "message",
    Op.RECV: "receive",
    Op.PUSH: "message",
    Op.PULL: "receive",
    Op.ACCEPT: "receive",
    Op.APPLY: "optimizer step",
    Op.REPLY: "message",
    Op.ALL_REDUCE: "all-reduce",
    Op.NORM: "all-reduce",
    Op.REDUCE_SCATTER: "reduce-scatter",
    Op.ALL_GATHER: "all-gather",
    Op.ALL_TO_ALL: "all-to-all",
}
#: The letters of collectives. A bar that has room for one letter carries the last one.
LETTERS = {"all-reduce": "AR", "reduce-scatter": "RS", "all-gather": "AG", "all-to-all": "AA", "collective": "C"}


def kind_of(ins: Instruction) -> str:
    """What an instruction is called in a legend. (An imported trace does not say which collective it was.)"""
    if ins.name and ins.op in COLLECTIVES:
        return "collective"
    return _KINDS.get(ins.op, "copy")


def number_of(program: Program, ins: Instruction) -> int:
    """The number on a bar: the micro-batch, counted on from step to step; or the first chunk in a collective's program;
    -1: no number."""
    if ins.op is Op.REDUCE:
        return ins.layers[0]
    return ins.microbatch if ins.microbatch < 0 else ins.microbatch + max(0, ins.step) * program.microbatches


Layers = Literal["", "with room", "first"]


def by_layers(program: Program) -> Layers:
    """Whether bars carry layers, since the micro-batch alone says too little: before it where ranks hold whole models
    (as in data parallel runs); where there is room in pipelines that compute a micro-batch in parts without shades."""
    if program.chunks or program.layers < 2:
        return ""
    if all(len(program.placement[rank]) == program.layers for rank in range(program.workers)):
        return "first"
    return "with room" if _in_parts(program) and not Shades(program).names else ""


def _in_parts(program: Program) -> bool:
    """Whether a rank runs several forwards of one micro-batch."""
    FORWARD = Op.FORWARD
    for ops, row in zip(program.ops, program.ranks, strict=True):
        numbers = [(ins.step, ins.microbatch) for op, ins in zip(ops, row, strict=True) if op is FORWARD]
        if len({*numbers}) < len(numbers):
            return True
    return False


def carried(ins: Instruction) -> str:
    """The layers that an instruction works on, or that a collective carries, as short text: `3`, `0:4`."""
    if ins.op is Op.NORM:
        return "norm"
    return span(sorted(ins.layers or {value.index for value in ins.reads if value.kind in MOVED}))


def words_of(program: Program, ins: Instruction, layers: Layers, number: str = "") -> tuple[str, ...]:
    """The words for a bar, the longest first; a picture takes the first that fits. No words: ().

        collective      AG 0:4 · AG · G       the letters, and what it carries
        compute         1                     the number
          with layers   3 mb1 · 3             of a part of the whole model: the layers are what differs from bar to bar
                        0:8 mb1 · 1           of the whole model, and in a pipeline, it is the micro-batch

    layers   `by_layers(program)`
    number   is written in the place of the number, if it is given
    """
    kind = kind_of(ins)
    if letters := LETTERS.get(kind):
        return tuple(dict.fromkeys((f"{letters} {carried(ins)}".rstrip(), letters, letters[-1])))
    if (found := number_of(program, ins)) >= 0:
        number = number or str(found)
    else:
        number = ""
    if not layers or ins.stream != "compute" or not ins.layers:
        return (number,) if number else ()
    own = carried(ins)
    if not number or program.microbatches * program.steps == 1:
        return (own,)
    return f"{own} mb{number}", own if layers == "first" and len(ins.layers) < program.layers else number


class Fitted(NamedTuple):
    """Words on a bar and their size; `beside`: they stand to the right of it. "" where nothing has room."""

    text: str = ""
    size: float = 0.0
    beside: bool = False


def fitted(
    words: Sequence[Sequence[str]], rooms: Sequence[float], sizes: Sequence[float], letter: float,
    free: Sequence[float] = (),
) -> list[Fitted]:  # fmt: skip
    """The words for bars of one kind, each of which has a room inside of it.

    sizes    possible ones, the largest first; `letter` is the width of a letter of size 1
    free     of collectives: the room to the right of each bar, for words that have none inside

    All bars get the longest words, in the largest size, that most of those with room for any words have room for; one
    with less room gets shorter or smaller ones. (js/lanes.js has the same rule. Collectives are few: each gets the
    longest that it has room for.)
    """
    last = max(map(len, words), default=1) - 1

    def fits(k: int, version: int, size: float, room: float) -> bool:
        return letter * size * len(words[k][min(version, len(words[k]) - 1)]) <= room

    order = [*((version, sizes[0]) for version in range(last)), *((last, size) for size in sizes)]
    able = [k for k, room in enumerate(rooms) if fits(k, last, sizes[-1], room)]
    from_, usual = next(one for one in order if free or sum(fits(k, *one, rooms[k]) for k in able) >= 0.7 * len(able))
    found = []
    for k, own in enumerate(words):
        tries = [(v, size) for v in range(from_, last + 1) for size in sizes if size <= usual]
        inside = next((one for one in tries if fits(k, *one, rooms[k])), None)
        beside = next((one for one in tries if not inside and free and fits(k, *one, free[k])), None)
        one = inside or beside
        found.append(Fitted(own[min(one[0], len(own) - 1)], one[1], beside is not None) if one else Fitted())
    return found


def legend(kinds: Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """What a legend says for words that are not said as they are: a collective with its letters; a difference."""
    return {kind: f"{kind} ({LETTERS[kind]})" for kind in kinds if kind in LETTERS} | {"alike": f"as {names[0]}"}


def place(program: Program, rank: int) -> str:
    """Where a rank is, if ranks share layers: its coordinates on the axes that have several ranks, `pp 1, tp 0`.
    Otherwise its stage and replica follow from what is drawn, and this is ""."""
    if program.sharing == 1 or rank >= program.workers:
        return ""
    mesh = Mesh(program.mesh)
    return ", ".join(f"{axis} {k}" for axis, k in mesh.coordinates(rank).items() if mesh.length(axis) > 1)


def rank_name(program: Program, rank: int) -> str:
    """A rank in a picture: `rank 3`; `rank 3 (pp 1, tp 1)` if ranks share layers; `worker 1`, `server 0` if there are
    parameter servers."""
    if program.serving is not None:
        return f"worker {rank}" if rank < program.workers else f"server {rank - program.workers}"
    where = place(program, rank)
    return f"rank {rank} ({where})" if where else f"rank {rank}"


def narrow(where: str) -> str:
    """A place of three axes without its spaces, for where there is little room."""
    return where.replace(" ", "") if len(where) > 12 else where


class TimeAxis(NamedTuple):
    """A time axis: times are multiplied by `scale`; `label` names the axis, `unit` a table's column."""

    scale: float
    unit: str

    @property
    def label(self) -> str:
        return f"time ({self.unit})"


def in_seconds(trace: Trace) -> bool:
    """Whether the trace's times are seconds, rather than multiples of a forward's time."""
    return trace.kind == "measured" or trace.unit == "bytes"


def clock(traces: Sequence[Trace]) -> TimeAxis:
    """Milliseconds where times are seconds; otherwise the unit of the costs, which is a forward's time."""
    return TimeAxis(1e3, "ms") if in_seconds(traces[0]) else TimeAxis(1.0, "units of the forward")


def names(traces: Sequence[Trace]) -> list[str]:
    """The name of each trace in a picture."""
    kinds = [trace.kind for trace in traces]
    return kinds if len(set(kinds)) == len(kinds) else ["first", "second"]


def duration(trace: Trace, time: float) -> str:
    """A time of the trace in words: `33.2 ms`, or `33` where the unit is a forward's time."""
    return f"{number(time * 1e3)} ms" if in_seconds(trace) else f"{time:.6g}"


def number(x: float) -> str:
    """A number with about four digits, without an exponent."""
    size = abs(x)
    digits = 3 if size < 10 else 2 if size < 100 else 1
    return f"{x:,.{digits}f}"


def mebibytes(size: float) -> str:
    """Bytes as a number of MiB with two decimals; a small number gets more decimals."""
    size /= 2**20
    return f"{size:,.2f}" if size >= 1 or not size else f"{size:.6f}".rstrip("0") if size < 0.01 else f"{size:.3f}"


def amount(trace: Trace, size: float) -> str:
    """Memory in words: `12.34 MiB`, or `4 activations` if no bytes are known."""
    if trace.unit == "bytes":
        return f"{mebibytes(size)} MiB"
    size = round(size, 3)
    return several(size, "activation")


def facts(trace: Trace) -> str:
    """One line: time, both bubbles, peak memory and its rank. For a collective it has the bytes that ranks send instead
    of bubbles, because it computes almost nothing. For a model with branches it also has the rank of every layer."""
    peaks = trace.peak_memory()
    top = max(range(len(peaks)), key=peaks.__getitem__)
    if trace.program.chunks:
        sent = trace.bytes_sent()
        work = f"a rank sends up to {mebibytes(max(sent))} MiB (rank {max(range(len(sent)), key=sent.__getitem__)})"
    else:
        work = f"bubble {trace.bubble_of_total():.1%} of total, {trace.bubble_of_ideal():.1%} of ideal"
    memory = f" · peak memory {amount(trace, peaks[top])} (rank {top})" if peaks[top] else ""  # (0: it is not known)
    return f"time {duration(trace, trace.time)} · {work}{memory}" + _held(trace.program)


def both(traces: Sequence[Trace]) -> str:
    """One line for two traces: what `facts` says of one, from the first to the second."""
    own = [facts(trace).split(" · ") for trace in traces]
    if [len(parts) for parts in own] == [len(own[0])] * 2:
        pairs = zip(*own, strict=True)
        return " · ".join(a if a == b else f"{a} → {_rest(a, b)}" for a, b in pairs)
    return " → ".join(facts(trace) for trace in traces)


def _rest(a: str, b: str) -> str:
    """The second of two facts without the words at its beginning that both have."""
    one, other = a.split(" "), b.split(" ")
    same = next((k for k, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)
    return " ".join(other[same:])


def _held(program: Program) -> str:
    """Which rank has which layers, if the model has branches; otherwise ""."""
    if not program.edges:
        return ""
    own = program.placement[: len(program.ranks) // program.replicas]
    shown = [f"{rank} has {span(layers)}" for rank, layers in enumerate(own[:8])]
    return (
        " · layers: rank " + ", ".join(shown) + (f", and {several(len(own) - 8, 'more rank')}" if len(own) > 8 else "")
    )


def idle(trace: Trace, rank: int) -> float:
    """The fraction of the makespan in which a rank does not compute."""
    return max(0.0, 1 - trace.busy[rank] / trace.time) if trace.time else 0.0


def share(trace: Trace, rank: int) -> str:
    """The words beside a rank's lane: how much of the time it is idle, or, in a collective, how much it sends."""
    if trace.program.chunks:
        return f"sends {mebibytes(trace.bytes_sent()[rank])} MiB"
    return f"{idle(trace, rank):.0%} idle"


def description(traces: Sequence[Trace]) -> str:
    """The picture in words, for people who cannot see it."""
    lines = []
    for trace, name in zip(traces, names(traces), strict=True):
        ranks = len(trace.program.ranks)
        shown = ", ".join(f"{rank_name(trace.program, r)} {idle(trace, r):.0%}" for r in range(min(ranks, 16)))
        more = f" and {several(ranks - 16, 'more rank')}" if ranks > 16 else ""
        idling = "" if trace.program.chunks else f" Idle: {shown}{more}."
        lines.append(f"{name.capitalize()} timeline of {several(ranks, 'rank')}: {facts(trace)}.{idling}")
        if trace.note:
            lines.append(f"{trace.note.rstrip('.')}.")
    return " ".join(lines)


def check(traces: Sequence[Trace]) -> None:
    """Refuse traces that cannot be drawn. Errors: MiniparError."""
    if isinstance(traces, Trace) or not all(isinstance(trace, Trace) for trace in traces):
        raise MiniparError("a picture needs a list of traces: [trace], or [predicted, measured]")
    if not 1 <= len(traces) <= 2:
        raise MiniparError(f"a picture shows one trace or two (predicted, measured), but there are {len(traces)}")
    for trace in traces:
        if not len(trace.program):
            raise MiniparError(f"the {trace.kind} trace is empty: its program has no instructions")
        _check_times(trace)
    if len(traces) == 2:
        a, b = (len(trace.program.ranks) for trace in traces)
        if a != b:
            raise MiniparError(
                f"the traces have {a} and {several(b, 'rank')}; only traces of the same ranks share a picture"
            )
        if in_seconds(traces[0]) != in_seconds(traces[1]):
            raise MiniparError(
                "one trace is in seconds, the other in units of the forward: they share no time axis; "
                "predict with the costs of a profile, simulate(program, costs)"
            )


def _check_times(trace: Trace) -> None:
    ranks = len(trace.program.ranks)
    if not ranks == len(trace.starts) == len(trace.ends):
        times = min(len(trace.starts), len(trace.ends))
        raise MiniparError(f"the {trace.kind} trace has times of {several(times, 'rank')}, but its program has {ranks}")
    for rank, row in enumerate(trace.program.ranks):
        starts, ends = trace.starts[rank], trace.ends[rank]
        if not len(row) == len(starts) == len(ends):
            raise MiniparError(
                f"rank {rank} of the {trace.kind} trace has {several(len(row), 'instruction')}, "
                f"but {len(starts)} starts and {len(ends)} ends"
            )
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if -math.inf < start <= end < math.inf:
                continue
            ins = row[index]
            if ins.op is Op.RECV and math.isfinite(start) and math.isfinite(end):
                continue  # a message may arrive before its receive is posted
            raise MiniparError(
                f"rank {rank} instruction {index} `{ins}` of the {trace.kind} trace runs from {start} to {end}: "
                "a duration must be a finite number of at least 0"
            )
