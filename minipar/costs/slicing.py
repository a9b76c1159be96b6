"""How to cut sequences into slices of tokens for TeraPipe: the lengths that make a step shortest, and their times.

A slice of `length` tokens after `context` earlier ones takes t(length, context) on each of p stages. Slices follow each
other without waiting, so the last one has passed all stages after

    T = t_1 + t_2 + ... + t_n + (p - 1) max t_j           all slices on one stage, and p - 1 times the slowest slice

Long slices come first and short ones later, because a later slice attends to more tokens. Source: Li et al., "TeraPipe:
Token-Level Pipeline Parallelism for Training Large-Scale Language Models", 2021 (its dynamic program; NumPy does the
inner loop).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from minipar.errors import PlanError
from minipar.wording import several

SliceTime = Callable[[int, int], float]  # (length, context), both in tokens -> time


def token_ranges(slices: int | Sequence[int], tokens: int) -> list[range]:
    """The tokens of each slice. `slices` is a number of equal slices (the first ones may be longer), or their lengths.

    Errors: PlanError if there are fewer tokens than slices, or if the lengths do not sum to `tokens`.
    """
    if isinstance(slices, int):
        if slices > tokens:
            raise PlanError(
                f"slices={slices}: a sequence has {tokens} tokens; possible are 1 to {several(tokens, 'slice')}"
            )
        even, more = divmod(tokens, slices)
        slices = [even + (k < more) for k in range(slices)]
    elif sum(slices) != tokens:
        words = ",".join(map(str, slices))
        raise PlanError(f"slices={words}: sums to {sum(slices)}, but a sequence has {tokens} tokens")
    return [range(a, b) for a, b in pairwise(accumulate(slices, initial=0))]


def step_time(lengths: Sequence[int], stages: int, time: SliceTime) -> float:
    """The time until all slices have passed all stages in one direction: T of the module's docstring."""
    times = [time(len(tokens), tokens.start) for tokens in token_ranges(lengths, sum(lengths))]
    return sum(times) + (stages - 1) * max(times)


def best_uniform(tokens: int, stages: int, time: SliceTime) -> tuple[int, ...]:
    """The lengths of equal slices that are fastest; the last slice has the rest."""
    cuts = [(n,) * (tokens // n) + (tokens % n,) * (tokens % n > 0) for n in range(1, tokens + 1)]
    return min(cuts, key=lambda lengths: step_time(lengths, stages, time))


def best_slices(tokens: int, stages: int, time: SliceTime) -> tuple[int, ...]:
    """The lengths that make `step_time` shortest.

    tokens     number of tokens of a sequence
    stages     number of stages of the pipeline
    time       t(length, context), larger for a longer slice

    For each limit of the slowest slice, beginning with the smallest, it finds the smallest sum of times:
    S(i) = min over l of S(i - l) + t(l, i - l) with t within the limit. It ends when stages x limit exceeds the best.
    A limit takes tokens^2 operations, and there are at most tokens^2 limits. Errors: PlanError for sizes below 1.
    """
    for name, number in (("tokens", tokens), ("stages", stages)):
        if number < 1:
            raise PlanError(f"{name}={number}: must be at least 1")
    table = [[time(b - a, a) for a in range(b)] for b in range(tokens + 1)]  # for each end b, from each token a
    chosen: tuple[int, ...] = (tokens,)
    best = math.inf
    for limit in sorted({t for row in table for t in row if math.isfinite(t)}):
        if stages * limit > best:
            break
        total, lengths = _within(table, limit)
        if total + (stages - 1) * limit < best:
            best, chosen = total + (stages - 1) * limit, lengths
    return chosen


def _within(table: Sequence[Sequence[float]], limit: float) -> tuple[float, tuple[int, ...]]:
    """The smallest sum of times that are all within the limit, and the lengths of its slices."""
    sums, before = [0.0], [0]
    for row in table[1:]:
        found = [done + t if t <= limit else math.inf for done, t in zip(sums, row, strict=True)]
        sums.append(min(found))
        before.append(found.index(sums[-1]))
    if not math.isfinite(sums[-1]):
        return math.inf, ()
    lengths, b = [], len(table) - 1
    while b:
        lengths.append(b - before[b])
        b = before[b]
    return sums[-1], tuple(reversed(lengths))
