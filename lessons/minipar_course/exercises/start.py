"""Lesson 00: a rank's place in the mesh, its rows, and a first plan."""

from __future__ import annotations

from minipar.program.rows import split_rows
from minipar.wording import several
from minipar_course.exercises.kinds.choice import Choice
from minipar_course.exercises.kinds.function import Function

_MESHES = tuple((rank, dp, pp) for dp, pp in ((2, 2), (2, 3), (4, 1), (1, 4), (3, 2)) for rank in range(dp * pp))
WHO_AM_I = Function(
    "who_am_i(rank, dp, pp)",
    _MESHES,
    truth=lambda rank, dp, pp: divmod(rank, pp),
    mistakes=(
        (lambda rank, dp, pp: (rank % dp, rank // dp), "here the ranks of one *pipeline* are neighbours, not replicas"),
        (lambda rank, dp, pp: divmod(rank, dp), "after how many ranks does the next pipeline begin?"),
        (lambda rank, dp, pp: (rank % pp, rank // pp), "right numbers in the wrong order: first the replica"),
    ),
    hint="replica 0 has the first `pp` ranks, in the order of their stages",
)


def _even(given: object, rows: int, parts: int) -> str:
    if not isinstance(given, (list, tuple)) or not all(isinstance(n, int) for n in given):
        return f"gives {given!r}, not a list of whole numbers"
    if len(given) != parts:
        return f"gives {len(given)} numbers for {parts} parts"
    if sum(given) != rows:
        return f"gives {list(given)}, which are {several(sum(given), 'row')} together"
    right = [len(part) for part in split_rows(rows, parts)]
    if sorted(given) != sorted(right):
        return f"gives {list(given)}: the longest and the shortest may differ by one row at most"
    return "" if list(given) == right else f"gives {list(given)}: minipar lets the first ones have the row more"


SHARES = Function(
    "shares(rows, parts)",
    ((16, 4), (10, 4), (7, 2), (3, 5), (1, 1), (100, 7)),
    problem=_even,
    mistakes=(
        (lambda rows, parts: [rows // parts] * parts, "what happens to the rows that are left over?"),
        (
            lambda rows, parts: [*[rows // parts] * (parts - 1), rows // parts + rows % parts],
            "the last part has all that was left over: give one row of it to each of the first parts",
        ),
    ),
    hint="divmod(rows, parts) gives how many everyone has, and how many have one more",
)

FIRST_PLAN = Choice(
    "gpt-demo", batch=16, device="flops=8GFLOP/s bandwidth=100MB/s latency=1ms", ranks=4, time=2.0, memory=48 * 2**20
)
