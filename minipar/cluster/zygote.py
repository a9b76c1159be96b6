"""The helper process that ranks are forked from: it imported modules, torch first of all, and ran nothing.

Every driver process has its own. A fork of it takes milliseconds, where a fresh interpreter takes seconds. It is safe,
unlike a fork of the notebook's kernel: no thread pool was ever started here, and CUDA was never used.

    main([SOCKET, SPARE, DRIVER_PID, FOLDER, TIE])

The socket (SEQPACKET) carries ("fork", number, modules) with three descriptors -> ("forked", number, pid) or
("no fork", number, errno), ("kill", pid), ("signal", pid, number), and ("exit", pid, status) as ranks end. The modules
are imported first: what the driver has of this package, and of torch.export, its ranks will need, and here it is
imported once for all of them. TIE is 1 where Linux may tie this process to the driver's thread. When the driver is
gone, all ranks are killed and FOLDER is removed. When the driver says ("end",), the ranks are killed, but it has other
helpers that use FOLDER.

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
import select
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from functools import partial

from minipar.cluster import worker
from minipar.cluster.light_torch import postpone_compiler
from minipar.cluster.processes import die_with_parent, ends, kill_group, open_standard_streams, yield_to_others

PRELOAD = ("torch", "torch.distributed")
LONGEST = 1 << 16  # bytes of a message


def main(arguments: list[str]) -> None:
    driver, folder = int(arguments[2]), arguments[3]
    open_standard_streams()
    # From now on, since the imports below take a second.
    signal.signal(signal.SIGTERM, lambda *_: _leave(driver, folder))
    if arguments[4] == "1":
        die_with_parent(driver, signal.SIGTERM)  # not SIGKILL: it must first end the ranks' own children
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, spare = (socket.socket(fileno=int(number)) for number in arguments[:2])
    gc.disable()  # until the modules are here: a fifth of their import would be spent on collections
    try:
        for module in PRELOAD:
            importlib.import_module(module)
        postpone_compiler()
    except ImportError as error:
        _send(control, ("failed", f"{type(error).__name__}: {error}"))
        return
    _freeze()

    def wait_for_script() -> None:
        control.close()
        _run_script(spare)

    pid = _fork(wait_for_script)
    spare.close()
    _send(control, ("ready", pid))
    _serve(control, driver, folder, {pid})


def _leave(driver: int, folder: str) -> None:
    """End this process, and remove the driver's folder if the driver can do so no more.

    A driver that is killed may still be there when this process hears of it: Linux sends the signal at the end of the
    thread that started this process, and the driver's other threads can take a moment longer.
    """
    if os.getppid() != driver or ends(driver, 2):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # (torch needs no clean-up here, and the driver may be waiting)


def _run_script(spare: socket.socket) -> None:
    """In the spare process: wait for a script and run it, as a fresh interpreter would that has imported torch."""
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


def _send(control: socket.socket, message: tuple[object, ...]) -> None:
    control.sendall(pickle.dumps(message))


def _serve(control: socket.socket, driver: int, folder: str, children: set[int]) -> None:
    wake_read, wake_write = socket.socketpair()
    for end in (wake_read, wake_write):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ended: list[int] = []
    dismissed = False
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))  # (and select returns)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    watched: list[int] = [control.fileno(), wake_read.fileno()]
    try:
        # The socket may stay open in a process that the driver forked, so watch the driver itself as well.
        gone = os.pidfd_open(driver)
        watched.append(gone)
    except (AttributeError, OSError):
        gone = -1
    try:
        while True:
            ready, _, _ = select.select(watched, [], [])
            if gone in ready or ended:
                return
            if wake_read.fileno() in ready:
                wake_read.recv(4096)
                _reap(control, children)
            if control.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(control, LONGEST, 3)
                if not data:
                    return
                message = pickle.loads(data)
                if message[0] == "end":
                    dismissed = True
                    return
                if message[0] == "fork":
                    _import(message[2])
                    closing = [control.fileno(), wake_read.fileno(), wake_write.fileno(), gone]
                    try:
                        pid = _fork(partial(_be_rank, descriptors, closing))
                    except OSError as error:  # (the ranks that are there go on)
                        _send(control, ("no fork", message[1], error.errno))
                        continue
                    finally:
                        for descriptor in descriptors:
                            os.close(descriptor)
                    children.add(pid)
                    _send(control, ("forked", message[1], pid))
                elif message[1] in children and message[0] == "kill":
                    kill_group(message[1])
                elif message[1] in children:
                    os.kill(message[1], message[2])
    except OSError:
        pass  # the driver ended while it was answered
    finally:
        for pid in children:
            kill_group(pid)
        if dismissed:
            os._exit(0)
        _leave(driver, folder)


def _reap(control: socket.socket, children: set[int]) -> None:
    for pid in list(children):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            continue
        kill_group(pid)  # while the zombie still has the pid: this kills everything that the rank had started
        _, status = os.waitpid(pid, 0)
        children.remove(pid)
        _send(control, ("exit", pid, os.waitstatus_to_exitcode(status)))


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
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run()
    finally:
        os._exit(70)  # (it must never return to the loop of the zygote)


def _be_rank(descriptors: list[int], closing: list[int]) -> None:
    yield_to_others()
    control, out, err = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    for descriptor in (out, err, *closing):
        if descriptor >= 0:
            os.close(descriptor)
    worker.serve(socket.socket(fileno=control))
