"""Values on their way between driver and ranks: a pickle, with the large buffers beside it in shared memory.

A tensor of 40 MB would take 200 ms as a plain pickle. Here pickle only refers to buffers from `LARGE` on: the sender
copies them once into a memory file, which has no name, `wire` passes a descriptor, and each receiver maps the file.
A mapping is private: its pages are shared until somebody writes to them, and what is written is seen by the writer
alone, also where a receiver forks. Nothing can be left behind: a file is gone with its last descriptor and mapping,
however their processes end.

New memory costs more than the copy: the system clears it page by page. So a sender keeps its last `_KEPT` files of at
most `_KEPT_BYTES` each, and fills one again once nobody else has it. The system itself knows: others get the file as
opened a second time, for reading, and a write lease is granted only where that is closed and unmapped everywhere,
in processes that died or were forked as well.

Storages that arrive in this way cannot be resized in place (`Tensor.resize_` to more elements); otherwise they are
like any other. Where there are no memory files (not Linux), the buffers stay inside the pickle.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import mmap
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from minipar.cluster.failures import said
from minipar.errors import RankError

LARGE = 1 << 18  # bytes; below this, copying through the socket costs less than making and mapping a file
_ALIGNMENT = 64
_KEPT, _KEPT_BYTES = 2, 1 << 26  # two, because a result often lives until the next one has replaced it
_OPEN_FILES = (io.FileIO, io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom)


class MemoryFile:
    """An open memory file that holds the buffers of one parcel. It owns the descriptor (-1 once closed)."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        """Close the descriptor; what is mapped stays. A second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return type(None), ()  # (a descriptor is none elsewhere: see wire.py)


@dataclass(frozen=True)
class Parcel:
    """A packed value: its pickle, the sizes in bytes of the buffers beside it, and where these are."""

    data: bytes
    sizes: tuple[int, ...] = ()
    segment: MemoryFile | None = None

    def close(self) -> None:
        """Give up its memory file here, as `unpack` does as well. A second call does nothing."""
        if self.segment is not None:
            self.segment.close()


def pack(value: Any, inside: bool = False) -> Parcel:
    """Pickle a value, functions and classes of a notebook included. Raises what pickling it raises.

    inside   buffers stay in the pickle, which can then go to another machine, and be unpacked several times
    """
    if hasattr(os, "memfd_create") and not inside:
        buffers: list[memoryview] = []
        data = _pickle(value, buffers)
        if not buffers:
            return Parcel(data)
        with contextlib.suppress(OSError):  # no memory or descriptors to be had
            return Parcel(data, tuple(buffer.nbytes for buffer in buffers), _fill(buffers))
    return Parcel(_pickle(value, None))


def unpack(parcel: Parcel) -> Any:
    """The value of a parcel, whose memory file is then closed. Raises what loading it raises."""
    if parcel.segment is None:
        return pickle.loads(parcel.data)
    offsets, total = _layout(parcel.sizes)
    try:
        memory = _map(parcel.segment.descriptor, total)
    finally:
        parcel.segment.close()
    parts = [memory[offset : offset + size] for offset, size in zip(offsets, parcel.sizes, strict=True)]
    del memory
    return pickle.loads(parcel.data, buffers=parts)


def pack_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], inside: bool = False
) -> Parcel:
    """A call, packed for the ranks; `inside`: see `pack`. RankError for what cannot be called or sent."""
    if not callable(function):
        raise RankError(f"cluster.run needs a function to call, not a {type(function).__name__}")
    try:
        return pack((function, args, kwargs), inside)
    except Exception as error:
        raise RankError(f"the function or an argument cannot be sent to the ranks: {said(error)}") from error


# Pickling


def _pickle(value: Any, buffers: list[memoryview] | None) -> bytes:
    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        assert buffers is not None
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    with io.BytesIO() as file:
        Pickler(file, 5, None if buffers is None else stays_inside).dump(value)
        return file.getvalue()


class Pickler(cloudpickle.Pickler):
    """Pickles what cloudpickle does, the memory of torch's CPU tensors as buffers, modules that torch.jit has compiled,
    and no open files."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _OPEN_FILES) and obj is not sys.stdout and obj is not sys.stderr:
            # Text files opened for reading would otherwise arrive as a copy of their contents.
            name = getattr(obj, "name", "")
            raise pickle.PicklingError(f"open file {name!r}; give its path, and open it in the function")
        if isinstance(obj, types.GeneratorType):
            raise pickle.PicklingError(f"generator {obj.__name__!r}; give a list, or make it in the function")
        compiled = getattr(sys.modules.get("torch.jit"), "ScriptModule", ())
        if isinstance(obj, compiled):
            return sys.modules["torch.jit"].load, (io.BytesIO(obj.save_to_buffer()),)
        storage = getattr(sys.modules.get("torch"), "storage", None)
        if storage is not None:
            # Tensors are pickled as their storage and how they look at it. A storage is one object, however many
            # tensors look at it, so that these share memory at the other end as well.
            if isinstance(obj, storage.TypedStorage) and obj._untyped_storage.device.type == "cpu":
                return _typed, (obj._untyped_storage, obj.dtype)
            if isinstance(obj, storage.UntypedStorage) and obj.device.type == "cpu":
                return _untyped, (pickle.PickleBuffer(_bytes_of(obj)),)
        return super().reducer_override(obj)


def _bytes_of(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _untyped(buffer: Any) -> Any:
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    if not isinstance(buffer, memoryview):  # it came inside the pickle; a copy can be resized
        tensor = tensor.clone()
    return tensor.untyped_storage()


def _typed(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


# Memory files


class _File:
    """A memory file of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mapping: mmap.mmap | None = None
        self._used = False
        descriptor = os.memfd_create("minipar", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            # Linux does not count the maker among the writers, and so would never grant it a lease.
            self._descriptor = _open_again(descriptor, os.O_RDWR)
        finally:
            os.close(descriptor)

    def free(self) -> bool:
        """Whether nobody else has it open or mapped."""
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def fill(self, buffers: Sequence[memoryview], offsets: Sequence[int]) -> MemoryFile:
        """Copy the buffers to these offsets; the file for the receivers. OSError."""
        if self._used and self._mapping is None:  # its pages are there: now copying needs no system call for each
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapping = mmap.mmap(self._descriptor, self.size, flags=flags)
        for buffer, offset in zip(buffers, offsets, strict=True):
            if self._mapping is not None:
                self._mapping[offset : offset + buffer.nbytes] = buffer
                continue
            done = 0
            while done < buffer.nbytes:
                done += os.pwrite(self._descriptor, buffer[done:], offset + done)
        self._used = True
        return MemoryFile(_open_again(self._descriptor, os.O_RDONLY))

    def close(self) -> None:
        os.close(self._descriptor)
        if self._mapping is not None:
            self._mapping.close()


def _open_again(descriptor: int, how: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", how | os.O_CLOEXEC)


_kept: list[_File] = []  # those of this process that may be filled again, the oldest first
_lock = threading.Lock()


def _forget() -> None:
    """A forked process shares no file with its parent, for both would fill it."""
    global _lock
    _lock = threading.Lock()
    while _kept:
        _kept.pop().close()


os.register_at_fork(after_in_child=_forget)


def _fill(buffers: Sequence[memoryview]) -> MemoryFile:
    """Copy the buffers into a memory file. OSError where the system refuses."""
    offsets, total = _layout([buffer.nbytes for buffer in buffers])
    with _lock:
        for kept in _kept:
            if kept.size >= total and kept.free():
                return kept.fill(buffers, offsets)
        file = _File(total)
        try:
            segment = file.fill(buffers, offsets)
        except BaseException:
            file.close()
            raise
        if total > _KEPT_BYTES:
            file.close()
            return segment
        _kept.append(file)
        if len(_kept) > _KEPT:
            _kept.pop(0).close()
        return segment


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins, and the bytes of all together."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


# Python's own mmap objects would keep a descriptor open each, for as long as a tensor lives.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _map(descriptor: int, size: int) -> memoryview:
    """The file as writable memory of this process alone, unmapped when nobody looks at it any more. OSError."""
    start = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if start == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes of shared memory: {os.strerror(number)}")
    memory = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(memory, _libc.munmap, start, size).atexit = False  # the end of the process sees to it
    return memoryview(memory)
