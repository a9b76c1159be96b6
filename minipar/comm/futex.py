"""Sleep until a word in shared memory changes, as a lock in C does: Linux wakes a process that sleeps so ahead of those
that are busy, which looking again and again does not get."""

from __future__ import annotations

import ctypes
import platform
import sys
import time

_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_NAP = 2e-4
_syscall = ctypes.CDLL(None, use_errno=False).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
                     ctypes.c_uint32]  # fmt: skip


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# Not longer than an interrupt may take: a signal that comes between Python's last look for one and the sleep itself
# is noticed only afterwards.
_LIMIT = _Time(0, 50_000_000)
_limit = ctypes.addressof(_LIMIT)


def wait(address: int, value: int) -> None:
    """Sleep while the 4 bytes at `address` are `value`, until `wake`, a signal, or some time: look again then."""
    if _NUMBER is None:
        time.sleep(_NAP)
    else:
        _syscall(_NUMBER, address, _WAIT, value, _limit, None, 0)


def wake(address: int) -> None:
    """Wake all that wait there."""
    if _NUMBER is not None:
        _syscall(_NUMBER, address, _WAKE, _ALL, None, None, 0)
