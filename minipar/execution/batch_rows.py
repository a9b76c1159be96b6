"""Which rows of the batch of each step a rank works on, and how much they count in the step's mean loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minipar.data.batches import Batch, BatchPart, part_of_whole
from minipar.models.losses import counted
from minipar.models.tensors import count_bytes, take_rows
from minipar.program import Instruction, Program, Staleness, Value


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
                found = part_of_whole(found, self.program, self.rank, self.loss)
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

    def share(self, step: int, steps: int = 1) -> float:
        """How much this rank's loss weighs in that of all replicas, in `steps` steps up to this one: as its rows do."""
        if not self.program.local_steps:
            return 1.0
        found = [self._weights[s] for s in range(step - steps + 1, step + 1)]
        whole = sum(weight for _, weight in found)
        return sum(own for own, _ in found) / whole if whole else 1 / self.program.replicas

    def nbytes(self, inputs: bool, targets: bool) -> int:
        """Bytes of the batches that are in memory: of their inputs and of their targets, each only if asked for."""
        used = [(part.x, inputs, _mine(part)) for part in self.parts.values()]
        used += [(part.y, targets, _mine(part)) for part in self.parts.values()]
        return sum(count_bytes(take_rows(values, rows)) for values, wanted, rows in used if wanted)


def _mine(part: BatchPart) -> range:
    """The rows of all micro-batches of a part, counted from the part's first row."""
    return range(part.rows[0].start - part.start, part.rows[-1].stop - part.start)
