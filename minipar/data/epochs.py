"""A data set epoch by epoch: every row comes exactly once in each epoch, for any number of ranks."""

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
    """A `Source` without repetitions, for `train(data=...)` or your own loop.

        rows = data.Epochs(data.Tokens("corpus.bin", context=256), seed=1)
        run = train(model, rows, plan, batch=32, steps=3 * rows.steps(32))          # three epochs
        resume("folder", model, rows, steps=100)                                    # continues in the fourth

    source    the data set; an epoch has its rows, one every `stride` places
    seed      seed of the orders: the order of an epoch is a function of (seed, epoch)
    last      "smaller": rows that do not fill a batch are a smaller batch; "dropped": they are left out of this epoch
    shuffle   False: every epoch has the order of the data
    split     "train" or "validation"

    The number of the step is the whole state. All batches must have the same size, because size and step give the place
    in the epoch.
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
        """The order of the rows. It reads the data to know how many rows there are."""
        return Order(self.source.windows(self.split), self.seed, self.last, self.shuffle)

    @property
    def targets(self) -> range | None:
        return self.source.targets

    def steps(self, size: int) -> int:
        """The number of steps in an epoch. Errors: `PlanError` for a batch with more rows than an epoch."""
        return self.order.steps(size)

    def length(self, step: int, size: int) -> int:
        """The number of rows in the batch of one step: `size`, or fewer at the end of an epoch."""
        return self.order.place(step, size)[2]

    def batch(self, step: int, size: int, rows: slice | range | None = None) -> tuple[Tensor, Tensor]:
        """The batch of one step, or only its `rows`. It reads no other rows.

        Errors: `PlanError` for a size above the rows of an epoch, or rows outside of the batch.
        """
        part = range(self.length(step, size))[rows] if isinstance(rows, slice) else rows
        numbers = self.order.rows(step, size, part)
        return self.source.examples(numbers * self.source.stride, self.split)
