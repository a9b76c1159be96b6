"""The helper process that ranks are forked from: it imported modules, torch first of all, and ran nothing.

Every driver process has its own. A fork of it takes milliseconds, where a fresh interpreter takes seconds. It is safe,
unlike a fork of the notebook's kernel: no thread pool was ever started here, and CUDA was never used.

    main([SOCKET, SPARE, DRIVER_PID, FOLDER, TIE])

The socket (SEQPACKET) carries requests (number, what, ...), and answers (number, answer) to two of them:

    "fork", modules, and three descriptors -> the pid of a rank, or an OSError
    "status", pid -> its exit status, None if it has not ended        "kill", pid        "signal", pid, its number
    "end": the driver has other helpers, which use FOLDER

The modules are imported first: what the driver has of this package, and of torch.export, its ranks will need, and here
it is imported once for all of them. TIE is 1 where Linux may tie this process to the driver's thread. When the driver
is gone, all ranks are killed and FOLDER is removed.

SPARE is a socket, too. Before anything else is imported here, one process is forked that waits at it for the path of a
script and for three descriptors, its standard streams, and then runs the script with the socket's number. The driver
uses it for plain torch (training/plainly.py), which would take as long as torch's import to start otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import runpy
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from functools import partial

from minipar.cluster import worker
from minipar.cluster.light_torch import postpone_compiler
from minipar.cluster.processes import (
    die_with_parent,
    ends,
    kill_group,
    open_standard_streams,
    readable,
    yield_to_others,
)

PRELOAD = ("torch", "torch.distributed")
LONGEST = 1 << 16  # bytes of a message


def main(arguments: list[str]) -> None:
    driver, folder = int(arguments[2]), arguments[3]
    open_standard_streams()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    if arguments[4] == "1":
        die_with_parent(driver, signal.SIGTERM)  # not SIGKILL: it must first end the ranks' own children
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, spare = (socket.socket(fileno=int(number)) for number in arguments[:2])
    children: set[int] = set()
    goes_on = False
    try:
        gc.disable()  # until the modules are here: a fifth of their import would be spent on collections
        for module in PRELOAD:
            importlib.import_module(module)
        postpone_compiler()
        _freeze()
        children.add(_fork(partial(_run_script, spare, control)))
        spare.close()
        _send(control, 0, [*children])
        goes_on = _serve(control, driver, children)
    except (ImportError, OSError) as error:  # an OSError: the driver has ended while it was answered
        with contextlib.suppress(OSError):
            _send(control, 0, f"{type(error).__name__}: {error}")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in children:
            kill_group(pid)
        # A driver that is killed may still be there: Linux sends the signal at the end of the thread that started this
        # process, and the driver's other threads can take a moment longer.
        if not goes_on and (os.getppid() != driver or ends(driver, 2)):
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # (torch needs no clean-up here, and the driver may be waiting)


def _run_script(spare: socket.socket, control: socket.socket) -> None:
    """In the spare process: wait for a script and run it, as a fresh interpreter would that has imported torch."""
    control.close()
    path, descriptors, _, _ = socket.recv_fds(spare, LONGEST, 3)
    if not path:
        return  # the driver is gone
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = worker.streams()
    for name in [name for name in sys.modules if name.partition(".")[0] == "minipar"]:
        del sys.modules[name]
    sys.argv = [path.decode(), str(spare.fileno())]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _freeze() -> None:
    """What is here is collected no more: that would copy every page in each rank. What imports leave behind is little,
    and looking for it takes as long as a tenth of them."""
    gc.freeze()
    gc.enable()


def _import(modules: list[str]) -> None:
    if not modules:
        return
    gc.disable()
    for module in modules:
        with contextlib.suppress(Exception):  # a rank that needs it will say what is wrong with it
            importlib.import_module(module)
    _freeze()


def _send(control: socket.socket, number: int, answer: object) -> None:
    control.sendall(pickle.dumps((number, answer)))


def _serve(control: socket.socket, driver: int, children: set[int]) -> bool:
    """Do what the driver asks for until it is gone; whether it goes on without this process."""
    watched = [control.fileno()]
    with contextlib.suppress(AttributeError, OSError):
        watched.append(os.pidfd_open(driver))  # (a process that the driver forked may keep its socket open)
    while readable(watched) == watched[:1]:
        data, descriptors, _, _ = socket.recv_fds(control, LONGEST, 3)
        if not data:
            break
        number, what, *given = pickle.loads(data)
        if what == "end":
            return True
        if what == "fork":
            _import(given[0])
            try:
                pid = _fork(partial(_be_rank, descriptors, watched))
            except OSError as error:  # (the ranks that are there go on)
                _send(control, number, error)
            else:
                children.add(pid)
                _send(control, number, pid)
            for descriptor in descriptors:
                os.close(descriptor)
        elif what == "status":
            _send(control, number, _status(given[0], children))
        elif given[0] in children:  # (a pid that was reaped may be another process's)
            kill_group(given[0]) if what == "kill" else os.kill(*given)
    return False


def _status(pid: int, children: set[int]) -> int | None:
    if pid not in children or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    kill_group(pid)  # while the zombie still has the pid: this kills everything that the rank had started
    children.remove(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(run: Callable[[], None]) -> int:
    """A child that runs this and ends."""
    zygote = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: numpy's BLAS has one, but handles forks
        pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        die_with_parent(zygote)
        run()
    finally:
        os._exit(70)  # (it must never return to the loop of the zygote)


def _be_rank(descriptors: list[int], closing: list[int]) -> None:
    yield_to_others()
    control, out, err = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in (out, err, *closing):
        os.close(descriptor)
    worker.serve(socket.socket(fileno=control))
