"""What processes of one machine share: memory, and words in it for which one sleeps until another changes them.

Memory is an anonymous file of Linux, without a name anywhere. It counts as memory of the ranks, not as part of /dev/shm
(which has 64 MB in many containers). The system frees it when the last process that has it mapped has ended, in any
way. The maker keeps a descriptor until all others have opened the file through /proc. OSError where the system has no
such files, or does not let a process open another one's.

Linux prefers a process that wakes from a futex to busy ones. A process that polls has no such advantage.

On processors other than x86, two stores of one core may be seen by another core in the other order; and on all
processors a load may overtake a store. Python has no atomic operations, but its locks use them: what was loaded or
stored before a lock is released is done by then (release), and nothing after it is acquired begins earlier (acquire). A
release followed by an acquire of the same lock lets nothing pass in either direction: that is `fence`. `memoryview`
stores and loads an aligned word of 8 bytes in one move, so nobody sees half of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import threading
import time

_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_NAP = 2e-4
_syscall = ctypes.CDLL(None, use_errno=False).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
                     ctypes.c_uint32]  # fmt: skip
_lock = threading.Lock()


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# The longest time that an interrupt may be late: a signal that comes between Python's last check and the sleep itself
# is noticed only after the sleep.
_LIMIT = _Time(0, 50_000_000)
_SHORT = _Time(0, 500_000)
_limit, _short = ctypes.addressof(_LIMIT), ctypes.addressof(_SHORT)


def fence() -> None:
    """No store or load of this thread moves past this. Any number of threads may call it, and an interrupt may come
    in the middle of it."""
    with _lock:
        pass
    with _lock:  # this acquire comes after that release
        pass


def wait(address: int, value: int, short: bool = False) -> None:
    """Sleep while the 4 bytes at `address` are `value`: until `wake`, a signal, or 50 ms (0.5 ms if `short`). The
    caller must check again then."""
    if _NUMBER is None:
        time.sleep(_NAP)
    else:
        _syscall(_NUMBER, address, _WAIT, value, _short if short else _limit, None, 0)


def wake(address: int) -> None:
    """Wake all that wait there."""
    if _NUMBER is not None:
        _syscall(_NUMBER, address, _WAKE, _ALL, None, None, 0)


def make(size: int) -> int:
    """Make a file of zeros; returns its descriptor. Pages take memory only once they are written."""
    if not hasattr(os, "memfd_create"):
        raise OSError(f"no anonymous files in memory on {sys.platform}")
    descriptor = os.memfd_create("minipar", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_from(pid: int, descriptor: int, size: int) -> mmap.mmap:
    """Map the file that process `pid` has open under this number."""
    own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(own).st_size != size:
            raise OSError(f"descriptor {descriptor} of process {pid} is another file")
        return mmap.mmap(own, size)
    finally:
        os.close(own)
