"""A rank as a fresh interpreter, where forking is not wanted: slower to start, otherwise the same.

    python -m minipar.cluster.spawned CONTROL LIFE DRIVER_PID TIE

LIFE is the read end of a pipe that the driver holds open. It is asynchronous: when the driver ends, however it ends,
the system signals this rank's whole process group, and the default action of that signal is to end it. That needs no
thread, reaches ranks that are busy in native code, and (unlike TIE, see zygote.py) does not depend on which thread of
the driver started the rank.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys

from minipar.cluster import worker
from minipar.cluster.light_torch import postpone_compiler
from minipar.cluster.processes import die_with_parent, yield_to_others


def main(arguments: list[str]) -> None:
    control, life, driver = (int(argument) for argument in arguments[:3])
    if arguments[3] == "1":
        die_with_parent(driver)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpid())  # negative: the process group; this process leads its session
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if os.getppid() != driver:
        return  # the driver ended before the pipe was armed
    yield_to_others()
    postpone_compiler()
    worker.serve(socket.socket(fileno=control))


if __name__ == "__main__":
    main(sys.argv[1:])
