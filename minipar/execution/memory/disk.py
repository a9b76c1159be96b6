"""Tensors in files, one file each, with a checksum; they are written past the page cache where that is possible.

    KEY.tensor      header (magic, bytes, checksum), padded to a block | data, padded to a block

A file is complete when it has its name: it is written under another one, flushed to the disk, and renamed. What a
killed process leaves is never read: every store has a folder of its own, and removes it at its end. Writing and
reading go block by block through two aligned buffers, with direct access (O_DIRECT) if the file system has it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from minipar.errors import StoreError
from minipar.execution.memory.stores import Tier

BLOCK = 4096
STAGE = 4 << 20  # bytes of the staging buffer
_HEADER = struct.Struct("<8sQI")
_MAGIC = b"minipar1"


class DiskStore(Tier):
    """Tensors in files below `folder` (default: the system's temporary folder), in a folder of this store's own.

    capacity   bytes that it may hold; None: what the disk has
    direct     go past the page cache, if the file system can: what is measured is then the disk
    Raises StoreError for a folder that cannot be written, a full disk, and files that are not what was written.
    """

    tier = "disk"

    def __init__(self, folder: str | None = None, capacity: int | None = None, direct: bool = True) -> None:
        try:
            self.folder = tempfile.mkdtemp(prefix="minipar-offload-", dir=folder)
        except OSError as error:
            raise StoreError(
                f"offload folder {folder!r}: {error.strerror}; possible is one that can be written"
            ) from None
        super().__init__(capacity)
        # Buffers of whole pages, which are aligned as direct access needs; one per direction, each used by one thread.
        self._stage, self._stage_back = mmap.mmap(-1, STAGE), mmap.mmap(-1, STAGE)
        self.direct = direct and hasattr(os, "O_DIRECT") and self._takes_direct()
        self._forms: dict[Hashable, tuple[torch.Size, torch.dtype]] = {}
        self._names: dict[Hashable, str] = {}

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _takes_direct(self) -> bool:
        path = os.path.join(self.folder, "probe")
        try:
            file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        except OSError:
            return False
        try:
            return os.write(file, memoryview(self._stage)[:BLOCK]) == BLOCK
        except OSError:
            return False
        finally:
            os.close(file)
            os.unlink(path)

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o600)

    def _path(self, key: Hashable) -> str:
        name = self._names.setdefault(key, f"{len(self._names)}.tensor")
        return os.path.join(self.folder, name)

    def _write(self, key: Hashable, tensor: Tensor) -> None:
        tensor = tensor.cpu().contiguous()
        data = _bytes_of(tensor)
        path = self._path(key)
        try:
            file = self._open(path + ".part", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            try:
                header = _HEADER.pack(_MAGIC, len(data), zlib.crc32(data))
                for block in self._blocks(header, data):
                    if os.write(file, block) != len(block):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(path + ".part", path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path + ".part")
            raise StoreError(
                f"disk: {key} ({len(data):,} bytes) could not be written to {self.folder}: {error.strerror}; "
                "possible: free some room, another folder, or offload less"
            ) from error
        self._forms[key] = tensor.shape, tensor.dtype

    def _blocks(self, header: bytes, data: memoryview) -> Iterator[memoryview]:
        """Header and data through the staging buffer, in whole blocks."""
        stage = memoryview(self._stage)
        stage[: len(header)] = header
        yield stage[:BLOCK]
        for start in range(0, len(data), STAGE):
            part = data[start : start + STAGE]
            stage[: len(part)] = part
            yield stage[: -(-len(part) // BLOCK) * BLOCK]

    def _read(self, key: Hashable) -> Tensor:
        shape, dtype = self._forms[key]
        tensor = torch.empty(shape, dtype=dtype)
        self._read_bytes(key, _bytes_of(tensor))
        return tensor

    def _read_into(self, key: Hashable, into: Tensor) -> None:
        if into.is_cuda or not into.is_contiguous() or self._forms[key][1] is not into.dtype:
            into.copy_(self._read(key))
        else:
            self._read_bytes(key, _bytes_of(into))

    def _read_bytes(self, key: Hashable, data: memoryview) -> None:
        stage = memoryview(self._stage_back)
        try:
            file = self._open(self._path(key), os.O_RDONLY)
            try:
                got = os.readv(file, [stage[:BLOCK]])
                magic, size, checksum = _HEADER.unpack(stage[: _HEADER.size])
                if got < _HEADER.size or magic != _MAGIC or size != len(data):
                    raise StoreError(f"disk: the file of {key} in {self.folder} is not the one that was written")
                for start in range(0, size, STAGE):
                    count = min(STAGE, size - start)
                    have = 0
                    while have < count:
                        got = os.readv(file, [stage[have : -(-count // BLOCK) * BLOCK]])
                        if got == 0:
                            raise StoreError(f"disk: the file of {key} in {self.folder} is cut short")
                        have += got
                    data[start : start + count] = stage[:count]
            finally:
                os.close(file)
        except OSError as error:
            raise StoreError(f"disk: {key} could not be read from {self.folder}: {error.strerror}") from error
        if zlib.crc32(data) != checksum:
            raise StoreError(f"disk: the file of {key} in {self.folder} is damaged: its checksum is another one")

    def _forget(self, key: Hashable) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))
        self._forms.pop(key, None)


def drop_page_cache(path: str) -> None:
    """Ask the system to forget what it holds of a file, so that a benchmark reads the disk."""
    if hasattr(os, "posix_fadvise"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _bytes_of(tensor: Tensor) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
