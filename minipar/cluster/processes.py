"""How a process is tied to its parent, so that none outlives its driver, and what an exit status means."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4  # among the flags of a process in /proc
_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None)


def open_standard_streams() -> None:
    """A process may begin without its standard streams, as those of cron and daemons do. Else whatever it opens next
    would have their numbers, and a child would print to it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def die_with_parent(parent: int, how: int = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when the thread that forked it ends. `parent`: the expected pid of the
    parent.

    Linux watches the forking *thread*, so a caller must be sure that the thread lives as long as its process.
    """
    if not _LINUX:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:  # the parent ended before the request was in place
        os.kill(os.getpid(), how)


def tie_grandchildren(in_child: Callable[[], None]) -> None:
    """Make every child that this process forks later die with it as well, and call `in_child` there first.

    This is needed since the kernel forgets the request of `die_with_parent` at each fork.
    """
    forker = {"pid": 0, "main": False}

    def before() -> None:
        forker["pid"] = os.getpid()
        forker["main"] = threading.current_thread() is threading.main_thread()

    def after_in_child() -> None:
        in_child()
        if forker["main"]:  # (a child that a shorter-lived thread forks dies with the process group)
            die_with_parent(forker["pid"])

    os.register_at_fork(before=before, after_in_child=after_in_child)


def kill_group(leader: int) -> None:
    """SIGKILL the process group of `leader` and `leader` itself (it may not have made its group yet).

    A data loader's worker of torch that is killed while it passes on a batch leaves a file of shared memory behind,
    named after its pid: these files are removed.
    """
    members = _members(leader)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)
    for pid in members:
        remove_shared(pid)


def end(status: int) -> None:
    """SIGKILL everything in this process's group, which it leads, and end with this exit status."""
    others = [pid for pid in _members(os.getpid()) if pid != os.getpid()]
    if not os.path.isdir("/proc"):
        kill_group(os.getpid())
    for pid in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for pid in others:
        remove_shared(pid)
    os._exit(status)


def _members(leader: int) -> list[int]:
    """The pids of a process group; none where there is no /proc."""
    members = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                if os.getpgid(int(name)) == leader:
                    members.append(int(name))
    return members


def remove_shared(pid: int, folder: str = "/dev/shm") -> None:
    """Wait up to a fifth of a second for process `pid` to end, and then remove the shared memory of torch that it had
    made and not unlinked yet."""
    if not ends(pid, 0.2):
        return  # it is alive, and may still need them
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if name.startswith(f"torch_{pid}_"):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def ends(pid: int, seconds: float) -> bool:
    """Whether a process has ended, reaped or not, or does so within so many seconds."""
    if hasattr(os, "pidfd_open"):
        try:
            watched = os.pidfd_open(pid)  # readable when it has ended
        except OSError:
            return True
        try:
            return bool(readable([watched], seconds))
        finally:
            os.close(watched)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.001)
    return False


def readable(descriptors: Iterable[int], seconds: float | None = None) -> list[int]:
    """Those of these descriptors from which something can be read, or which have ended, as soon as there is one, or
    after so many seconds. (`select.select` knows no descriptors above 1023.)"""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    # (Rounded up: 0 ms would not wait.)
    return [found for found, _ in poll.poll(None if seconds is None else math.ceil(seconds * 1000))]


def ending(pid: int) -> bool:
    """Whether a process has ended, or is about to: the system takes away what it has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ends(pid, 0)
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def yield_to_others() -> None:
    """Let Linux schedule this process, and the processes that it starts, as batch jobs.

    Ranks compute for a long time without a pause. Without this, a rank that a message wakes would take the core from
    another rank in the middle of a layer, and both would lose their caches. As a batch job it waits for the end of the
    other's time slice, or for a free core. With more ranks than cores pipelines run 3 to 4 % faster.
    """
    if _LINUX:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def flush_native() -> None:
    """Write out what native code has printed: C buffers its output to a pipe until the buffer is full."""
    _libc.fflush(None)


def killed_for_memory() -> int | None:
    """How many processes the system has killed because it was out of memory; None where it does not say."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


@dataclass(eq=False)
class _Holding:
    """A handler of SIGINT that leaves the first one for later."""

    before: Callable[[int, FrameType | None], Any]
    missed: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.missed = not self.missed
        if not self.missed:
            self.before(number, frame)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Meanwhile an interrupt, such as by the stop button of a notebook, waits for the end; a second one does not. In
    threads other than the main one, which are not interrupted, this does nothing."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(before) or isinstance(before, _Holding):
        yield
        return
    holding = _Holding(before)
    signal.signal(signal.SIGINT, holding)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if holding.missed:
            before(signal.SIGINT, None)


LOST_DRIVER = 71  # exit status of a rank that cannot reach its driver any more


def describe_status(status: int | None, starved: bool | None = None) -> str:
    """An exit status as subprocess writes it (-9 = killed by signal 9), in words. `starved`: whether the system was out
    of memory; None: unknown."""
    if status is None:
        return "ended without an answer"
    if status == LOST_DRIVER:
        return "lost its connection to the driver; were its descriptors closed?"
    if status >= 0:
        return f"exited with status {status} without an answer (os._exit?)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    by_nine = {None: "kill -9, or the system was out of memory", True: "the system was out of memory", False: "kill -9"}
    hint = {
        signal.SIGKILL: f"; {by_nine[starved]}",
        signal.SIGABRT: "; native code gave up, as gloo does when a tensor's size differs from its peer's",
        signal.SIGSEGV: "; a crash in native code",
    }.get(-status, "")  # type: ignore[call-overload]
    return f"was killed by signal {-status} ({name}{hint})"
