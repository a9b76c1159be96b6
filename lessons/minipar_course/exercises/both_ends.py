"""Lesson 11b: the time of a step in slices; which stages a rank of Chimera holds; where to cut a sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from minipar.costs.slicing import best_slices
from minipar.costs.slicing import step_time as sliced_time
from minipar.strategies.plan import Plan
from minipar.wording import several
from minipar_course.exercises.kinds.function import Function

# the time of a step in slices


def _step_time(times: list[float], stages: int) -> float:
    """By the partitioner's own formula, for slices of one token each that take these times."""
    return sliced_time([1] * len(times), stages, lambda length, context: times[context])


SLICED_TIME = Function(
    "step_time(times, stages)",
    (([3.0, 3.0, 3.0], 4), ([1.0, 2.0, 4.0], 3), ([5.0], 6), ([4.0, 2.0], 1), ([2.0, 6.0, 1.0, 1.0], 8)),
    truth=_step_time,
    mistakes=(
        (lambda times, stages: sum(times), "then the last slice leaves rank 0; it has to cross the others, too"),
        (lambda times, stages: stages * sum(times), "that is one slice at a time; slices follow each other"),
        (lambda times, stages: sum(times) + stages * max(times), "one too many: on rank 0 the sum counts all slices"),
        (lambda times, stages: sum(times) + (stages - 1) * times[-1], "the slowest slice counts, not the last"),
    ),
    hint="the last slice leaves rank 0 after the sum; on each other rank the slowest slice adds its time once",
)  # fmt: skip

# two directions


def _held(rank: int, stages: int) -> list[int]:
    return sorted(Plan(pp=stages, microbatches=stages, schedule="chimera").compile(layers=stages).placement[rank])


HELD = Function(
    "held(rank, stages)",
    ((0, 4), (1, 4), (3, 4), (0, 2), (2, 6), (5, 8)),
    truth=_held,
    mistakes=(
        (lambda rank, stages: [rank], "that is the pipeline which goes down; the other one has a stage here, too"),
        (lambda rank, stages: [stages - 1 - rank], "that is the pipeline which goes up; the other has one here, too"),
        (lambda rank, stages: [rank, stages - 1 - rank], "the right stages; give them in ascending order"),
        (lambda rank, stages: [rank, (rank + 1) % stages], "the pipeline which goes up begins at the last rank"),
    ),
    hint="down, stage s lies on rank s; up, stage s lies on rank stages - 1 - s",
)  # fmt: skip


# slices of a sequence


def attention(length: int, context: int) -> float:
    return 2 + length + 0.1 * length * (context + length / 2)


def constant(length: int, context: int) -> float:
    return 1.0 + length


def steep(length: int, context: int) -> float:
    return 0.5 + 0.2 * length * (context + length)


def _slow(given: Any, tokens: int, stages: int, time: Callable[[int, int], float]) -> str:
    lengths = [int(n) for n in given]
    if any(n < 1 for n in lengths) or sum(lengths) != tokens:
        return f"gives {lengths}: lengths of at least 1 that sum to {sum(lengths)}; the sequence has {tokens} tokens"
    took, best = (sliced_time(cut, stages, time) for cut in (lengths, best_slices(tokens, stages, time)))
    if took <= best * 1.01:
        return ""
    starts = accumulate(lengths, initial=0)
    slowest = max(time(n, start) for n, start in zip(lengths, starts, strict=False))
    total = took - (stages - 1) * slowest
    parts = f"the sum {total:.1f} and {stages - 1} times the slowest slice's {slowest:.1f}"
    take = "takes" if len(lengths) == 1 else "take"
    return f"gives {several(len(lengths), 'slice')} that {take} {took:.1f}: {parts}; {best:.1f} is possible"


SLICES = Function(
    "cut(tokens, stages, time)",
    ((12, 3, attention), (32, 8, attention), (24, 4, constant), (16, 4, steep), (10, 1, attention)),
    problem=_slow,
    mistakes=(
        (lambda tokens, stages, time: [tokens], "one slice: nothing overlaps; every rank waits for the one before"),
        (lambda tokens, stages, time: [1] * tokens, "slices of one token: each pays for an instruction of its own"),
    ),
    hint="for each limit on the slowest slice, which cut has the least sum? try every value that time(...) can have",
)  # fmt: skip
