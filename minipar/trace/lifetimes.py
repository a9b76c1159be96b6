"""Memory of a rank from its program: a value is live from the instruction that writes it to the one that frees it."""

from __future__ import annotations

from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from minipar.costs.unit import KEPT
from minipar.program import Instruction, Op, Value, chunk, grad, tier, version_of
from minipar.trace.memory_series import ALL_KINDS, CODES, Curve, Series

if TYPE_CHECKING:
    from minipar.trace import Trace

KINDS = {
    "param": "parameters",
    "grad": "gradients",
    "optimizer_state": "optimizer",
    "param_shard": "parameters",
    "grad_shard": "gradients",
    "optimizer_shard": "optimizer",
    "buffer": "buffers",
    "residual": "buffers",
    "norm": "temporary",
    "served": "parameters",
    "served_state": "optimizer",
    "pushed": "gradients",
    "output": "activations",
    "grad_output": "activations",
    "saved": "activations",
    "chunk": "data",
    "incoming": "buffers",
    "saved_weight": "activations",
    "carry": "activations",
    "grad_carry": "activations",
}


class Life(NamedTuple):
    """One value while it is live: from the start of the instruction that writes it to the end of the one that frees it.

    end     None: it is live until the end of the trace
    held    whether the rank had it before the first instruction
    """

    value: Value
    start: float
    end: float | None
    size: float
    held: bool = False


def live_values(trace: Trace, rank: int) -> list[Life]:
    """The life of every value on the device of a rank, those that it begins with first. A version of parameters that is
    updated in place has one life, under its first name."""
    return [Life(*one) for one in _found(trace, rank, all_of_them=True)]


def _found(trace: Trace, rank: int, all_of_them: bool) -> list[list[Any]]:
    """Lists with the fields of `Life`; without `all_of_them` only values that have a size or exist from the
    beginning."""
    row, starts, ends = trace.program.ranks[rank], trace.starts[rank], trace.ends[rank]
    first = trace.span[0]
    found: list[list[Any]] = []
    live: dict[Value, int] = {}  # its place in `found`
    for value in trace.program.state[rank] if trace.program.state else ():
        if tier(value) == "device":
            live[value] = len(found)
            found.append([value, first, None, trace.size(rank, value), True])
    # (if memory is counted in activations, only saved values have a size, and no message brings these)
    few = trace.unit == "activations" and not all_of_them
    followed = KEPT if few else KINDS.keys()
    STEP, SEND, RECV, size_of = Op.STEP, Op.SEND, Op.RECV, trace.size
    for k, op in enumerate(trace.program.ops[rank]):
        if few and (op is SEND or op is RECV):
            continue
        ins = row[k]
        for value in ins.writes if op is not STEP else _not_in_place(ins, live):
            kind = value[0]
            if kind in followed and value not in live:
                # (a version of parameters has only the trainable ones: frozen ones exist once)
                size = size_of(rank, grad(value.index) if version_of(value) >= 0 else value)
                if size or all_of_them:
                    # (what an input half leaves is part of the memory that it frees)
                    start = ends[k] if kind == "saved_weight" else starts[k]
                    live[value] = len(found)
                    found.append([value, start if start > first else first, None, size, False])
        for value in ins.frees:
            if value in live:
                found[live.pop(value)][2] = ends[k]
    return found


def _not_in_place(step: Instruction, live: dict[Value, int]) -> list[Value]:
    """What a STEP writes, without versions of parameters that it makes in place. Such a version takes the place of the
    old one in `live`."""
    old = {v.index: v for v in step.frees if version_of(v) >= 0}
    rest = []
    for value in step.writes:
        if version_of(value) < 0 or value.index not in old:
            rest.append(value)
        elif old[value.index] in live:
            live[value] = live.pop(old[value.index])
    return rest


def series_of(trace: Trace, rank: int) -> Series:
    """The same as a series, for a rank whose allocations nobody follows, such as a parameter server."""
    series = Series()
    live = set(trace.program.state[rank])
    for value in live:
        owner = KINDS[value.kind], value.index
        series.before[owner] = series.before.get(owner, 0) + int(trace.size(rank, value))
    for k, ins in enumerate(trace.program.ranks[rank]):
        for value in ins.writes:
            if value not in live:
                live.add(value)
                series.add(trace.starts[rank][k], k, int(trace.size(rank, value)), KINDS[value.kind], value.index)
        for value in ins.frees:
            live.discard(value)
            series.add(trace.ends[rank][k], k, -int(trace.size(rank, value)), KINDS[value.kind], value.index)
    return series


def lifetimes(trace: Trace, rank: int) -> Curve:
    """Memory of a rank over time, from the lives of its values."""
    found = _found(trace, rank, all_of_them=False)
    if trace.data:
        found.append([chunk(0), trace.span[0], None, trace.data[rank], True])
    if not found:
        return Curve([], [], {name: [] for name in ALL_KINDS})
    changes: list[tuple[float, bool, float, int]] = []  # when, whether it allocates, by how much, of which kind
    codes = set()
    for value, start, end, size, had in found:
        code = CODES[KINDS[value.kind]]
        if size:
            codes.add(code)
        changes.append((start, not had, size, code))
        if end is not None:
            freed = grad(value.index) if version_of(value) >= 0 else value
            changes.append((end, False, -(trace.size(rank, freed) if had else size), code))
    changes.sort(key=itemgetter(0, 1))  # frees come before allocations of the same moment
    level, series = dict.fromkeys(sorted(codes), 0.0), {code: list[float]() for code in codes}
    times: list[float] = []
    total: list[float] = []
    for (time, _, change, code), (then, allocates, *_) in zip(changes, [*changes[1:], (inf, True)], strict=True):
        if code in level:
            level[code] += change
        if allocates or then != time:  # of several frees at one moment only the last is shown
            times.append(time)
            total.append(sum(level.values()))
            for one, now in level.items():
                series[one].append(now)
    nothing = [0.0] * len(times)
    return Curve(times, total, {kind: series.get(CODES[kind], nothing) for kind in ALL_KINDS})
