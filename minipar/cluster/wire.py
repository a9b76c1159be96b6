"""Messages over a Unix stream socket: an 8-byte length, then a pickle.

The envelope of every message is a tuple of plain values. What users made (functions, results, exceptions) travels
inside it as bytes or as a parcel, so that an envelope can always be read, even if its contents cannot. The memory file
of a parcel (at most one in a message) travels as a descriptor together with the length.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

from minipar.cluster.parcel import MemoryFile, Parcel

_LENGTH = struct.Struct("!Q")
_SHORT = struct.Struct("!i")
_DESCRIPTOR = struct.Struct("@i")
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def prove(sock: socket.socket, key: bytes, seconds: float, asks_first: bool) -> Timed:
    """Let both ends prove that they know the key, by an HMAC of the other's random number, before anything else is
    read; what both say next is by the same clock. One end asks first, the other one answers first. OSError."""
    timed: Any = Timed(sock, seconds)
    try:
        for step in (deliver_challenge, answer_challenge)[:: 1 if asks_first else -1]:
            step(timed, key)
    except (EOFError, AssertionError, AuthenticationError) as error:
        raise ConnectionError(str(error) or "it ended") from error
    return timed


class Timed:
    """A socket as the functions of multiprocessing.connection need it. All of it has to be done in so many seconds:
    else OSError."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock, self._deadline = sock, time.monotonic() + seconds

    def send_bytes(self, data: bytes) -> None:
        self._wait()
        self._sock.sendall(_SHORT.pack(len(data)) + data)

    def recv_bytes(self, most: int) -> bytes:
        (size,) = _SHORT.unpack(self._exactly(_SHORT.size))
        if not 0 <= size <= most:
            raise OSError("this is no such message")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._wait()
            part = self._sock.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long")
        self._sock.settimeout(left)


def keep_alive(sock: socket.socket, times: int = 4) -> None:
    """Send short messages at once. After two seconds without a byte, ask the other host every second whether it is
    there; after so many times without an answer it is cut off."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"IDLE": 2, "ALIVE": 2, "INTVL": 1, "CNT": times}.items():
        if (option := getattr(socket, f"TCP_KEEP{name}", None)) is not None:  # (systems differ)
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def look_while_sending(sock: socket.socket) -> None:
    """Let `send` on this socket call its `look` when there is no room for a tenth of a second."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 100_000))


def send(sock: socket.socket, message: Any, look: Callable[[], None] = lambda: None) -> None:
    """Write one message; blocks until the kernel has taken all of it. OSError when the other end is gone. `look` is
    called from time to time while it blocks, and may raise an error: then the socket is of no use any more."""
    data = pickle.dumps(message, protocol=5)
    header = _LENGTH.pack(len(data))
    parcels = [part for part in message if isinstance(part, Parcel)] if isinstance(message, tuple) else []
    for segment in [parcel.segment for parcel in parcels if parcel.segment is not None]:
        while len(header) == _LENGTH.size:
            try:
                header = header[socket.send_fds(sock, [header], [segment.descriptor]) :]
            except BlockingIOError:
                look()
    _send_all(sock, header, look)
    _send_all(sock, data, look)


def _send_all(sock: socket.socket, data: bytes, look: Callable[[], None]) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            look()


def receive(sock: socket.socket) -> Any:
    """Read one message; blocks until it is complete. EOFError when the other end is gone."""
    return Inbox(sock).read(blocking=True)


class Inbox:
    """Reads messages piece by piece, never past the end of the message it is on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._segment: MemoryFile | None = None  # of the message it is on; closes itself when that is never completed
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
                    count = self._read_into(memoryview(self._buffer)[self._filled :], flags)
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
                return self._complete()

    def _read_into(self, rest: memoryview, flags: int) -> int:
        if not self._header:
            return self._sock.recv_into(rest, 0, flags)
        count, beside, _, _ = self._sock.recvmsg_into(
            [rest], socket.CMSG_SPACE(_DESCRIPTOR.size), flags | _CLOSED_ON_EXEC
        )
        for level, kind, data in beside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._segment = MemoryFile(*_DESCRIPTOR.unpack(data))
        return count

    def _complete(self) -> Any:
        buffer, segment, self._segment = self._buffer, self._segment, None
        self._start(_LENGTH.size, header=True)
        message = pickle.loads(buffer)
        if segment is None:
            return message
        return tuple(replace(part, segment=segment) if isinstance(part, Parcel) else part for part in message)
