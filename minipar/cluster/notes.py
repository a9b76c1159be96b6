"""What a rank is doing, written where the driver can read it at any time, also after the rank's death.

Both have mapped one page of a file. A note is a store to memory of some 60 ns: it needs no message, thread or lock.

    bytes 0 ...          the instruction that the rank last began (`note`)
    byte _SINCE          since when it waits in an operation, on the clock of time.monotonic; 0.0 when it does not
    bytes _OPERATION ... that operation (`waiting`)
    byte _INTERRUPTED    the last run that the driver has asked the rank to end: a signal may come before it or after it

After the page the same file has the Python stack that faulthandler appends when the driver requests it; see stacks.py.
A reader may see half a note: the driver reads again later, and a dead rank writes no more.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from minipar.errors import RankError

P = ParamSpec("P")
T = TypeVar("T")
SIZE = 1024
LABEL_BYTES = 256
_SINCE, _OPERATION = 512, 520
_OPERATION_BYTES = 256
_END = _INTERRUPTED = _OPERATION + _OPERATION_BYTES
_TIME, _RUN = struct.Struct("<d"), struct.Struct("<q")
_NEVER = bytes(8)
_DEVICE = "its GPU, in "

# A process that is no rank writes to a page that nobody reads, so that callers need not check whether they are in one.
_page = mmap.mmap(-1, SIZE)


# In a rank


def attach(path: str) -> int:
    """Write to this file from now on; returns a descriptor that appends to it, which stays open."""
    global _page
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    _page = mmap.mmap(descriptor, SIZE)
    return descriptor


def label(text: str) -> bytes:
    """A text in the form that `note` takes; made once for an instruction that runs many times."""
    return text.encode()[:LABEL_BYTES].ljust(LABEL_BYTES, b"\0")


def note(what: bytes) -> None:
    """Say what this rank begins now: a `label`."""
    _page[:LABEL_BYTES] = what


def waiting(what: str, since: float) -> None:
    """Say that this rank waits in an operation from `since` (time.monotonic) on, until `going_on`."""
    _page[_OPERATION:_END] = _operation(what)
    _TIME.pack_into(_page, _SINCE, since)


@functools.lru_cache(4096)  # a program waits for the same messages in every step
def _operation(what: str) -> bytes:
    return what.encode()[:_OPERATION_BYTES].ljust(_OPERATION_BYTES, b"\0")


def going_on() -> None:
    """Say that the wait is over."""
    _page[_SINCE:_OPERATION] = _NEVER


def clear() -> None:
    """Clear what is noted: a run begins or has ended."""
    _page[:_END] = bytes(_END)


def interrupted() -> int:
    """The run that the driver has asked this rank to end last; 0: none so far."""
    return int(_RUN.unpack_from(_page, _INTERRUPTED)[0])


def ask_to_end(run: int) -> None:
    """A thread of this process asks it to end this run; 0: nobody does."""
    _RUN.pack_into(_page, _INTERRUPTED, run)


# A rank that waits for its GPU spins: it uses a whole core, as if it were busy. Where ranks wait for each other over
# NCCL, that is what all of them do: a receive is a kernel that ends when the message has come, and a rank waits for the
# kernel. From outside nobody sees whether a GPU computes or waits for a message; the watchdog only sees for how long.


def note_device_waits() -> None:
    """In a rank with a GPU: from now on torch's `synchronize` of a device, an event or a stream says that it waits.
    (What waits inside of torch's own code, such as `Tensor.item`, does not: such a rank counts as busy.)"""
    import torch

    owners: dict[str, Any] = {"": torch.cuda, "Event.": torch.cuda.Event, "Stream.": torch.cuda.Stream}
    for name, owner in owners.items():
        owner.synchronize = noted(owner.synchronize, f"torch.cuda.{name}synchronize")


def noted(wait: Callable[P, T], name: str) -> Callable[P, T]:
    """A function that waits for a GPU, and says so if the rank's main thread calls it."""

    @functools.wraps(wait)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.current_thread() is not threading.main_thread():
            return wait(*args, **kwargs)
        waiting(_DEVICE + name, time.monotonic())
        try:
            return wait(*args, **kwargs)
        finally:
            going_on()

    return call


def is_device_wait(operation: str) -> bool:
    """Whether an operation of a rank's notes is such a wait."""
    return operation.startswith(_DEVICE)


# In the driver


@dataclass(frozen=True)
class Doing:
    """What a rank said last. `since`: when the wait in `operation` began, or 0.0 when that is over."""

    instruction: str
    operation: str
    since: float

    @property
    def last(self) -> str:
        """What a dead rank did last, in words; "" if it wrote nothing."""
        if self.since:
            return f"in {self.operation}" + (f" ({self.instruction})" if self.instruction else "")
        if self.instruction:
            return f"in {self.instruction}"
        return f"after {self.operation}" if self.operation else ""


class Page:
    """The driver's view of one rank's page. The rank finds it at `path`."""

    def __init__(self, folder: str) -> None:
        try:
            self._file, self.path = tempfile.mkstemp(prefix="rank-", dir=folder)
            try:
                # Written, not only made as long: where there is no room, a store to the page would end the process.
                os.pwrite(self._file, bytes(SIZE), 0)
                self._page = mmap.mmap(self._file, SIZE)
            except BaseException:
                os.close(self._file)
                os.unlink(self.path)
                raise
        except OSError as error:
            raise RankError(
                f"the temporary folder {folder} cannot be used: {error.strerror}; free some room there, or set TMPDIR"
            ) from error

    def read(self) -> Doing:
        """What the rank says at this moment."""
        (since,) = _TIME.unpack_from(self._page, _SINCE)
        return Doing(self._text(0, LABEL_BYTES), self._text(_OPERATION, _OPERATION_BYTES), since)

    def interrupt(self, run: int) -> None:
        """Say that the rank is asked to end this run. The signal is sent afterwards."""
        _RUN.pack_into(self._page, _INTERRUPTED, run)

    def _text(self, start: int, length: int) -> str:
        return self._page[start : start + length].split(b"\0", 1)[0].decode(errors="replace")

    def appended(self) -> str:
        """The text behind the page."""
        size = os.fstat(self._file).st_size - SIZE
        return os.pread(self._file, size, SIZE).decode("ascii", "replace") if size > 0 else ""

    def cut(self) -> None:
        """Forget the text behind the page."""
        os.ftruncate(self._file, SIZE)

    def unlink(self) -> None:
        """Remove the file's name, so that the system frees the file when rank and driver have ended."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def close(self) -> None:
        """Unmap the page and close the file."""
        self.unlink()
        self._page.close()
        os.close(self._file)
