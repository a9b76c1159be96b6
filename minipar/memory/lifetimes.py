"""Memory of a rank as its program states it: values live from the instruction that writes to the one that frees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from minipar.memory.series import ALL_KINDS, CODES, Curve
from minipar.program import Op, Value, grad, tier, version_of

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


def _size(trace: Trace, rank: int, value: Value) -> float:
    """Bytes of a value that comes or goes; of a version of parameters what is trained: the rest is there once."""
    version = value.kind == "param" and value.step >= 0
    return trace.size(rank, grad(value.index) if version else value)


class Life(NamedTuple):
    """One value while it is live: from the start of what writes it to the end of what frees it; `end` None: to the end.

    `held`: the rank had it before the first instruction.
    """

    value: Value
    start: float
    end: float | None
    size: float
    held: bool = False


def lives(trace: Trace, rank: int) -> list[Life]:
    """Every value on the device of a rank, those that it begins with first; of a version made in place, the first."""
    return [Life(*one) for one in _found(trace, rank, all_of_them=True)]


def _found(trace: Trace, rank: int, all_of_them: bool) -> list[list[Any]]:
    """What `Life` has; without `all_of_them` only what has a size, or is there from the beginning."""
    row, starts, ends = trace.program.ranks[rank], trace.starts[rank], trace.ends[rank]
    first = trace.span[0]
    found: list[list[Any]] = []
    live: dict[Value, int] = {}  # its place in `found`
    for value in trace.program.state[rank] if trace.program.state else ():
        if tier(value) == "device":
            live[value] = len(found)
            found.append([value, first, None, trace.size(rank, value), True])
    STEP, size_of = Op.STEP, trace.size
    for k, ins in enumerate(row):
        # a version of parameters that is made of one that nothing needs any more: in place
        old = {v.index: v for v in ins.frees if version_of(v) >= 0} if ins.op is STEP else {}
        for value in ins.writes:
            kind = value.kind
            if old and version_of(value) >= 0 and value.index in old:
                if old[value.index] in live:
                    live[value] = live.pop(old[value.index])
            elif value not in live and " " not in kind:  # on the device
                size = _size(trace, rank, value) if kind == "param" else size_of(rank, value)
                if not size and not all_of_them:
                    continue
                # (what an input half leaves is part of what it found)
                start = ends[k] if kind == "saved_weight" else starts[k]
                live[value] = len(found)
                found.append([value, max(first, start), None, size, False])
        for value in ins.frees:
            place = live.pop(value, None)
            if place is not None:
                found[place][2] = ends[k]
    return found


def lifetimes(trace: Trace, rank: int) -> Curve:
    """Memory of a rank over time: live from the start of a value's writer to the end of what frees it."""
    import numpy as np  # (here: plans and programs do without)

    # when, whether it allocates, of which kind, by how much; frees come before allocations of the same moment
    changes: list[tuple[float, bool, int, float]] = []
    for value, start, end, size, held in _found(trace, rank, all_of_them=False):  # (most have no size in activations)
        code = CODES[KINDS[value.kind]]
        changes.append((start, not held, code, size))
        if end is not None:
            changes.append((end, False, code, -(_size(trace, rank, value) if held else size)))
    if trace.data:
        changes.append((trace.span[0], False, CODES["data"], trace.data[rank]))
    times, allocates, codes, sizes = map(list, zip(*changes, strict=True)) if changes else ([], [], [], [])
    order = np.lexsort((allocates, times))
    time, alone = np.array(times, float)[order], np.array(allocates, bool)[order]
    kind, change = np.array(codes, int)[order], np.array(sizes, float)[order]
    shown = np.ones(len(times), bool)  # of the frees of one moment the last
    shown[:-1] = alone[1:] | (time[1:] != time[:-1])
    total = np.zeros(int(shown.sum()))
    kinds = {name: total.tolist() for name in ALL_KINDS}
    for k in sorted(set(codes)):
        level = np.cumsum(np.where(kind == k, change, 0.0))[shown]
        total += level
        kinds[ALL_KINDS[k]] = level.tolist()
    return Curve([times[k] for k in order[shown].tolist()], total.tolist(), kinds)
