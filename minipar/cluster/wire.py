"""Messages over a stream socket: an 8-byte length, then a pickle.

The envelope of every message is a tuple of plain values. What users made (functions, results, exceptions) travels
inside it as bytes that cloudpickle wrote, so that an envelope can always be read even where its contents cannot.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_SMALL = 1 << 16  # below this one copy is cheaper than a second system call


def send(sock: socket.socket, message: Any) -> None:
    """Write one message; blocks until the kernel has taken all of it. OSError when the other end is gone."""
    data = pickle.dumps(message, protocol=5)
    header = _LENGTH.pack(len(data))
    if len(data) < _SMALL:
        sock.sendall(header + data)
    else:
        sock.sendall(header)
        sock.sendall(data)


def receive(sock: socket.socket) -> Any:
    """Read one message; blocks until it is complete. EOFError when the other end is gone."""
    inbox = Inbox(sock)
    while True:
        message = inbox.read(blocking=True)
        if message is not None:
            return message


class Inbox:
    """Reads messages piece by piece, never past the end of the message it is on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._start(_LENGTH.size, header=True)

    def _start(self, size: int, header: bool) -> None:
        self._buffer = bytearray(size)
        self._filled = 0
        self._header = header

    def read(self, blocking: bool = False) -> Any | None:
        """The next message if it is complete, else None. EOFError when the other end is gone."""
        flags = 0 if blocking else socket.MSG_DONTWAIT
        while True:
            while self._filled < len(self._buffer):
                try:
                    count = self._sock.recv_into(memoryview(self._buffer)[self._filled :], 0, flags)
                except (BlockingIOError, InterruptedError):
                    return None
                except ConnectionError as error:
                    raise EOFError from error
                if count == 0:
                    raise EOFError
                self._filled += count
            if self._header:
                self._start(_LENGTH.unpack(self._buffer)[0], header=False)
            else:
                message = pickle.loads(self._buffer)
                self._start(_LENGTH.size, header=True)
                return message
