"""A rank as a fresh interpreter, where forking is not wanted: slower to start, otherwise the same.

    main([CONTROL, LIFE, DRIVER_PID, TIE])

LIFE is the read end of a pipe that the driver holds open. On Linux it is asynchronous: when the driver ends, however it
ends, the system signals this rank's whole process group, and the default action of that signal is to end it. That needs
no thread, reaches ranks that are busy in native code, and (unlike TIE, see zygote.py) does not depend on which of the
driver's threads started the rank. Elsewhere that signal is ignored by default: a small process waits for the end of the
pipe.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys

from minipar.cluster import worker
from minipar.cluster.light_torch import postpone_compiler
from minipar.cluster.processes import die_with_parent, yield_to_others


def main(arguments: list[str]) -> None:
    control, life, driver = (int(argument) for argument in arguments[:3])
    if arguments[3] == "1":
        die_with_parent(driver)
    if sys.platform == "linux":
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpid())  # negative: the process group; this process leads its session
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        _guard(life, control)
    if os.getppid() != driver:
        return  # the driver ended before the pipe was armed
    yield_to_others()
    postpone_compiler()
    worker.serve(socket.socket(fileno=control))


def _guard(life: int, control: int) -> None:
    """Fork a process that kills this rank's process group, itself included, when the pipe ends. (Nothing that a fork
    would disturb is imported yet.)"""
    if os.fork():
        os.close(life)
        return
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for descriptor in (control, 1, 2):  # by their ends the driver sees that the rank has ended
            os.close(descriptor)
        os.read(life, 1)
        os.killpg(0, signal.SIGKILL)
    finally:
        os._exit(70)
