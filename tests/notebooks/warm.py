"""Kernels of notebooks, forked from a process that has imported torch and what else lessons need:

    pytest -p tests.notebooks.warm lessons/03_checkpointing.ipynb

A plugin for pytest beside nbval, for parts of `make test` with many notebooks. A kernel that is started as a user's is
imports for five seconds of a core, and the helper that its ranks are forked from for two more; a fork takes
milliseconds. Each notebook still has a kernel of its own, and ranks of its own. Without the plugin nbval starts kernels
as ever.

The process is multiprocessing's fork server. It ends with this one, and a kernel ends with it. Before a kernel becomes
one, while it has a single thread, it forks a process that waits to become the helper of its ranks (`zygote.py`): only
this one kernel can ask it, with what subprocess.Popen would be given.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from types import SimpleNamespace
from typing import Any

import pytest

from minipar.cluster import launch, zygote
from minipar.cluster.processes import die_with_parent

TUNABLES = "GLIBC_TUNABLES"  # glibc reads it when a process starts: a fork has its parent's


def pytest_configure() -> None:
    """Start the process, and let jupyter_client, which nbval brings, fork kernels from it."""
    from jupyter_client.provisioning import local_provisioner

    forkserver.set_forkserver_preload(["tests.notebooks.imports"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TUNABLES, settings := launch.settings_of_glibc(True))
        forkserver.ensure_running()
    as_ever = local_provisioner.launch_kernel

    def launch_kernel(command: list[str], **given: Any) -> Any:
        if "ipykernel_launcher" not in command:
            return as_ever(command, **given)
        arguments = command[command.index("ipykernel_launcher") + 1 :]
        return Kernel(arguments, given["env"], given.get("cwd") or os.getcwd(), settings)

    local_provisioner.launch_kernel = launch_kernel


class Kernel:
    """A forked kernel, as jupyter_client sees it: a subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, *arguments: Any) -> None:
        self._process = get_context("forkserver").Process(target=_be_kernel, args=arguments)
        self._process.start()
        self.pid = self._process.pid or 0
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # (its group will be killed)
            time.sleep(0.001)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.poll()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _be_kernel(arguments: list[str], environment: dict[str, str], folder: str, settings: str) -> None:
    """What `python -m ipykernel_launcher ARGUMENTS` does in a folder."""
    from ipykernel.kernelapp import IPKernelApp

    _begin(os.getppid())
    os.environ.clear()
    os.environ.update({**environment, "JPY_PARENT_PID": str(os.getppid())})
    os.chdir(folder)
    sys.path[:] = ["", *(entry for entry in sys.path if entry != "")]
    # Plain torch has an interpreter of its own: a fork of this process has operators of the package, which can be
    # registered once only.
    launch.take_spare = lambda *_: None  # type: ignore[assignment]
    launch.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _first_forked(settings)})
    IPKernelApp.launch_instance(argv=arguments)


def _begin(parent: int) -> None:
    """Become a process with a group and streams of its own, that ends with its parent."""
    die_with_parent(parent)
    os.setsid()
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)


def _first_forked(settings: str) -> Callable[..., Any]:
    """subprocess.Popen, but for the first helper with these settings of glibc, which waits from now on."""
    ours, theirs = socket.socketpair()
    kernel, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            ours.close()
            _begin(kernel)
            data, descriptors, _, _ = socket.recv_fds(theirs, 1 << 16, 2)
            if data:
                arguments, environment = pickle.loads(data)
                os.environ.clear()
                os.environ.update(environment)
                theirs.close()
                zygote.main([*map(str, descriptors), *arguments])
        finally:
            os._exit(0)
    theirs.close()
    waiting = [ours]

    def popen(command: list[str], **given: Any) -> Any:
        descriptors = given.get("pass_fds", ())
        if len(descriptors) != 2 or given["env"].get(TUNABLES, "") != settings or os.getpid() != kernel or not waiting:
            return subprocess.Popen(command, **given)
        message = pickle.dumps((command[-3:], given["env"]))
        with waiting.pop() as control:
            socket.send_fds(control, [message], descriptors)
        return Helper(pid)

    return popen


class Helper:
    """A forked child of this process, as its user sees it: a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        watched = os.pidfd_open(self.pid)
        try:
            if not select.select([watched], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("helper", timeout or 0)
        finally:
            os.close(watched)
        return self.poll()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
