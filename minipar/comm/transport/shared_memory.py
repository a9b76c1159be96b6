"""Memory that processes of one machine share: an anonymous file of Linux, without a name anywhere.

It counts as memory of the ranks, not as part of /dev/shm (which has 64 MB in many containers). The system frees it when
the last process that has it mapped has ended, in any way. The maker keeps a descriptor until all others have opened the
file through /proc. OSError where the system has no such files, or does not let a process open another one's.
"""

from __future__ import annotations

import mmap
import os
import sys


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
