"""Tensors in one file of the disk, each with a checksum; they are written past the page cache where that is possible.

    | data, padded to a block |  the next tensor ...

The file has no name: it is removed as soon as it is open, so that the system frees it when this process has ended, in
any way. A tensor that is put again gets another place, and the old one is free when the new one is whole. Writing and
reading go block by block through two aligned buffers, with direct access (O_DIRECT) if the file system has it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import zlib
from collections import deque
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, wait
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.cluster import threads
from minipar.errors import StoreError
from minipar.models.tensors import laid_out, memory_of
from minipar.wording import several

BLOCK = 4096
STAGE = 4 << 20  # bytes of the staging buffer


class Place(NamedTuple):
    """Where a tensor is in the file, and what it is."""

    start: int
    blocks: int
    checksum: int
    shape: torch.Size
    dtype: torch.dtype


class Ledger:
    """Who holds how many bytes of a tier with a capacity."""

    def __init__(self, tier: str, capacity: int | None) -> None:
        self.tier, self.capacity = tier, capacity
        self.sizes: dict[Hashable, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def take(self, key: Hashable, size: int) -> None:
        """Note that `key` now holds `size` bytes. StoreError when that is more than the tier has."""
        others = self.bytes - self.sizes.get(key, 0)
        if self.capacity is not None and others + size > self.capacity:
            raise StoreError(
                f"{self.tier}: {_title(key)} needs {size:,} bytes, but {others:,} of {self.capacity:,} are taken; "
                f"possible: offload less, or a {self.tier} with more room"
            )
        self.sizes[key] = size

    def drop(self, key: Hashable) -> bool:
        """Forget who holds something, if it was known; whether it was."""
        return self.sizes.pop(key, None) is not None

    def known(self, key: Hashable) -> None:
        """StoreError for a key that was never put."""
        if key not in self.sizes:
            raise StoreError(
                f"{self.tier}: nothing was put under {_title(key)}; there are {several(len(self.sizes), 'tensor')}"
            )


def _title(key: Hashable) -> str:
    """A key in words: of (value, number of its tensor) the value."""
    return str(key[0] if type(key) is tuple else key)  # (a Value is a tuple of its own type)


class DiskStore:
    """Tensors in a file below `folder` (default: the system's temporary folder), which has no name there.

    capacity   bytes that it may hold; None: what the disk has
    direct     go past the page cache, if the file system can: what is measured is then the disk
    Raises StoreError for a folder that cannot be written, a full disk, and data that are not what was written.
    """

    def __init__(self, folder: str | None = None, capacity: int | None = None, direct: bool = True) -> None:
        self.folder = folder or tempfile.gettempdir()
        # Buffers of whole pages, which are aligned as direct access needs; one per direction, each used by one thread.
        self._stage, self._stage_back = mmap.mmap(-1, STAGE), mmap.mmap(-1, STAGE)
        try:
            self.file, path = tempfile.mkstemp(prefix="minipar-offload-", dir=folder)
        except OSError as error:
            raise StoreError(
                f"offload folder {folder!r}: {error.strerror}; possible is one that can be written"
            ) from None
        self.direct = direct and hasattr(os, "O_DIRECT") and self._takes_direct(path)
        os.unlink(path)
        self.ledger = Ledger("disk", capacity)
        self._thread, self._reader = threads.InTurn("copies to disk"), threads.InTurn("copies from disk")
        self._written: dict[Hashable, Future[None]] = {}
        self._places: dict[Hashable, Place] = {}
        self._end = 0  # of what was ever written
        self._free: dict[int, list[int]] = {}  # by their blocks, the beginnings of places that nobody uses
        self._unused: deque[Place] = deque()  # more of these, which the reading thread has found

    def put(self, key: Hashable, tensor: Tensor) -> Future[None]:
        """Start to copy a tensor away. It must stay as it is until the future is done."""
        self.ledger.take(key, tensor.numel() * tensor.element_size())
        written = self._written[key] = self._thread.submit(self._write, key, tensor.detach())
        return written

    def fetch(self, key: Hashable, into: Tensor) -> Future[None]:
        """Start to copy a tensor into `into`, which has its shape; to another dtype it is converted."""
        self.ledger.known(key)
        found: Future[None] = self._reader.submit(self._read_into, self._written.get(key), key, into.detach())
        return found

    def drop(self, key: Hashable) -> None:
        """Forget a tensor; nothing happens for an unknown key."""
        self._written.pop(key, None)
        if self.ledger.drop(key):
            self._thread.submit(self._forget, key)

    def close(self) -> None:
        """Wait for copies that have not ended, and drop everything that was kept."""
        for key in list(self.ledger.sizes):
            self.drop(key)
        self._reader.shutdown()
        self._thread.shutdown()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _takes_direct(self, path: str) -> bool:
        """Open the file for direct access; returns whether the file system has that."""
        try:
            file = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            taken = os.pwrite(file, memoryview(self._stage)[:BLOCK], 0) == BLOCK
        except OSError:
            taken = False
        if taken:
            file, self.file = self.file, file
        os.close(file)
        return taken

    def _write(self, key: Hashable, tensor: Tensor) -> None:
        tensor = laid_out(tensor.cpu())
        data = memory_of(tensor)
        blocks = -(-len(data) // BLOCK)
        while self._unused:
            self._release(self._unused.popleft())
        free = self._free.get(blocks)
        place = Place(free.pop() if free else self._end, blocks, zlib.crc32(data), tensor.shape, tensor.dtype)
        self._end = max(self._end, place.start + blocks * BLOCK)
        try:
            at = place.start
            for block in self._blocks(data):
                if os.pwrite(self.file, block, at) != len(block):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                at += len(block)
            os.fsync(self.file)
        except OSError as error:
            self._release(place)
            raise StoreError(
                f"disk: {key} ({len(data):,} bytes) could not be written to {self.folder}: {error.strerror}; "
                "possible: free some room, another folder, or offload less"
            ) from error
        old, self._places[key] = self._places.get(key), place
        self._release_later(old)

    def _release(self, place: Place) -> None:
        if place.start + place.blocks * BLOCK == self._end:
            self._end = place.start
            with contextlib.suppress(OSError):
                os.ftruncate(self.file, self._end)
            return
        self._free.setdefault(place.blocks, []).append(place.start)

    def _release_later(self, place: Place | None) -> None:
        """Let a place be used again after the reads that were asked for before."""
        if place is not None:
            with contextlib.suppress(RuntimeError):  # (the store is being closed)
                self._reader.submit(self._unused.append, place)

    def _blocks(self, data: memoryview) -> Iterator[memoryview]:
        """Data through the staging buffer, in whole blocks."""
        stage = memoryview(self._stage)
        for start in range(0, len(data), STAGE):
            part = data[start : start + STAGE]
            stage[: len(part)] = part
            yield stage[: -(-len(part) // BLOCK) * BLOCK]

    def _read(self, key: Hashable) -> Tensor:
        place = self._places[key]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        self._read_bytes(key, place, memory_of(tensor))
        return tensor

    def _read_into(self, written: Future[None] | None, key: Hashable, into: Tensor) -> None:
        if written is not None:
            wait([written])  # (if it failed, what was put before is still there)
        place = self._places[key]
        if into.is_cuda or not into.is_contiguous() or place.dtype is not into.dtype:
            into.copy_(self._read(key))
        else:
            self._read_bytes(key, place, memory_of(into))

    def _read_bytes(self, key: Hashable, place: Place, data: memoryview) -> None:
        stage = memoryview(self._stage_back)
        try:
            os.lseek(self.file, place.start, os.SEEK_SET)  # (only reads use this; macOS has no preadv)
            for start in range(0, len(data), STAGE):
                count = min(STAGE, len(data) - start)
                have = 0
                while have < count:
                    got = os.readv(self.file, [stage[have : -(-count // BLOCK) * BLOCK]])
                    if got == 0:
                        raise StoreError(f"disk: the file of {key} in {self.folder} is cut short")
                    have += got
                data[start : start + count] = stage[:count]
        except OSError as error:
            raise StoreError(f"disk: {key} could not be read from {self.folder}: {error.strerror}") from error
        if zlib.crc32(data) != place.checksum:
            raise StoreError(f"disk: the file of {key} in {self.folder} is damaged: its checksum is another one")

    def _forget(self, key: Hashable) -> None:
        self._release_later(self._places.pop(key, None))
