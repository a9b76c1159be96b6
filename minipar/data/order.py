"""The order of rows in an epoch: a permutation that can be computed for each place alone, cut into batches.

    epoch 0    7 2 9 | 0 4 1 | 8 5 3 | 6            10 rows in batches of 3: the last one is smaller, or dropped
    epoch 1    3 8 0 | 5 6 9 | 2 7 1 | 4            another order, a function of (seed, epoch)
    step       0       1       2       3
               4       5       6       7            so a loop has to remember only the number of a step

The order of an epoch is a Feistel network over pairs (a, b), which are the rows 0, 1, 2 ... written with two digits:

    a <- a + f(b) mod A        b <- b + g(a) mod B        ... with A B a little more than the number of rows

Every round can be undone, so together they are a permutation of A B numbers. A number that is no row is permuted again,
until it is a row ("cycle walking"). So the row at any place of any epoch can be found alone, in O(1) memory, for 10
rows or for 10^15.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from minipar.errors import PlanError

ROUNDS = 8  # with fewer rounds, the orders of a few rows are not equally likely
LASTS = ("smaller", "dropped")


def mix(z: np.ndarray) -> np.ndarray:
    """The last steps of the splitmix64 generator: uint64 to uint64, uniformly random. Overflow is intended."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def start_of(key: str) -> np.ndarray:
    """64 bits of a hash, as an array of one number."""
    return np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), dtype="<u8")


def permuted(places: np.ndarray, count: int, key: str) -> np.ndarray:
    """The numbers at these places of a permutation of 0 to count - 1, which `key` chooses: int64 of the same shape."""
    numbers = np.asarray(places, dtype=np.uint64).copy()
    if count <= 1:
        return numbers.astype(np.int64)
    wide = math.isqrt(count - 1) + 1
    sides = np.uint64(wide), np.uint64(-(-count // wide))
    keys = start_of(key) + np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    outside = np.ones(numbers.shape, dtype=bool)
    while outside.any():
        a: np.ndarray = numbers[outside] % sides[0]
        b: np.ndarray = numbers[outside] // sides[0]
        for k in range(0, ROUNDS, 2):
            a = (a + mix(b + keys[k]) % sides[0]) % sides[0]
            b = (b + mix(a + keys[k + 1]) % sides[1]) % sides[1]
        numbers[outside] = b * sides[0] + a
        outside = numbers >= np.uint64(count)
    return numbers.astype(np.int64)


@dataclass(frozen=True)
class Order:
    """The rows 0 to count - 1, each of them once an epoch, in batches.

    seed      seed of the orders: seed and epoch determine the order of an epoch
    last      what happens to rows that do not fill a batch: they are a "smaller" batch at the end of the epoch, or they
              are "dropped"; other rows are dropped in each epoch
    shuffle   False: every epoch has the order of the rows
    """

    count: int
    seed: int = 0
    last: str = "smaller"
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.last not in LASTS:
            raise PlanError(f"last={self.last!r}: must be {' or '.join(LASTS)}")
        if self.count < 1:
            raise PlanError(f"count={self.count}: an epoch has at least 1 row")

    def steps(self, batch: int) -> int:
        """The number of batches in an epoch. Errors: `PlanError` for a batch with more rows than an epoch."""
        if not 1 <= batch <= self.count:
            raise PlanError(f"batch={batch}: must be from 1 to {self.count}, the rows of an epoch")
        return self.count // batch if self.last == "dropped" else -(-self.count // batch)

    def place(self, step: int, batch: int) -> tuple[int, int, int]:
        """The epoch of a step, the step's first place in the epoch, and its number of rows. Errors: PlanError."""
        if step < 0:
            raise PlanError(f"step={step}: steps count from 0")
        epoch, k = divmod(step, self.steps(batch))
        return epoch, k * batch, min(batch, self.count - k * batch)

    def rows(self, step: int, batch: int, part: range | None = None) -> np.ndarray:
        """The rows of a step, or of `part` of it (positions in the batch): int64. It computes only these rows.

        Errors: `PlanError` for positions outside of the batch.
        """
        epoch, first, length = self.place(step, batch)
        part = range(length) if part is None else part
        if len(part) and (min(part) < 0 or max(part) >= length):
            raise PlanError(f"rows={part}: the batch of step {step} has rows 0 to {length - 1}")
        places = first + np.array(part, dtype=np.int64)
        return permuted(places, self.count, f"{self.seed}/epoch {epoch}") if self.shuffle else places
