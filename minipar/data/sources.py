"""What all data sets have in common: batches by (seed, step, row), and shards of one epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from minipar.data.order import mix, start_of
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

    def shard(self, rank: int, size: int, split: str = "train", batch: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of one epoch that belong to `rank` of `size` ranks, `batch` rows at a time (at the end perhaps
        fewer).

        Row w of the epoch belongs to rank w % size: the shards do not overlap, together they are the whole split, and
        their lengths differ by at most one row. Errors: `PlanError` for a rank outside of 0 to size - 1.
        """
        if not 0 <= rank < size:
            raise PlanError(f"rank={rank}: must be from 0 to {size - 1}")
        if batch < 1:
            raise PlanError(f"batch={batch}: must be at least 1")
        mine = np.arange(rank, self.windows(split), size, dtype=np.int64) * self.stride
        return (self.examples(mine[k : k + batch], split) for k in range(0, len(mine), batch))


def check_split(split: str) -> None:
    """Errors: PlanError for an unknown split."""
    if split not in SPLITS:
        raise PlanError(f"split={split!r}: must be {' or '.join(SPLITS)}")


def draw(key: str, rows: range, places: int) -> np.ndarray:
    """A place for each row, uniformly random, as a function of (key, row): int64 of shape (len(rows),)."""
    # The splitmix64 generator can begin at any row. Its arithmetic is modulo 2^64, so overflow is intended.
    z = start_of(key) + (np.array(rows, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mix(z) % np.uint64(places)).astype(np.int64)
