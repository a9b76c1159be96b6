"""A data set epoch by epoch: every row exactly once in each, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from minipar.data.order import Order
from minipar.data.sources import Source, check_split

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Epochs:
    """A `Source` without repetitions, for `train(data=...)` or a loop of one's own.

        rows = data.Epochs(data.Tokens("corpus.bin", context=256), seed=1)
        run = train(model, rows, plan, batch=32, steps=3 * rows.steps(32))          # three epochs
        resume("folder", model, rows, steps=100)                                    # goes on in the fourth

    source    its rows, one every `stride` places, are those of an epoch
    seed      of the orders: the order of an epoch is a function of (seed, epoch)
    last      "smaller": the rows that do not fill a batch are one of their own; "dropped": they wait for another epoch
    shuffle   False: every epoch in the order of the data
    split     "train" or "validation"

    A step is the whole state. Batches must have the same size throughout: it says where a step stands.
    """

    source: Source
    seed: int = 0
    last: str = "smaller"
    shuffle: bool = True
    split: str = "train"

    def __post_init__(self) -> None:
        check_split(self.split)
        Order(1, self.seed, self.last, self.shuffle)

    @cached_property
    def order(self) -> Order:
        """Which rows stand where; it looks at the data to see how many there are."""
        return Order(self.source.windows(self.split), self.seed, self.last, self.shuffle)

    @property
    def targets(self) -> range | None:
        return self.source.targets

    def steps(self, size: int) -> int:
        """Steps of an epoch. Errors: `PlanError` for a batch with more rows than an epoch."""
        return self.order.steps(size)

    def length(self, step: int, size: int) -> int:
        """Rows of the batch of one step: `size`, or fewer at the end of an epoch."""
        return self.order.place(step, size)[2]

    def batch(self, step: int, size: int, rows: slice | range | None = None) -> tuple[Tensor, Tensor]:
        """The batch of one step, or only its `rows`, which are all that is read.

        Errors: `PlanError` for a size above the rows of an epoch, or rows outside of the batch.
        """
        part = range(self.length(step, size))[rows] if isinstance(rows, slice) else rows
        numbers = self.order.rows(step, size, part)
        return self.source.examples(numbers * self.source.stride, self.split)
