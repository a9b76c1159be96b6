"""Optimal recomputation of a chain of unequal layers: rotor.

Where must forward leave checkpoints, so that the backward costs least? The search recurses on the first checkpoint, at
layer k: run forward to it, solve the layers after it in the memory that it leaves, then solve the layers before it in
all of the memory (they run forward again).

    s ......... k ......... t         cost(s, t, m) = min over k of  (k - s)  +  cost(k, t, m - size)  +  cost(s, k, m)
      advance     m - size left       then again from s: all of m

For equal layers, of which only checkpoints are counted, that is revolve. rotor counts bytes, and may also keep what a
layer saves, so that this layer never runs again: with enough memory it recomputes nothing.

Sources: Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 2000; Beaumont et al., "Optimal checkpointing for
heterogeneous chains", 2019 (rotor; "persistent": a checkpoint stays until the backward that ends its use).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from minipar.costs.recomputation import Chain, Move, keep_everything, moves, needed
from minipar.errors import PlanError
from minipar.program import Op

if TYPE_CHECKING:
    import numpy as np

    Row = np.ndarray[tuple[int], np.dtype[np.float64]]

LayerPass = tuple[Op, int, bool]  # op, layer, saves
SLOTS = 500  # rotor divides a budget into so many slots; sizes are rounded up to whole slots


def rotor(chain: Chain, budget: int, in_flight: int = 1, slots: int = SLOTS) -> tuple[Move, ...]:
    """The fastest persistent schedule of a chain in `budget` bytes. Errors: PlanError, which names a budget that is
    enough.

    in_flight   number of micro-batches in memory: one goes backward while the others keep what they hold between
                forward and backward. With 1, backward follows forward immediately
    slots       resolution: sizes are rounded up to multiples of budget / slots, unless a common divisor makes them
                exact

    Memory is counted as in `recomputation.memory`. The schedule is optimal up to rounding. For several micro-batches in
    flight, it tries what each may hold in at most 64 steps. It takes O(N^3 slots) for the table, and O(N^2 slots) for
    each such step.
    """
    plain = keep_everything(len(chain))
    if needed(chain, plain, in_flight) <= budget:
        return plain
    found = _solve(chain, budget, in_flight, slots)
    if found is None:
        raise PlanError(
            f"budget of {budget} bytes: too small; with all recomputation it takes {minimum(chain, in_flight, slots)}"
        )
    return found


@lru_cache(64)
def minimum(chain: Chain, in_flight: int = 1, slots: int = SLOTS) -> int:
    """The least budget with which `rotor` finds a schedule, up to rounding; with several in flight, up to about a
    tenth."""
    found, before = needed(chain, keep_everything(len(chain)), in_flight), math.inf
    while found < 0.9 * before:  # the table of a smaller budget has finer slots
        table, unit = _table(chain, found, in_flight, slots)
        low, high = -1, table.room
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _draft(table, middle, in_flight, 16) is None else (low, middle)
        before, found = found, min(found, high * unit)
    while _solve(chain, found, in_flight, slots) is None:
        found += max(1, found // slots)
    return found


def _solve(chain: Chain, budget: int, in_flight: int, slots: int) -> tuple[Move, ...] | None:
    table, _ = _table(chain, budget, in_flight, slots)
    draft = _draft(table, table.room, in_flight, 64)
    if draft is None:
        return None
    seen: set[int] = set()
    named = []
    for op, layer, saves in draft:
        named.append((Op.RECOMPUTE if op is Op.FORWARD and layer in seen else op, layer, saves))
        seen.add(layer)
    return moves(named)


def _table(chain: Chain, budget: int, in_flight: int, slots: int) -> tuple[_Table, int]:
    """The table for all sizes up to a budget, and the bytes of a slot."""
    divisor = math.gcd(*chain.output, *chain.saved, *chain.gradient, chain.given) or 1
    unit = divisor if budget // divisor <= slots else -(-budget // slots)

    def slots_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // unit) for size in sizes)

    tables = slots_of(chain.output), slots_of(chain.saved), slots_of(chain.gradient)
    small = Chain(chain.forward, chain.backward, *tables, -(-chain.given // unit), chain.ends)
    return _Table(small, budget // unit, in_flight > 1), unit


def _draft(table: _Table, room: int, in_flight: int, steps: int) -> list[LayerPass] | None:
    """The moves that fit into so many slots (every run of a layer is a FORWARD), or None."""
    if in_flight == 1:
        return _unrolled(table, 0, table.last, room)
    return _several(table, room, in_flight, steps)


class _Table:
    """The tables of rotor's dynamic program.

    time[s, t][m]    least time of layers s to t, forward and backward, in m slots
    first[s, t][m]   how to begin: s means to keep what layer s saves; k > s means to run to a checkpoint before layer k

    The input of layer s is not counted, because the caller has counted it. The gradient that layer t gets is counted:
    from the start if t is inside the chain, from the end of its forward if t is the last layer. t = N means the last
    layer if it has run before, so that its gradient (or the loss) is counted from the start, too.
    """

    def __init__(self, chain: Chain, room: int, again: bool) -> None:
        self.chain, self.room, self.last = chain, room, len(chain) - 1
        self.time: dict[tuple[int, int], Row] = {}
        self.first: dict[tuple[int, int], Row] = {}
        for s in reversed(range(len(chain))):
            for t in range(s, len(chain) + again):
                self.time[s, t], self.first[s, t] = self._fill(s, t)

    def incoming(self, t: int) -> int:
        """Slots of what layer t's backward needs at its start: the gradient of its output, or the loss."""
        chain, last = self.chain, self.last
        return chain.output[last] if t >= last and chain.ends else chain.gradient[min(t, last)]

    def outgoing(self, s: int) -> int:
        return self.chain.gradient[s - 1] if s else self.chain.given

    def one_layer(self, s: int, t: int) -> int:
        """Slots needed to run layer s forward, keep what it saves, and run it backward at once, if s is the last of its
        part.
        """
        forward = self.chain.output[s] if t == self.last else 0
        return self.chain.saved[s] + max(forward, self.incoming(t) + self.outgoing(s))

    def kept(self, s: int, waits: int = 0) -> int:
        """Slots that forward and backward of layer s need, if what it saves and its output stay between them."""
        output, saved, gradient = self.chain.output[s], self.chain.saved[s], self.chain.gradient[s]
        return saved + max(output + waits, gradient + self.outgoing(s))

    def advance(self, s: int, k: int) -> int:
        """Slots needed to run forward from layer s to the checkpoint before layer k."""
        output = self.chain.output
        return max(output[layer] + (output[layer - 1] if layer > s else 0) for layer in range(s, k))

    def _fill(self, s: int, t: int) -> tuple[Row, Row]:
        np = _numpy()

        chain, size = self.chain, self.room + 1
        both = chain.forward[s] + chain.backward[s]
        first = np.full(size, s)
        if s == min(t, self.last):
            best = np.full(size, float(both))
            best[: self.one_layer(s, t)] = math.inf
            return best, first
        waits = self.incoming(t) if t != self.last else 0
        best = _after(self.time[s + 1, t], chain.output[s] + chain.saved[s]) + both
        best[: self.kept(s, waits)] = math.inf
        spent, widest = 0.0, 0
        for k in range(s + 1, min(t, self.last) + 1):
            spent += chain.forward[k - 1]
            widest = max(widest, chain.output[k - 1] + (chain.output[k - 2] if k - 1 > s else 0))
            taken, least = chain.output[k - 1], widest + waits
            if least >= size:
                break  # no room for this checkpoint, nor for a later one
            found = self.time[k, t][least - taken : size - taken] + self.time[s, k - 1][least:]
            found += spent
            better = found < best[least:]
            best[least:][better], first[least:][better] = found[better], k
        return best, first


def _numpy() -> Any:
    """NumPy, which a search under a budget takes for its tables. Errors: PlanError where it is missing."""
    try:
        import numpy
    except ImportError:
        raise PlanError(
            "checkpoint under a budget: needs NumPy, which is missing here; possible are none, sqrt, selective, "
            "a number of layers, and a list of layers"
        ) from None
    return numpy


def _after(row: Row, taken: int) -> Row:
    """The times if so many slots are taken already: row[m - taken]."""
    np = _numpy()

    moved = np.full(len(row), math.inf)
    if taken < len(row):
        moved[taken:] = row[: len(row) - taken]
    return moved


def _unrolled(table: _Table, s: int, t: int, room: int) -> list[LayerPass] | None:
    """The moves of layers s to t that fit into so many slots, or None."""
    chain = table.chain
    if room < 0 or not math.isfinite(table.time[s, t][room]):
        return None
    first = int(table.first[s, t][room])
    if first == s:
        inner = [] if s == min(t, table.last) else _unrolled(table, s + 1, t, room - chain.output[s] - chain.saved[s])
        return [(Op.FORWARD, s, True), *(inner or []), (Op.BACKWARD, s, False)]
    right = _unrolled(table, first, t, room - chain.output[first - 1])
    left = _unrolled(table, s, first - 1, room)
    return [*((Op.FORWARD, layer, False) for layer in range(s, first)), *(right or []), *(left or [])]


def _several(table: _Table, room: int, in_flight: int, steps: int) -> list[LayerPass] | None:
    """The moves of the whole chain if other micro-batches wait between their forward and backward, or None.

    If each of these may hold H slots, the running one has room - (in_flight - 1) H. It tries H in so many steps.
    """
    most = room // (in_flight - 1)
    best: tuple[float, list[LayerPass]] | None = None
    for held in range(0, most + 1, max(1, -(-most // steps))):
        found = _first_pass(table, held, room - (in_flight - 1) * held)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best and best[1]


def _first_pass(table: _Table, most: int, room: int) -> tuple[float, list[LayerPass]] | None:
    """The fastest moves through the chain that hold at most `most` slots after forward and never need more than `room`.

    best[s][h]: the least time of layers s to the end, forward and backward, if the layers before s hold h slots.
    """
    np = _numpy()

    chain, n, last = table.chain, len(table.chain), table.last
    loss = chain.output[last] if chain.ends else 0
    best: list[Row] = [np.full(most + 1, math.inf) for _ in range(n)] + [np.zeros(most + 1)]
    choice: list[Row] = [np.full(most + 1, -1) for _ in range(n)]
    left_behind = np.arange(most + 1)

    def inside(row: Row) -> Row:
        """A row of the table as a function of the slots h that are held: row[room - h]."""
        found = np.full(most + 1, math.inf)
        fits = left_behind <= room
        found[fits] = row[room - left_behind[fits]]
        return found

    def offer(s: int, name: int, times: Row, stays: int, takes: int) -> None:
        """Take these times for beginning at s in the way `name`, where there is room for it and for what stays."""
        times = np.where(left_behind <= min(room - takes, most - stays), times, math.inf)
        better = times < best[s]
        best[s][better], choice[s][better] = times[better], name

    def before(row: Row, stays: int) -> Row:
        """row[h + stays], as a function of h."""
        return np.concatenate([row[stays:], np.full(min(stays, most + 1), math.inf)])

    for s in reversed(range(n)):
        stays = chain.saved[s] + (chain.output[s] if s < last else loss)
        takes = table.kept(s) if s < last else table.one_layer(s, last)
        offer(s, s, before(best[s + 1], stays) + chain.forward[s] + chain.backward[s], stays, takes)
        for k in range(s + 1, n):
            times = before(best[k], chain.output[k - 1]) + inside(table.time[s, k - 1]) + sum(chain.forward[s:k])
            offer(s, k, times, chain.output[k - 1], table.advance(s, k))
        offer(s, n, inside(table.time[s, n]) + sum(chain.forward[s:]), loss, table.advance(s, n))
    if not math.isfinite(best[0][0]):
        return None

    forward: list[LayerPass] = []
    backward: list[list[LayerPass]] = []
    s = h = 0
    while s < n:
        k = int(choice[s][h])
        if k == s:
            forward.append((Op.FORWARD, s, True))
            backward.append([(Op.BACKWARD, s, False)])
            h, s = h + chain.saved[s] + (chain.output[s] if s < last else loss), s + 1
        else:
            forward += [(Op.FORWARD, layer, False) for layer in range(s, k)]
            backward.append(_unrolled(table, s, k - 1 if k < n else n, room - h) or [])
            h, s = h + (chain.output[k - 1] if k < n else loss), k
    return float(best[0][0]), [*forward, *(move for part in reversed(backward) for move in part)]
