"""Which rows of a batch belong to which rank, and the rows of a rank for the user's own training loop.

    batch of 8 rows, mesh dp=2 x pp=2, 2 micro-batches:       rank 0, 1 (one pipeline)     0 1 | 2 3
                                                              rank 2, 3 (the other)        4 5 | 6 7

Ranks of one pipeline or tensor group work on the same rows, and replicas on different rows. `train` shares out batches
in this way. Any rank can compute its rows without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from minipar.program.mesh import Mesh
from minipar.program.rows import split_rows

Axes = Mapping[str, int] | Sequence[tuple[str, int]]  # axis sizes, the slowest axis first, such as Program.mesh
ONE_RANK = Mesh(dp=1)


def replica_of(rank: int, mesh: Axes = ONE_RANK) -> tuple[int, int]:
    """(the replica that a rank belongs to, the number of replicas): its coordinate on the mesh's axis "dp", and its
    length.

    Errors: `PlanError` for a rank that the mesh does not have.
    """
    known = Mesh(mesh)
    return known.coordinates(rank).get("dp", 0), known.length("dp")


def rows_of(rank: int, mesh: Axes, size: int, microbatches: int = 1) -> list[range]:
    """The rows of each micro-batch of a rank, out of a batch of `size` rows.

    The rows are split as evenly as possible over all micro-batches of all replicas; the first ones may have one row
    more. If there are fewer rows than micro-batches, the last ones have none.
    """
    replica, replicas = replica_of(rank, mesh)
    return split_rows(size, replicas * microbatches)[replica * microbatches : (replica + 1) * microbatches]


def part_of(rank: int, mesh: Axes, size: int, microbatches: int = 1) -> range:
    """All rows of a rank, out of a batch of `size` rows."""
    rows = rows_of(rank, mesh, size, microbatches)
    return range(rows[0].start, rows[-1].stop)


def stream(
    source: Any, batch: int, rank: int = 0, mesh: Axes = ONE_RANK, step: int = 0, microbatches: int = 1
) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Yields (step, (x, y)) without end, from `step` on, with the rank's rows of each batch. It reads only these rows.

    The rows are those that `train(data=source, batch=batch)` gives to the rank. A loop can continue at any step,
    because the step is all its state. All ranks get the same number of steps; a rank without rows in a small last batch
    gets tensors of 0 rows.

    source   has batch(step, size, rows=...), such as `Epochs` or any other data set of this package
    """
    replica_of(rank, mesh)
    for k in count(step):
        size = source.length(k, batch)
        yield k, source.batch(k, batch, rows=part_of(rank, mesh, size, microbatches))
