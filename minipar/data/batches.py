"""A rank's part of a step's batch: the rows of its replica, if the rank holds a layer that needs them.

If the data set's `batch` has a parameter `rows`, a rank reads only these rows. Otherwise it reads the whole batch.
`BatchRows` says which of them each of its micro-batches has, and how much they count in the step's mean loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from minipar.data.sharing import rows_of
from minipar.errors import RankError
from minipar.models.losses import counted, option, says_count
from minipar.models.tensors import (
    check_rows,
    count_bytes,
    mark_undivided,
    named_tensors,
    opaque,
    take_rows,
    tensors,
    undivided,
)
from minipar.program import Instruction, Program, Staleness, Value
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


def part_of_whole(batch: Batch, program: Program, rank: int, loss: Any, where: str = "data") -> BatchPart:
    """A rank's part of a batch, from the whole batch."""
    rows = check_batch(batch, where)
    return BatchPart(*batch, 0, _rows(program, rank, rows), counted(batch[1], loss))


def check_batch(batch: Any, where: str = "data") -> int:
    """The number of rows in a batch. `where` says in errors which one it is.

    Errors: RankError if it is no pair (x, y) of tensors, or of structures of them; if it has no rows; if x and y, or
    tensors inside them, have different numbers of rows.
    """
    x, y = pair_of(batch, where)
    wanted, given = next((len(t) for t in tensors(y) if t.dim()), 0), tensors(x)
    if len(given) > 1 and all(t.shape[:1] != (wanted,) for t in given):
        lengths = [f"{name} {tuple(t.shape)}" for name, t in named_tensors(x, "x")]
        raise RankError(
            f"{where}: y has {several(wanted, 'row')}, and no tensor of x has as many: {', '.join(lengths)}; a row of "
            "x, dimension 0 of its tensors, is what belongs to one target (of graphs, a tensor of (graphs, nodes, ...))"
        )
    rows = check_rows(mark_undivided(x, undivided(x, y)), "x")
    wanted = rows if y is x else check_rows(y, "y")
    if rows != wanted:
        raise RankError(f"{where}: x has {several(rows, 'row')}, but y has {wanted}; each row needs its target")
    if not rows:
        raise RankError(
            f"{where}: has 0 rows; a step needs at least one: choose fewer steps, or data that go on for all of them"
        )
    return rows


def pair_of(batch: Any, where: str) -> Batch:
    """x and y of a batch, each with tensors in it and with nothing whose rows could not be divided; else RankError."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        kind = type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        raise RankError(f"{where}: is a {kind}; possible is a pair (x, y) of tensors")
    for part, name in zip(batch, "xy", strict=True):
        kind = (opaque(part) or ("" if tensors(part) else type(part).__name__)).replace(":", ".")
        if kind:
            way = "torch.from_numpy(...)" if kind.endswith("ndarray") else "a tensor, or a tuple, list or dict of them"
            raise RankError(f"{where}: {name} has a {kind}, whose rows cannot be divided; possible is {way}")
        for place, t in named_tensors(part, name):
            if t.is_nested or str(t.layout) != "torch.strided":
                kind = "nested" if t.is_nested else "sparse"
                raise RankError(
                    f"{where}: {place} is a {kind} tensor, of which no rows can be taken and sent; possible is a dense "
                    f"one, such as {place}{'.to_padded_tensor(0)' if t.is_nested else '.to_dense()'}"
                )
    return batch[0], batch[1]


def batch_of(data: Any, step: int, size: int, **rows: range) -> Any:
    """What a data set gives for a step. RankError where it ends before."""
    try:
        return data.batch(step, size, **rows)
    except StopIteration as error:
        raise RankError(
            f"data: step {step}: batch() raised StopIteration; choose fewer steps, or begin again"
        ) from error


def _rows(program: Program, rank: int, total: int) -> list[range]:
    """The rows of each of a rank's micro-batches; all slices of a sequence have the same rows."""
    rows = rows_of(rank, program.mesh, total, program.row_microbatches)
    return [found for found in rows for _ in range(program.slice_count)]


def gives_rows(data: Any) -> bool:
    """Whether a data set can give some rows of a batch."""
    if isinstance(data, tuple) or getattr(data, "collate", None) is not None:  # (it makes the whole batch)
        return False
    return "rows" in inspect.signature(data.batch).parameters


def read_part(
    data: Any, step: int, size: int, program: Program, rank: int, loss: Any, made: Callable[[Any, str], Batch]
) -> BatchPart:
    """A rank's part of the batch of a step. It reads only these rows if it can (`data` must give rows, see
    `gives_rows`). `made` is `Job.made`.

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
        x, y = made(batch_of(data, step, size, rows=asked), f"data: step {step}")
        found = check_rows(x, "x"), check_rows(y, "y")
        if found != (len(asked), len(asked)):
            raise RankError(
                f"data: asked for {several(len(asked), 'row')} of step {step}, gave {found[0]} of x and {found[1]} of y"
            )
        return x, y

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


class BatchRows:
    """The rows of one rank's micro-batches, for the steps of one pass through a program.

    parts    per step this rank's part of the batch, from the step's first instruction on
    counts   per step the number of rows of each micro-batch; for slices of sequences see `count`
    """

    def __init__(self, program: Program, rank: int, loss: Any) -> None:
        self.program, self.rank, self.loss = program, rank, loss
        self.begin(lambda step: ((), ()), 0)

    def begin(self, batches: Callable[[int], Batch | BatchPart], base: int) -> None:
        """A new pass: its step s trains on `batches(base + s)`, the whole batch, or this rank's part of it."""
        self.batches, self.base = batches, base
        self.parts: dict[int, BatchPart] = {}
        self.counts: dict[int, list[int]] = {}
        # step -> (how much the rows count whose mean the loss is, how much the whole batch counts)
        self._weights: dict[int, tuple[float, float]] = {}

    def part(self, step: int) -> BatchPart:
        """What this rank has of the batch of a step."""
        if step not in self.parts:
            if not isinstance(self.program.contract, Staleness):
                self.parts.clear()  # the step before is over
            found = self.batches(self.base + step)
            if not isinstance(found, BatchPart):
                where = f"data: step {self.base + step}"
                found = part_of_whole(found, self.program, self.rank, self.loss, where)
            weight = found.weight
            if self.program.local_steps:  # the mean is over the replica's rows, and it has all of them
                found = found._replace(weight=counted(take_rows(found.y, _mine(found)), self.loss))
            self._weights[step] = (found.weight, weight)
            self.parts[step] = found
        return self.parts[step]

    def count(self, value: Value | Instruction) -> int:
        """The rows of a micro-batch. For a slice the number also says which one: equal numbers mean equal shapes."""
        counts = self.counts.get(value.step)
        if counts is None:
            slices = self.program.slice_count
            rows = self.part(value.step).rows
            counts = [len(one) * slices + i % slices if one else 0 for i, one in enumerate(rows)]
            self.counts[value.step] = counts
        return counts[value.microbatch]

    def number(self, value: Value | Instruction) -> int:
        """The rows of a micro-batch, or of a slice of it."""
        return self.count(value) // self.program.slice_count

    def share(self, step: int) -> float:
        """How much this rank's loss weighs in that of all replicas: as its rows do."""
        if not self.program.local_steps:
            return 1.0
        own, whole = self._weights[step]
        return own / whole if whole else 1 / self.program.replicas

    def nbytes(self, inputs: bool, targets: bool) -> int:
        """Bytes of the batches that are in memory: of their inputs and of their targets, each only if asked for."""
        used = [(part.x, inputs, _mine(part)) for part in self.parts.values()]
        used += [(part.y, targets, _mine(part)) for part in self.parts.values()]
        return sum(count_bytes(take_rows(values, rows)) for values, wanted, rows in used if wanted)


def _mine(part: BatchPart) -> range:
    """The rows of all micro-batches of a part, counted from the part's first row."""
    return range(part.rows[0].start - part.start, part.rows[-1].stop - part.start)
