r"""Data sets in files that may be larger than memory: files are mapped, and a rank reads only its own rows of a batch.

    corpus.bin   [ 12 7 7 91 3 ... ]                token numbers, raw or .npy
                   \___row 0___/\___row 1___/       rows of an epoch; a random row may begin anywhere
    x.npy, y.npy                                    one row in each file per example

A mapped file needs no memory of its own: the pages that are read are in the system's cache of the file, which all ranks
of a machine share. A process also unmaps them after every `RESIDENT` bytes, so that its memory does not seem to grow.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from minipar.data.sources import Source
from minipar.errors import PlanError
from minipar.wording import several

if TYPE_CHECKING:
    from torch import Tensor

RESIDENT = 64 << 20
AROUND = 2 << 20  # so many bytes around a page that is read can be mapped with it, if they are in the system's cache


@dataclass(frozen=True)
class Tokens(Source):
    """Token numbers for a language model. x: (rows, context) int64; y: the same, one token later.

    path       a raw file of numbers; or a .npy file with one dimension, which has its own dtype
    context    tokens in a row
    dtype      type of the numbers in a raw file, such as "uint16"
    held_out   number of tokens at the end of the file that are the validation split and not part of train
    """

    path: str = ""
    context: int = 64
    dtype: str = "uint16"
    held_out: int = 0

    def __post_init__(self) -> None:
        if self.context < 1:
            raise PlanError(f"context={self.context}: must be at least 1")

    @property
    def stride(self) -> int:
        return self.context

    @property
    def targets(self) -> range | None:
        return range(1 << 62)

    def places(self, split: str) -> int:
        size = self._end(split) - self._begin(split)
        if size <= self.context:
            raise PlanError(f"rows of {self.context} tokens: the {split} part of {self.path} has {size}")
        return size - self.context

    def examples(self, places: np.ndarray, split: str) -> tuple[Tensor, Tensor]:
        import torch

        length = self.context + 1
        found = np.empty((len(places), length), dtype=np.int64)
        if len(places) and not 0 <= places.min() <= places.max() < self.places(split):
            raise IndexError(f"places {places}: the {split} split has {self.places(split)}")
        opened, begin = _opened(self.path, self.dtype), self._begin(split)
        for row, place in zip(found, places, strict=True):
            row[:] = opened.read(slice(begin + int(place), begin + int(place) + length))
        return torch.from_numpy(found[:, :-1].copy()), torch.from_numpy(found[:, 1:].copy())

    def _begin(self, split: str) -> int:
        size = len(_opened(self.path, self.dtype).array)
        return size - self.held_out if split == "validation" else 0

    def _end(self, split: str) -> int:
        size = len(_opened(self.path, self.dtype).array)
        return size if split == "validation" else size - self.held_out


@dataclass(frozen=True)
class Records(Source):
    """Examples of one row each. x: (rows, ...) and y: (rows, ...), as they are in the files; an integer y becomes
    int64.

    x, y       .npy files with the same number of rows
    held_out   number of rows at the end of the files that are the validation split and not part of train
    ignored    whether y has targets that the loss ignores (`ignore_index`): then ranks with the last layer read whole
               batches, to count them
    """

    x: str = ""
    y: str = ""
    held_out: int = 0
    ignored: bool = False

    @property
    def targets(self) -> range | None:
        return None if self.ignored else range(1 << 62)

    def places(self, split: str) -> int:
        rows = len(_opened(self.x).array)
        if len(_opened(self.y).array) != rows:
            raise PlanError(f"{self.y}: has {several(len(_opened(self.y).array), 'row')}, but {self.x} has {rows}")
        found = self.held_out if split == "validation" else rows - self.held_out
        if found < 1:
            raise PlanError(f"held_out={self.held_out}: leaves no rows for {split} of {rows} in {self.x}")
        return found

    def examples(self, places: np.ndarray, split: str) -> tuple[Tensor, Tensor]:
        import torch

        rows = self.places(split)
        if len(places) and not 0 <= places.min() <= places.max() < rows:
            raise IndexError(f"places {places}: the {split} split has {rows}")
        if split == "validation":
            places = places + len(_opened(self.x).array) - self.held_out
        x, y = (_opened(path).read(places) for path in (self.x, self.y))
        return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64) if y.dtype.kind in "iu" else y)


class Opened:
    """A file as an array. Only the parts that are used are read from the disk."""

    def __init__(self, array: np.memmap) -> None:
        self.array = np.asarray(array)
        base: Any = array.base
        self.map: mmap.mmap | None = base if isinstance(base, mmap.mmap) else None
        self.touched = 0
        if self.map is not None and hasattr(mmap, "MADV_RANDOM"):
            self.map.madvise(mmap.MADV_RANDOM)  # rows are spread over the file, so reading ahead is useless

    def read(self, places: np.ndarray | slice) -> np.ndarray:
        """A copy of these rows, in this machine's byte order. Errors: IndexError for rows that the file does not
        have."""
        if isinstance(places, slice) and not 0 <= places.start <= places.stop <= len(self.array):
            raise IndexError(f"rows {places.start} to {places.stop} of {len(self.array)}")
        if isinstance(places, slice):
            found = np.array(self.array[places])
            self._note(found.nbytes + AROUND)
        else:
            found = np.empty((len(places), *self.array.shape[1:]), self.array.dtype)
            for k, place in enumerate(places):
                found[k] = self.array[place]
                self._note(found.nbytes // len(places) + AROUND)
        return found.astype(found.dtype.newbyteorder("="), copy=False)

    def _note(self, size: int) -> None:
        """Count bytes that were read, and unmap them when there are more than `RESIDENT`."""
        self.touched += size
        if self.touched > RESIDENT and self.map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)
            self.touched = 0


def _opened(path: str, dtype: str = "") -> Opened:
    """The file, mapped once per process, and again if it has changed. Errors: PlanError."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise PlanError(f"data file {path!r}: {error.strerror}") from None
    return _open(path, dtype, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _open(path: str, dtype: str, size: int, changed: int) -> Opened:
    try:
        array = np.load(path, mmap_mode="r") if path.endswith(".npy") else np.memmap(path, dtype=dtype, mode="r")
    except (ValueError, TypeError, OSError) as error:
        raise PlanError(f"data file {path!r}: {error}") from None
    if array.ndim < 1 or (dtype and array.ndim != 1):
        raise PlanError(f"data file {path!r}: has {array.ndim} dimensions; tokens have 1, rows at least 1")
    if not array.flags.c_contiguous:
        raise PlanError(f"data file {path!r}: is stored by columns, so a row is all over it; save it by rows")
    return Opened(array)
