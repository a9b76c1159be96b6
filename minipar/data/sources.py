"""What all data sets have in common: batches by (seed, step, row); and data sets epoch by epoch, each row once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from minipar.data.order import Order, mix, start_of
from minipar.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Source(ABC):
    """A data set. Every row begins at a place; `examples` reads the rows at given places.

    seed   decides which rows a step draws; the data, and its split into train and validation, do not depend on it
    """

    seed: int = field(default=0, kw_only=True)

    @abstractmethod
    def places(self, split: str) -> int:
        """How many places there are; a batch draws from all of them."""

    @property
    def stride(self) -> int:
        """Number of places from one row of an epoch to the next, so that no data are in two rows."""
        return 1

    @property
    def targets(self) -> range | None:
        """The values that integer targets can have, so that a rank knows whether a loss ignores some; None: not
        known."""
        return None

    @abstractmethod
    def examples(self, places: np.ndarray, split: str) -> tuple[Tensor, Tensor]:
        """The rows (x, y) at these places."""

    def batch(
        self, step: int, size: int, split: str = "train", rows: slice | range | None = None
    ) -> tuple[Tensor, Tensor]:
        """The batch of one step, of `size` rows (x, y), or only its `rows`.

        Row r depends only on (seed, step, r), not on the size of the batch or on the rank that reads it. So ranks can
        share out a batch without communication. Rows are drawn with replacement.
        Errors: `PlanError` for an unknown split, a size below 1, or rows outside of the batch.
        """
        check_split(split)
        if size < 1:
            raise PlanError(f"size={size}: a batch has at least 1 row")
        if step < 0:
            raise PlanError(f"step={step}: steps count from 0")
        chosen = range(size)[rows] if isinstance(rows, slice) else range(size) if rows is None else rows
        if len(chosen) and (min(chosen) < 0 or max(chosen) >= size):
            raise PlanError(f"rows={chosen}: this batch has rows 0 to {size - 1}")
        return self.examples(draw(f"{self.seed}/{split}/{step}", chosen, self.places(split)), split)

    def length(self, step: int, size: int) -> int:
        """The number of rows in the batch of one step: always `size`."""
        return size

    def windows(self, split: str = "train") -> int:
        """The number of rows in one epoch."""
        check_split(split)
        return -(-self.places(split) // self.stride)


def check_split(split: str) -> None:
    """Errors: PlanError for an unknown split."""
    if split not in SPLITS:
        raise PlanError(f"split={split!r}: must be {' or '.join(SPLITS)}")


def draw(key: str, rows: range, places: int) -> np.ndarray:
    """A place for each row, uniformly random, as a function of (key, row): int64 of shape (len(rows),)."""
    # The splitmix64 generator can begin at any row. Its arithmetic is modulo 2^64, so overflow is intended.
    z = start_of(key) + (np.array(rows, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mix(z) % np.uint64(places)).astype(np.int64)


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
