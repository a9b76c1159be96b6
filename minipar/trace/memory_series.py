"""Memory of one rank during one pass through its program: every allocation and every free, in order.

    time    instruction   bytes    kind          layer
    0.0012            3   +65536   activations       2
    0.0013            3   +16384   temporary         2
    0.0013            3   -16384   temporary         2

The memory tracker and the prediction both write such a series. Curves, peaks and owners are computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

ALL_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "data", "temporary")
CODES = {kind: code for code, kind in enumerate(ALL_KINDS)}


class Curve(NamedTuple):
    """Memory of one rank over time: from `times[k]` on, `total[k]` is live; `kinds[name][k]` is the part of each
    kind."""

    times: list[float]
    total: list[float]
    kinds: dict[str, list[float]]

    @property
    def peak(self) -> float:
        return max(self.total, default=0)


class Peak(NamedTuple):
    """The moment at which a rank has the most memory.

    bytes      live bytes at that moment
    index      the instruction during which it was reached; -1: before the first one
    by_kind    bytes of each of `ALL_KINDS`
    owners     (kind, layer, bytes), the largest first; layer -1 has what belongs to no layer
    """

    bytes: int
    index: int  # type: ignore[assignment]
    by_kind: dict[str, int]
    owners: list[tuple[str, int, int]]

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {mib(size)}" for kind, size in self.by_kind.items() if size)
        return f"{mib(self.bytes)} at instruction {self.index}: {parts}"


@dataclass(frozen=True)
class Series:
    """Changes of a rank's memory in the order in which they happened, as columns; see the top of the module.

    before     bytes of each (kind, layer) when the pass began
    highest    the peak of the whole run, if it is known: other passes may have needed more memory than this one
    device     what the device's own allocator reported, if it has one: name -> bytes
    """

    times: list[float] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)  # positions in ALL_KINDS
    layers: list[int] = field(default_factory=list)
    before: dict[tuple[str, int], int] = field(default_factory=dict)
    highest: int = 0
    device: dict[str, int] = field(default_factory=dict)

    def add(self, time: float, index: int, delta: int, kind: str, layer: int) -> None:
        """Add a change. (The columns grow while a pass runs. After that they do not change.)"""
        self.times.append(time)
        self.indices.append(index)
        self.deltas.append(delta)
        self.kinds.append(CODES[kind])
        self.layers.append(layer)

    @staticmethod
    def joined(passes: Sequence[tuple[int, Series]]) -> Series:
        """Passes one after another as one series. Each has the place of its first instruction in the whole."""
        whole = Series(before=passes[0][1].before, highest=max(each.highest for _, each in passes))
        for first, each in passes:
            whole.times.extend(each.times)
            whole.indices.extend(first + index for index in each.indices)
            whole.deltas.extend(each.deltas)
            whole.kinds.extend(each.kinds)
            whole.layers.extend(each.layers)
            whole.device.update({name: max(size, whole.device.get(name, 0)) for name, size in each.device.items()})
        return whole

    def __len__(self) -> int:
        return len(self.times)

    @property
    def at_start(self) -> int:
        return sum(self.before.values())

    def curve(self, zero: float = 0.0) -> Curve:
        """Bytes over time, by kind, beginning at `zero`. A change before `zero` counts as one at `zero`."""
        now = dict.fromkeys(ALL_KINDS, 0.0)
        for (kind, _), size in self.before.items():
            now[kind] += size
        times, total = [zero], [sum(now.values())]
        kinds = {name: [size] for name, size in now.items()}
        for time, delta, code in zip(self.times, self.deltas, self.kinds, strict=True):
            now[ALL_KINDS[code]] += delta
            times.append(max(time, times[-1]))
            total.append(total[-1] + delta)
            for name, column in kinds.items():
                column.append(now[name])
        return Curve(times, total, kinds)

    def totals(self) -> list[int]:
        """Live bytes at the beginning, and after every change."""
        return list(accumulate(self.deltas, initial=self.at_start))

    def peak(self) -> Peak:
        """The moment at which the most memory is live, and what it consists of."""
        totals = self.totals()
        k = max(range(len(totals)), key=totals.__getitem__)
        held = dict(self.before)
        for delta, code, layer in zip(self.deltas[:k], self.kinds[:k], self.layers[:k], strict=True):
            owner = ALL_KINDS[code], layer
            held[owner] = held.get(owner, 0) + delta
        return Peak(totals[k], self.indices[k - 1] if k else -1, by_kind(held), owners(held))


def by_kind(held: dict[tuple[str, int], int]) -> dict[str, int]:
    """Bytes of each kind, from bytes of each (kind, layer)."""
    found = dict.fromkeys(ALL_KINDS, 0)
    for (kind, _), size in held.items():
        found[kind] += size
    return found


def owners(held: dict[tuple[str, int], int]) -> list[tuple[str, int, int]]:
    """(kind, layer, bytes), the largest first."""
    return sorted(((kind, layer, size) for (kind, layer), size in held.items() if size > 0), key=lambda o: -o[2])


def mib(size: float) -> str:
    """Bytes as text in MiB."""
    return f"{size / 2**20:.2f} MiB"
