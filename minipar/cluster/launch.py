"""The driver's side of starting ranks: from the zygote, or as fresh interpreters."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minipar.cluster.processes import ends, kill_group
from minipar.errors import RankError

_EXPORT = "torch.export._trace"  # what the first capture by torch.export imports: a second


@dataclass(eq=False)
class Zygote:
    """The helper process of this driver; see zygote.py. Threads may share it. `settings`: of glibc."""

    settings: str
    folder: str = field(default_factory=lambda: scratch_folder())
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    _imported: set[str] = field(default_factory=set)  # modules that the helper was asked to import

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._spare: socket.socket | None  # None: taken
        self._spare, spare = socket.socketpair()
        tie = "1" if threading.current_thread() is threading.main_thread() else "0"
        command = interpreter("from minipar.cluster.zygote import main; main(sys.argv[1:])")
        self._socket = ours
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(spare.fileno()), str(os.getpid()), self.folder, tie],
            pass_fds=(theirs.fileno(), spare.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the notebook's stop button signals the kernel's whole group
            # Without this, asking whether there is a GPU would make CUDA unusable in every process forked later.
            env={**child_environment(self.settings), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        theirs.close()
        spare.close()
        try:
            found = self._answer(0)
        except BaseException as error:
            self.close()
            if not isinstance(error, ConnectionError):
                raise
            found = "it ended early; its own message is above"
        if isinstance(found, str):
            raise RankError(f"the helper process that ranks are forked from could not start: {found}")
        (self._spare_pid,) = found

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, control: int, out: int, err: int) -> int:
        """A new rank that owns copies of the three descriptors; its pid. ConnectionError when the helper has died,
        another OSError when the system has no room for a process."""
        modules = {name for name in list(sys.modules) if name.startswith("minipar.") or name == _EXPORT}
        modules -= {*self._imported, "minipar.__main__"}
        self._imported |= modules
        found = self.ask("fork", sorted(modules), descriptors=[control, out, err])
        if isinstance(found, OSError):
            raise found
        return int(found)

    def take_spare(self, script: str, stdin: int) -> tuple[Forked, socket.socket] | None:
        """Its spare process, which runs a script now, and the driver's end of the socket whose number the script gets;
        None if it was taken before or has died."""
        control, self._spare = self._spare, None
        if control is None:
            return None
        try:
            socket.send_fds(control, [os.fsencode(script)], [stdin, 1, 2])
        except OSError:
            control.close()
            return None
        return Forked(self, self._spare_pid), control

    def tell(self, *request: object) -> None:
        """Send a request that has no answer. OSError when the helper has died."""
        self._socket.sendall(pickle.dumps((0, *request)))

    def ask(self, *request: object, descriptors: Sequence[int] = ()) -> Any:
        """The answer to a request. ConnectionError when the helper has died."""
        with self._lock:
            number = next(self._numbers)
            socket.send_fds(self._socket, [pickle.dumps((number, *request))], descriptors)
            return self._answer(number)

    def _answer(self, number: int) -> Any:
        while data := self._socket.recv(4096):
            found, answer = pickle.loads(data)
            if found == number:  # (another number: that of a request which was interrupted)
                return answer
        raise ConnectionResetError("the helper process has died")

    def close(self) -> None:
        """End the helper and, through it, every process that it forked."""
        with contextlib.suppress(OSError):
            self.tell("end")
        self._socket.close()
        if self._spare is not None:
            self._spare.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(eq=False)
class Forked:
    """A process that the zygote forked. Only a parent knows that a pid still belongs to its child: so the zygote sends
    it signals, and keeps it as a zombie until its status was asked for."""

    zygote: Zygote
    pid: int
    status: int | None = None

    @property
    def has_parent(self) -> bool:
        """Whether the process lives that started it, and learns its exit status."""
        return self.zygote.alive

    def signal(self, number: int) -> None:
        """Send it a signal; no error when it is gone."""
        with contextlib.suppress(OSError):
            self.zygote.tell("signal", self.pid, number)

    def kill(self) -> None:
        """SIGKILL it and everything in its process group; no error when it is gone."""
        try:
            self.zygote.tell("kill", self.pid)
        except OSError:  # the zygote and its ranks are gone, but not the processes that these had started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """Its exit status (-9 = killed by signal 9), or None when it has not ended within `seconds`."""
        if self.status is None and ends(self.pid, seconds):
            with contextlib.suppress(OSError):
                self.status = self.zygote.ask("status", self.pid)
        return self.status


@dataclass(eq=False)
class Spawned:
    """A process that runs in its own interpreter. `life` is the pipe end whose closing ends it, if it is to be closed
    when it has ended."""

    process: subprocess.Popen[bytes]
    life: int = -1
    has_parent = True

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        self.process.send_signal(number)  # (not to a process that was reaped)

    def kill(self) -> None:
        if self.process.returncode is None:  # not reaped, so the pid still belongs to it
            kill_group(self.pid)

    def wait(self, seconds: float) -> int | None:
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if self.life >= 0:
            os.close(self.life)
            self.life = -1
        return status


Process = Forked | Spawned


def fork(control: int, out: int, err: int, settings: str) -> Forked:
    """A rank from this process's zygote. RankError when the zygote cannot run."""
    for _ in range(2):  # (only a request shows that a zygote was killed)
        helper = zygote(settings)
        try:
            return Forked(helper, helper.fork(control, out, err))
        except ConnectionError:
            helper.close()
    raise RankError("the helper process that ranks are forked from ends at once; start='spawn' does without it")


def spawn(control: int, out: int, err: int, settings: str) -> Spawned:
    """A rank as a fresh interpreter that inherits the three descriptors."""
    tend(scratch_folder())
    theirs, ours = os.pipe()
    command = interpreter("from minipar.cluster.worker import spawned; spawned(sys.argv[1:])")
    try:
        process = subprocess.Popen(
            [*command, str(control), str(theirs), str(os.getpid())],
            pass_fds=(control, theirs),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env=child_environment(settings),
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return Spawned(process, ours)


def tend(folder: str) -> None:
    """Let a small process wait for the end of this one, however it ends, and then remove a folder. (A zygote does that
    itself.)"""
    if folder not in _tenders:
        _tenders[folder] = subprocess.Popen(
            ["/bin/sh", "-c", 'cat; rm -rf -- "$0"', folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the notebook's stop button signals the kernel's whole group
        )


def interpreter(code: str) -> list[str]:
    """A command that runs a line of Python (which may use `sys`) in a process that finds what the driver found.

    It has the driver's module path from its first import on, and takes nothing from the working directory by itself, as
    `python -m` does. The standard library comes first: a notebook's path begins with the working directory, but Python
    had its own modules before; a tempfile.py that lies there must not be run for Python's. Only if the driver has such
    a module from elsewhere itself (a program beside its own calendar.py), its order is kept.
    """
    home = os.path.dirname(os.__file__)
    own = (home, os.path.join(home, "lib-dynload"))
    path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
    if not any(_is_from_elsewhere(name, home) for name in sys.stdlib_module_names):
        path.sort(key=lambda entry: entry not in own)
    flags = ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site
    return [sys.executable, *flags, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


def _is_from_elsewhere(name: str, home: str) -> bool:
    """Whether the driver has a module of the standard library from a file of the user."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not file.startswith(home) and f"-packages{os.sep}" not in file


# How glibc keeps memory in a rank. It asks for huge pages, where Linux leaves that to programs: a layer's weights have
# more small pages than the processor's TLB has entries. Freed memory stays in the process for the next tensor of that
# size: else it goes back to the system, which clears its pages for the next one. (That is so for large pieces, too,
# since none has a mapping of its own: ZeRO-1 with buckets of 36 MiB takes 0.86 of DDP's time, and 0.99 without this.)
# And the short pieces that are cut off a tensor's ends to align it are merged with it again when it is freed, since no
# cache (tcache) keeps them: else the space is too small for the next tensor of that size, which then gets other memory
# that is not in the caches.
_MEMORY = ("hugetlb=1", "mmap_max=0", f"trim_threshold={1 << 30}", "tcache_count=0")


def settings_of_glibc(keep_freed_memory: bool = True) -> str:
    """The settings of glibc for ranks that are started now; the user's own come last, so they win. A rank that is
    started in another one's place gets those of its cluster, whatever the environment says by then."""
    ours = [f"glibc.malloc.{setting}" for setting in _MEMORY if keep_freed_memory]
    return ":".join(filter(None, [*ours, os.environ.get("GLIBC_TUNABLES", "")]))


def child_environment(settings: str | None = None) -> dict[str, str]:
    """The driver's environment, with these settings of glibc; default: the usual ones."""
    return {**os.environ, "GLIBC_TUNABLES": settings_of_glibc() if settings is None else settings}


# The keys have the pid, since a process that the driver forked must neither use nor close the driver's helpers, and
# glibc's settings, which a process reads when it starts.
_zygotes: dict[tuple[int, str], Zygote] = {}
_folders: dict[int, str] = {}
_tenders: dict[str, subprocess.Popen[bytes]] = {}  # by the folder that they remove
# The path of a socket has at most 103 bytes on macOS (107 on Linux); this is the longest one below a temporary folder.
_LONGEST, _BELOW = 103, len("/minipar-12345678/cluster-12345678/1000-10.1023")
_lock = threading.Lock()


def zygote(settings: str) -> Zygote:
    """This process's zygote; started at the first call (seconds, while it imports torch), then kept. There is one for
    ranks that keep freed memory, one for ranks that do not, and others if the user's GLIBC_TUNABLES change: glibc reads
    its settings when a process starts."""
    key = os.getpid(), settings
    with _lock:
        found = _zygotes.get(key)
        if found is not None and not found.alive:
            found.close()
            found = None
        if found is None:
            found = _zygotes[key] = Zygote(settings)
        return found


def take_spare(script: str, stdin: int) -> tuple[Forked, socket.socket] | None:
    """A process that has imported torch, and nothing of minipar, begins to run a script by its path; and a socket whose
    other end's number is its only argument. None if no zygote of this process has one left."""
    with _lock:
        mine = [helper for (pid, _), helper in _zygotes.items() if pid == os.getpid()]
    return next((taken for helper in mine if helper.alive and (taken := helper.take_spare(script, stdin))), None)


def scratch_folder() -> str:
    """A private temporary folder of this process, removed when it ends. RankError if sockets can be nowhere."""
    pid = os.getpid()
    if pid not in _folders or not os.path.isdir(_folders[pid]):
        _folders[pid] = tempfile.mkdtemp(prefix="minipar-", dir=_with_room_for_sockets())
    return _folders[pid]


def _with_room_for_sockets() -> str:
    """The temporary folder; another one if its path is too long for sockets below it."""
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp"):
        if len(os.fsencode(folder)) + _BELOW <= _LONGEST and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise RankError(
        f"the temporary folder {usual} is too long for sockets, and /tmp cannot be written; "
        f"set TMPDIR to a folder whose path has at most {_LONGEST - _BELOW} bytes"
    )


@atexit.register
def _close_all() -> None:
    for key in [key for key in _zygotes if key[0] == os.getpid()]:
        _zygotes.pop(key).close()
    remove_scratch()


def remove_scratch() -> None:
    """Remove the temporary folder of this process, if it has one."""
    folder = _folders.pop(os.getpid(), None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
        tender = _tenders.pop(folder, None)
        if tender is not None:
            tender.communicate()  # (it ends with its pipe)
