"""Memory of a rank as its program states it: values live from the instruction that writes to the one that frees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from minipar.memory.series import ALL_KINDS, Curve
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
    for k, ins in enumerate(row):
        # a version of parameters that is made of one that nothing needs any more: in place
        old = {v.index: v for v in ins.frees if version_of(v) >= 0} if ins.op is Op.STEP else {}
        for value in ins.writes:
            if old and version_of(value) >= 0 and value.index in old:
                if old[value.index] in live:
                    live[value] = live.pop(old[value.index])
            elif value not in live and " " not in value.kind:  # on the device
                size = _size(trace, rank, value)
                if not size and not all_of_them:
                    continue
                # (what an input half leaves is part of what it found)
                start = ends[k] if value.kind == "saved_weight" else starts[k]
                live[value] = len(found)
                found.append([value, max(first, start), None, size, False])
        for value in ins.frees:
            place = live.pop(value, None)
            if place is not None:
                found[place][2] = ends[k]
    return found


def lifetimes(trace: Trace, rank: int) -> Curve:
    """Memory of a rank over time: live from the start of a value's writer to the end of what frees it."""
    changes: list[tuple[float, int, str, float]] = []  # frees come before allocations of the same moment
    for value, start, end, size, held in _found(trace, rank, all_of_them=False):  # (most have no size in activations)
        changes.append((start, 0 if held else 1, KINDS[value.kind], size))
        if end is not None:
            changes.append((end, 0, KINDS[value.kind], -(_size(trace, rank, value) if held else size)))
    if trace.data:
        changes.append((trace.span[0], 0, "data", trace.data[rank]))
    changes.sort(key=lambda change: change[:2])
    now = dict.fromkeys((kind for kind in ALL_KINDS if any(change[2] == kind for change in changes)), 0.0)
    times: list[float] = []
    levels: list[tuple[float, ...]] = []  # of each kind in `now`
    for time, order, name, size in changes:
        now[name] += size
        if order or not times or times[-1] != time:
            times.append(time)
            levels.append(tuple(now.values()))
        else:
            levels[-1] = tuple(now.values())
    kinds = dict(zip(now, map(list, zip(*levels, strict=True)), strict=True)) if levels else {}
    nothing = [0.0] * len(times)
    return Curve(times, list(map(sum, levels)), {kind: kinds.get(kind, nothing) for kind in ALL_KINDS})
