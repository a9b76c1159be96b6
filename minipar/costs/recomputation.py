"""Recomputation on one chain of layers: time and memory of a schedule, and simple ways to choose one.

A schedule is a list of `Move`s for one micro-batch. Here layers are in segments of 2; the last segment is not
recomputed:

    F0 F1      F2 F3      F4* F5*   B5 B4     R2* R3*   B3 B2     R0* R1*   B1 B0           * saves for backward
       output(1)  output(3)   stay: the checkpoints         (each segment runs forward again, from its checkpoint)

With segments of s layers out of N, N/s checkpoints of a_in bytes stay, and one segment at a time holds s a_saved:

    peak(s) = N/s a_in + s a_saved,   least at   s = sqrt(N a_in / a_saved),   where it is 2 sqrt(N a_in a_saved)

This s is sqrt(N) only for layers that save as much as their output. The price is one more forward. For layers of
unequal sizes no formula is right, and `square_root` counts the memory of each length.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. Optimal schedules are in `reversal.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeVar

from minipar.costs.measured import Profile
from minipar.errors import PlanError
from minipar.program import Op

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class LayerCosts:
    """Times, and sizes in bytes, of one micro-batch on every layer of a model.

    forward, backward   times of each layer
    output              its output
    saved               what autograd keeps of it in addition to its input and its output
    gradient            the gradient of its output
    carry               of every measured slice of a sequence, what each layer hands on to the next slice
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    output: tuple[int, ...]
    saved: tuple[int, ...]
    gradient: tuple[int, ...]
    carry: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        tables = (self.forward, self.backward, self.output, self.saved, self.gradient)
        if len({len(table) for table in tables}) != 1 or not self.forward:
            raise PlanError(f"layer costs: {', '.join(str(len(t)) for t in tables)} entries; tables need one a layer")
        if not all(0 <= x < math.inf for table in tables for x in table):
            raise PlanError("layer costs: times and bytes must be finite numbers of at least 0")

    @staticmethod
    def of(profile: Profile, rows: int | None = None) -> LayerCosts:
        """The costs in a profile, for micro-batches of `rows` rows. Default: of each layer the most that was measured,
        over all numbers of rows and all slices of sequences."""
        measured = sorted(profile.forward)
        if rows is not None and rows not in measured:
            raise PlanError(f"rows={rows}: not in the profile, which has {', '.join(map(str, measured))}")

        def most(table: dict[int, tuple[T, ...]]) -> tuple[T, ...]:
            return tuple(map(max, zip(*table.values(), strict=True))) if rows is None else table[rows]

        carried = tuple(row for _, row in sorted(profile.carry_bytes.items()))
        return LayerCosts(
            most(profile.forward),
            most(profile.backward),
            most(profile.output_bytes),
            most(profile.saved_bytes),
            most(profile.grad_output_bytes),
            carried,
        )

    @staticmethod
    def equal(layers: int, output: int = 1, saved: int = 0, forward: float = 1.0, backward: float = 2.0) -> LayerCosts:
        """Costs of equal layers. The defaults are those of a layer that saves only its own output, such as tanh(Wx)."""
        times, sizes = ((forward,) * layers, (backward,) * layers), ((output,) * layers, (saved,) * layers)
        return LayerCosts(*times, *sizes, sizes[0])

    def chain(self, start: int, stop: int, first: int = 0) -> Chain:
        """Layers `start` to `stop` of the model as a chain. Layer `first` is the last one that a gradient reaches."""
        part = slice(start, stop)
        sizes = self.output[part], self.saved[part], self.gradient[part]
        given = self.gradient[start - 1] if start > first else 0
        return Chain(self.forward[part], self.backward[part], *sizes, given, stop == len(self.forward))


@dataclass(frozen=True)
class Chain:
    """Neighbouring layers that go forward and backward on one device, counted from 0. Its fields are those of
    `LayerCosts`, and:

    given   bytes of the gradient of the chain's input
    ends    whether the model ends here: then the loss stays until backward, and no gradient comes from outside
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    output: tuple[int, ...]
    saved: tuple[int, ...]
    gradient: tuple[int, ...]
    given: int = 0
    ends: bool = True

    def __len__(self) -> int:
        return len(self.forward)


class Move(NamedTuple):
    """One run of one layer in a schedule.

    saves   whether it saves what backward needs
    hands   whether it keeps its output; the last layer of a recomputed segment runs again only for what it saves
    drops   whether its input is freed, because it is not needed any more or will be recomputed
    """

    op: Op
    layer: int
    saves: bool = False
    hands: bool = True
    drops: bool = False


Draft = Sequence[tuple[Op, int, bool]]  # op, layer, saves


def moves(draft: Draft) -> tuple[Move, ...]:
    """A schedule, from the order in which layers run and from which of these runs save.

    The rest follows from these: an output is kept only if a later move reads it, and stays until the last read before
    it is computed again.
    """
    last = max((layer for _, layer, _ in draft), default=-1)
    read_next: set[int] = set()  # outputs whose next use after this move is a read
    backwards = []
    for op, layer, saves in reversed(draft):
        if op is Op.BACKWARD:
            backwards.append(Move(op, layer, drops=True))
        else:
            hands = op is Op.FORWARD or (layer != last and layer in read_next)
            backwards.append(Move(op, layer, saves, hands, layer > 0 and layer - 1 not in read_next))
            read_next.discard(layer)
        read_next.add(layer - 1)
    return tuple(reversed(backwards))


def keep_everything(layers: int) -> tuple[Move, ...]:
    """The schedule without recomputation."""
    return in_segments(layers, ())


def in_segments(layers: int, segments: Iterable[range]) -> tuple[Move, ...]:
    """The schedule in which each segment is recomputed before its backward. Layers in no segment keep what they
    save."""
    segments = list(segments)
    again = {layer for segment in segments for layer in segment}
    draft = [(Op.FORWARD, layer, layer not in again) for layer in range(layers)]
    ends = {segment[-1]: segment for segment in segments}
    for layer in reversed(range(layers)):
        draft += [(Op.RECOMPUTE, l, True) for l in ends.get(layer, ())]
        draft.append((Op.BACKWARD, layer, False))
    return moves(draft)


def at_once(schedule: Sequence[Move]) -> tuple[Move, ...]:
    """The schedule if backward follows forward immediately: forward then saves what would be recomputed first.

    The peak is the same, because at its end forward holds what this recomputation would hold at its end.
    """
    forward, backward = halves(schedule)
    count = next((k for k, move in enumerate(backward) if move.op is Op.BACKWARD), len(backward))
    kept = {move.layer: move.saves for move in backward[:count]}
    draft = [(m.op, m.layer, kept.get(m.layer, m.saves)) for m in forward]
    return moves(draft + [(m.op, m.layer, m.saves) for m in backward[count:]])


def halves(schedule: Sequence[Move]) -> tuple[Sequence[Move], Sequence[Move]]:
    """The schedule in two parts: the forwards, and all moves after them."""
    count = next((k for k, move in enumerate(schedule) if move.op is not Op.FORWARD), len(schedule))
    return schedule[:count], schedule[count:]


class Level(NamedTuple):
    """Bytes at a move of a schedule: the most while it runs, and those that stay after it."""

    during: int
    after: int


def course(chain: Chain, schedule: Sequence[Move]) -> list[Level]:
    """The memory at each move, counted layer by layer.

    It counts outputs, gradients of outputs and what is saved, but not the chain's input, which stays all the time.
    """
    last, turn = len(chain) - 1, len(halves(schedule)[0]) - 1
    now = 0
    levels = []
    for k, (op, layer, saves, hands, drops) in enumerate(schedule):
        before = chain.output[layer - 1] if layer else 0
        if op is Op.BACKWARD:
            now += chain.gradient[layer - 1] if layer else chain.given
            most = now
            now -= chain.saved[layer] + before
            now -= chain.output[last] if layer == last and chain.ends else chain.gradient[layer]
        else:
            now += chain.output[layer] * hands + chain.saved[layer] * saves
            most = now
            now -= before * drops
            if k == turn < len(schedule) - 1 and not chain.ends:  # its output is sent, and its gradient arrives
                now += chain.gradient[last] - chain.output[last]
                most = max(most, now)
        levels.append(Level(most, now))
    return levels


def memory(chain: Chain, schedule: Sequence[Move]) -> tuple[int, int]:
    """(bytes held between forward and backward, peak bytes), counted as in `course`."""
    levels, turn = course(chain, schedule), len(halves(schedule)[0]) - 1
    peak = max((level.during for level in levels), default=0)
    if not 0 <= turn < len(schedule) - 1:
        return 0, peak
    return levels[turn].after - (0 if chain.ends else chain.gradient[-1]), peak


def needed(chain: Chain, schedule: tuple[Move, ...], in_flight: int = 1) -> int:
    """Bytes with one micro-batch at its peak and the others between forward and backward."""
    held, peak = memory(chain, schedule)
    return (in_flight - 1) * held + peak


def time(chain: Chain, schedule: Iterable[Move]) -> float:
    """Time of all moves, one after the other."""
    return sum((chain.backward if m.op is Op.BACKWARD else chain.forward)[m.layer] for m in schedule)


def recomputed(schedule: Iterable[Move]) -> int:
    """How many layers run forward again."""
    return sum(move.op is Op.RECOMPUTE for move in schedule)


# which segments ------------------------------------------------------------------------------------------------------


def every(layers: int, length: int) -> tuple[range, ...]:
    """Segments of `length` layers; the last segment has the remaining layers."""
    return tuple(range(a, min(a + length, layers)) for a in range(0, layers, length))


def square_root(layers: int, chain: Chain | None = None, in_flight: int = 1) -> int:
    """The segment length of least memory, with f micro-batches that wait for their backward.

    Each of these holds its checkpoints, but only one at a time holds a whole segment. Without sizes (no chain) a layer
    is assumed to save as much as its output, which gives the well-known sqrt(N f). With sizes the memory of every
    length is counted layer by layer, as `needed` does. Of equally good lengths it takes the one that is nearest to
    sqrt(N f a_in / a_saved).
    """
    if chain is None:
        return _by_formula(layers, 1.0, in_flight)
    whole = sum(chain.output)
    usual = _by_formula(layers, whole / max(1, whole + sum(chain.saved)), in_flight)
    bounds = {length: _at_least(chain, length, in_flight) for length in range(1, layers + 1)}
    best = (math.inf, 0, 0)
    for length in sorted(bounds, key=bounds.__getitem__):
        if bounds[length] > best[0]:
            break
        schedule = in_segments(layers, every(layers, length))
        schedule = at_once(schedule) if in_flight == 1 else schedule
        best = min(best, (needed(chain, schedule, in_flight), abs(length - usual), length))
    return best[2]


def _by_formula(layers: int, ratio: float, in_flight: int) -> int:
    return min(layers, max(1, round(math.sqrt(layers * in_flight * ratio))))


def _at_least(chain: Chain, length: int, in_flight: int) -> int:
    """A lower bound of `needed` for segments of this length: the checkpoints, and what one segment saves."""
    saved, output = ([0, *accumulate(sizes)] for sizes in (chain.saved, chain.output))
    most = before = 0
    for segment in every(len(chain), length):
        a, b = segment.start, segment.stop
        most = max(most, before + saved[b] - saved[a] + output[b - 1] - output[a])
        before += chain.output[b - 1] if b < len(chain) else 0
    return most + (in_flight - 1) * before


def greedy(chain: Chain, limit: int) -> tuple[range, ...]:
    """Chen's algorithm 3: a segment ends as soon as its layers save more than `limit` bytes."""
    segments, start, total = [], 0, 0
    for layer in range(len(chain)):
        total += chain.saved[layer] + chain.output[layer]
        if total > limit or layer == len(chain) - 1:
            segments.append(range(start, layer + 1))
            start, total = layer + 1, 0
    return tuple(segments)


def chen(chain: Chain, budget: int) -> tuple[Move, ...]:
    """The fastest of Chen's greedy segmentations that fit into `budget` bytes. Errors: PlanError if none fits.

    It tries every limit that makes a difference: O(N^2) of them, each in O(N). It is not optimal: see `reversal.rotor`.
    """
    ends = [0, *accumulate(map(sum, zip(chain.saved, chain.output, strict=True)))]
    limits = {ends[b] - ends[a] for b in range(len(ends)) for a in range(b)} | {0}
    best: tuple[float, int, tuple[Move, ...]] | None = None
    least = math.inf
    for limit in sorted(limits):
        schedule = at_once(in_segments(len(chain), greedy(chain, limit)))
        peak = memory(chain, schedule)[1]
        least = min(least, peak)
        found = (time(chain, schedule), peak, schedule)
        if peak <= budget and (best is None or found[:2] < best[:2]):
            best = found
    if best is None:
        raise PlanError(f"budget of {budget} bytes: below {least}, the least that greedy segments can do")
    return best[2]
