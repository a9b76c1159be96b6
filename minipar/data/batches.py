"""A rank's part of a step's batch: the rows of its replica, if the rank holds a layer that needs them.

If the data set's `batch` has a parameter `rows`, a rank reads only these rows. Otherwise it reads the whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from minipar.data.sharing import rows_of
from minipar.errors import RankError
from minipar.models.losses import counted, option, says_count
from minipar.models.tensors import check_rows, map_tensors, tensors
from minipar.program import Program
from minipar.wording import several

Batch = tuple[Any, Any]


class BatchPart(NamedTuple):
    """A rank's part of a batch.

    x, y     rows of the batch from row `start` on; None if the rank does not need them
    rows     the rows of each of its micro-batches, counted in the batch
    weight   the weight of the whole batch in the mean loss
    """

    x: Any
    y: Any
    start: int
    rows: list[range]
    weight: float


def part_of_whole(batch: Batch, program: Program, rank: int, loss: Any) -> BatchPart:
    """A rank's part of a batch, from the whole batch."""
    rows = check_batch(batch)
    return BatchPart(*batch, 0, _rows(program, rank, rows), counted(batch[1], loss))


def check_batch(batch: Batch) -> int:
    """The number of rows in a batch. Errors: RankError if x and y, or tensors inside them, have different numbers."""
    x, y = (check_rows(part, name) for part, name in zip(batch, "xy", strict=True))
    if x != y:
        raise RankError(f"x has {several(x, 'row')}, but y has {y}; each row needs its target")
    return x


def _rows(program: Program, rank: int, total: int) -> list[range]:
    """The rows of each of a rank's micro-batches; all slices of a sequence have the same rows."""
    rows = rows_of(rank, program.mesh, total, program.row_microbatches)
    return [found for found in rows for _ in range(program.slice_count)]


def gives_rows(data: Any) -> bool:
    """Whether a data set can give some rows of a batch."""
    return not isinstance(data, tuple) and "rows" in inspect.signature(data.batch).parameters


def read_part(
    data: Any, step: int, size: int, program: Program, rank: int, loss: Any, cast: Callable[[Tensor], Tensor]
) -> BatchPart:
    """A rank's part of the batch of a step. It reads only these rows if it can (`data` must give rows, see
    `gives_rows`).

    The mean loss is over all targets that count, so a rank with the last layer must know how many of them are in the
    rows of other ranks. It knows this without reading those rows if targets are floating-point numbers, or integers in
    `data.targets` of which the loss ignores none. Otherwise it reads the whole batch.
    Errors: RankError if the data set gives another number of rows than requested, or targets that it says it does not
    have.
    """
    total = data.length(step, size) if hasattr(data, "length") else size
    rows = _rows(program, rank, total)
    mine = range(rows[0].start, rows[-1].stop)
    held = program.placement[rank]
    first, last = 0 in held, program.layers - 1 in held
    if not mine or not (first or last):
        return BatchPart(None, None, mine.start, rows, total)

    def read(asked: range) -> Batch:
        x, y = data.batch(step, size, rows=asked)
        found = check_rows(x, "x"), check_rows(y, "y")
        if found != (len(asked), len(asked)):
            raise RankError(
                f"data: asked for {several(len(asked), 'row')} of step {step}, gave {found[0]} of x and {found[1]} of y"
            )
        return map_tensors(x, cast), map_tensors(y, cast)

    x, y = read(mine)
    weight: float = total
    target = next(iter(tensors(y)), None)
    if last and says_count(loss):
        weight = counted(read(range(total))[1], loss)
    elif last and target is not None and not (target.is_floating_point() or target.is_complex()):
        known = getattr(data, "targets", None)
        ignored = option(loss, "ignore_index", -100)
        if known is not None and ignored not in known:
            weight = target.numel() // len(mine) * total
            if counted(y, loss) != target.numel():
                raise RankError(
                    f"data: step {step} has targets {ignored}, which the loss leaves out, but says it has {known}; "
                    "say targets=None (of Records: ignored=True)"
                )
        else:
            weight = counted(read(range(total))[1], loss)
    return BatchPart(x if first else None, y if last else None, mine.start, rows, weight)
