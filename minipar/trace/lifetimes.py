"""Memory of a rank from its program: a value is live from the instruction that writes it to the one that frees it."""

from __future__ import annotations

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
    import numpy as np  # (not at the top: plans and programs do not need it)

    found = _found(trace, rank, all_of_them=False)
    if trace.data:
        found.append([chunk(0), trace.span[0], None, trace.data[rank], True])
    if not found:
        return Curve([], [], {name: [] for name in ALL_KINDS})
    values, starts, ends, sizes, held = zip(*found, strict=True)
    freed = [
        trace.size(rank, grad(v.index) if version_of(v) >= 0 else v) if had and end is not None else size
        for v, _, end, size, had in found
    ]
    codes = [CODES[KINDS[value[0]]] for value in values]
    # each life makes two changes: their time, whether they allocate, by how much, of which kind
    time, change = np.array((starts, ends), float).T.ravel(), np.array((sizes, freed), float).T.ravel()
    change[1::2] *= -1
    allocates, kind = np.zeros(len(time), bool), np.repeat(codes, 2)
    allocates[::2] = ~np.array(held)
    order = np.lexsort((allocates, time))  # frees come before allocations of the same moment
    order = order[: len(order) - ends.count(None)]  # (missing ends are sorted last, and left out)
    time, change, allocates, kind = time[order], change[order], allocates[order], kind[order]
    shown = np.ones(len(time), bool)  # of several frees at one moment only the last is shown
    shown[:-1] = allocates[1:] | (time[1:] != time[:-1])
    total = np.zeros(int(shown.sum()))
    kinds = dict.fromkeys(ALL_KINDS, total.tolist())
    for k in sorted({code for code, size in zip(codes, sizes, strict=True) if size}):
        level = np.cumsum(np.where(kind == k, change, 0.0))[shown]
        total += level
        kinds[ALL_KINDS[k]] = level.tolist()
    return Curve(time[shown].tolist(), total.tolist(), kinds)
