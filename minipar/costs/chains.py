"""The dynamic program of `partition`: the least sum of stage times, where no stage may take more than a bound.

    least(s, j) = min over i of  least(s - 1, i) + t(i..j on rank s),   where t <= bound

The allowed i of a j are neighbours, so a table of minima over runs answers all j of a stage at once. Of each stage only
ends within a band are possible: before it the layers do not fit on the stages that follow, behind it not on those that
come before. And only ends that can still lead to a sum worth having are followed: if layers could be divided, what is
left would be done soonest by the fastest ranks left, each filled up to the bound.

    ranks of speed 3, 1, 2 left, bound 4, work 15 left: 12 on the first, in 4; 3 on the last, in 1.5; 5.5 at least
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

EXACT = 1e-13  # relative; rounding errors of sums are as large
LONG = 128  # a run of so many values is cheaper to look up in a table of minima than to go through


@dataclass(frozen=True)
class Found:
    """A partition: layers and time of each stage."""

    split: tuple[int, ...]
    times: tuple[float, ...]


class Chain:
    """Layers and ranks, ready for many bounds."""

    def __init__(self, work: list[float], cuts: list[float], rates: list[float]) -> None:
        self.before = np.concatenate([[0.0], np.cumsum(np.array(work, dtype=float))])  # work of the first j layers
        self.cuts = np.concatenate([[0.0], np.array(cuts, dtype=float)])
        self.left = self.before[-1] - self.before  # work of the others
        self.places = np.arange(len(work) + 1)
        self.work, self.cut_list, self.rates = work, cuts, rates
        self.longest = float(self.before[-1]) / min(rates) + max(cuts)  # no stage takes more
        # Of the ranks s, s + 1, ..., what the fastest k do in a unit of time; and the cheapest cuts between them.
        self.speeds = [np.cumsum([0.0, *sorted(rates[s:], reverse=True)]) for s in range(len(rates) + 1)]
        self.cheapest = np.cumsum([0.0, *sorted(cuts[:-1])[: len(rates) - 1]])[::-1]

    def solve(self, bound: float, most: float = math.inf) -> Found | None:
        """The split of least sum whose stages take at most `bound`; None if it is above `most` or there is none."""
        bound = min(bound, self.longest)
        limit = bound * (1 + EXACT)
        bands = self._bands(limit)
        if bands is None:
            return None
        values, low = np.zeros(1), 0  # least(s - 1, i) for i = low, low + 1, ...
        history = []
        for s, (rate, (start, stop)) in enumerate(zip(self.rates, bands, strict=True)):
            furthest = (self.before[low + len(values) - 1] + limit * rate) * (1 + EXACT)
            start, stop = max(start, low + 1), min(stop, int(self.before.searchsorted(furthest, side="right")))
            if start >= stop:
                return None
            # Layers i..j-1 take done[j] - given[i]: allowed from the first i on that is late enough.
            given = self.before[low : low + len(values)] / rate
            offered = values - given
            done = self.before[start:stop] / rate + self.cuts[start:stop]
            room = most * (1 + EXACT) - done - self.at_least(self.left[start:stop], s + 1, limit)
            hopeful = np.flatnonzero(room >= offered.min())
            if not len(hopeful):
                return None
            start, stop = start + int(hopeful[0]), start + int(hopeful[-1]) + 1
            done, room = done[hopeful[0] : hopeful[-1] + 1], room[hopeful[0] : hopeful[-1] + 1]
            first = given.searchsorted(done - limit)
            last = np.minimum(self.places[start:stop] - low, len(values))
            history.append((low, start, offered, first, last))
            found = minima(offered, first, last)
            hopeful = np.flatnonzero((found <= room) & (found < math.inf))
            if not len(hopeful):
                return None
            part = slice(int(hopeful[0]), int(hopeful[-1]) + 1)
            values, low = (found + done)[part], start + part.start
        split, j = [], len(self.work)
        for low, start, offered, first, last in reversed(history):
            window = offered[first[j - start] : last[j - start]]
            i = low + int(first[j - start]) + int(np.argmin(window))
            split.append(j - i)
            j = i
        split.reverse()
        ends = pairwise(accumulate(split, initial=0))
        times = (
            math.fsum(self.work[i:j]) / v + self.cut_list[j - 1] for (i, j), v in zip(ends, self.rates, strict=True)
        )
        return Found(tuple(split), tuple(times))

    def at_least(self, work: np.ndarray | float, s: int, bound: float) -> np.ndarray:
        """No faster is `work` done by the ranks s, s + 1, ..., each in at most `bound`."""
        full = self.speeds[s] * bound
        time: np.ndarray = np.interp(work, full, bound * np.arange(len(full)))
        return time + self.cheapest[min(s, len(self.cheapest) - 1)]

    def _bands(self, bound: float) -> list[tuple[int, int]] | None:
        """Where each stage can end, if cuts were free: range(start, stop); None if the layers do not fit."""
        n, p = len(self.work), len(self.rates)
        before = self.before
        high, reach = [], 0
        for s, rate in enumerate(self.rates):
            furthest = before.searchsorted(before[reach] + bound * rate, side="right") - 1
            reach = min(int(furthest), n - (p - 1 - s))
            high.append(reach)
        low, reach = [], n
        for s in reversed(range(p)):
            low.append(reach)
            reach = max(int(before.searchsorted(before[reach] - bound * self.rates[s])), s)
        low.reverse()
        bands = [(a, b + 1) for a, b in zip(low, high, strict=True)]
        return bands if all(a < b for a, b in bands) else None


def minima(values: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """The least of values[first[k] : last[k]] for each k; infinite where that is empty. `first` and `last` never fall.

    Short runs are gone through. Of long ones those at either end of the values are running minima.
    """
    length = last - first
    empty = length <= 0
    if length.sum() <= LONG * len(length):
        runs = np.empty(2 * len(first), dtype=np.intp)
        runs[::2], runs[1::2] = first, last
        found: np.ndarray = np.minimum.reduceat(np.append(values, np.inf), runs)[::2]
        found[empty] = np.inf
        return found
    if empty.any():
        found = np.full(len(first), np.inf)
        found[~empty] = minima(values, first[~empty], last[~empty])
        return found
    a = int(first.searchsorted(0, side="right"))
    b = max(a, int(last.searchsorted(len(values))))
    heads = np.minimum.accumulate(values)[last[:a] - 1]
    tails = np.minimum.accumulate(values[::-1])[::-1][first[b:]]
    return np.concatenate([heads, _by_doubling(values, first[a:b], last[a:b]), tails])


def _by_doubling(values: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Of runs that are not empty: each is two of 2^d neighbours, perhaps overlapping, whose least comes of doubling."""
    found = np.empty(len(first))
    level = np.frexp((last - first).astype(float))[1] - 1
    lowest, highest = (int(level.min()), int(level.max())) if len(level) else (0, -1)
    for d in range(highest + 1):
        size = 2**d
        if d >= lowest:
            mine = np.flatnonzero(level == d)
            found[mine] = np.minimum(values[first[mine]], values[last[mine] - size])
        if d < highest:
            values = np.minimum(values[:-size], values[size:])
    return found
