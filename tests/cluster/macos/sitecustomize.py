"""Imported by Python at its start in tests of macOS: takes away what only Linux has, and tells minipar that this is
macOS. Everything else, torch and the standard library, still sees Linux."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
from importlib.machinery import SourceFileLoader
from types import CodeType

_ONLY_LINUX = {
    os: "pidfd_open P_PIDFD memfd_create eventfd posix_fallocate posix_fadvise pipe2 waitid sched_setaffinity "
    "sched_getaffinity sched_setscheduler sched_param SCHED_BATCH O_TMPFILE splice copy_file_range getrandom setns",
    socket: "SO_PEERCRED MSG_CMSG_CLOEXEC SO_BINDTODEVICE TCP_USER_TIMEOUT",
    fcntl: "F_SETLEASE F_SETSIG F_SETPIPE_SZ F_ADD_SEALS",
    mmap: "MAP_POPULATE MADV_HUGEPAGE",
    select: "epoll",
}
# In minipar's own sources: what it asks the system, files that are elsewhere, and calls of the kernel.
_OTHER = {
    b"sys.platform": b"'darwin'",
    b"/proc": b"/no-proc",
    b"/dev/shm": b"/no-shm",
    b"_libc.prctl": b"_libc.no_prctl",
    b"socket.SOCK_SEQPACKET": b"socket.NO_SEQPACKET",
}

for module, names in _ONLY_LINUX.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

_get_code = SourceFileLoader.get_code


def _of_macos(self: SourceFileLoader, fullname: str) -> CodeType | None:
    if fullname.partition(".")[0] != "minipar":
        return _get_code(self, fullname)
    path = self.get_filename(fullname)
    source = self.get_data(path)
    for linux, other in _OTHER.items():
        source = source.replace(linux, other)
    return compile(source, path, "exec", dont_inherit=True)


SourceFileLoader.get_code = _of_macos  # type: ignore[method-assign]
