"""Messages of the parameter server: a fixed header, then raw bytes, over Unix or TCP sockets, after mutual proofs.

    server -> client   32 random bytes                       nothing else is read before the proof;
    client -> server   32 random bytes | proof               a proof is the HMAC-SHA256 of both numbers under the token
    server -> client   proof
    both               header (what, key, worker, step, version, number, bytes, times) | bytes ...

Nothing that a peer sends is unpickled or evaluated: payloads are tensors' bytes, which are read straight into memory of
their size, and small JSON texts. TCP_NODELAY is set: else a header would wait for the acknowledgement of the message
before (44 ms).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import os
import socket
import struct
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from minipar.cluster import stacks

HEADER = struct.Struct("<iiiqqqqqq")
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end of a Unix socket: process, user, group
NONCE = PROOF = 32
_BUFFER = 4 << 20  # bytes that are requested; the kernel gives what its limits allow
_STAGE = 1 << 14  # bytes that are received before it is known where they belong
MOST_TEXT = 1 << 16  # bytes of a text


class What(IntEnum):
    HELLO = 1  # client: who it is (JSON)
    WELCOME = 2  # server: the number of its incarnation
    PUSH = 3  # worker: its part of one key's gradient
    ACK = 4  # worker to server 0: request to say when this step's gradient is at all servers; and the answer
    PULL = 5  # worker to server 0
    ANSWER = 6  # a server's parameters
    LEAVE = 7  # worker to server 0
    REFUSED = 8  # server: the reason (text), before it closes the connection
    CLOSED = 9  # server: it has ended
    HAVE = 10  # other server to server 0: a step's gradient is whole here
    ROW = 11  # server 0 to the others: the next row of the order
    SAVE = 12  # server 0 to the others: write a snapshot
    SAVED = 13  # other server to server 0: the snapshot is on the disk
    RESTORE = 14  # server 0 to the others: go back to a snapshot
    FORGET = 15  # server 0 to the others: a worker began anew; its earlier gradients count only if they are whole
    PART = 17  # a server's parameters of one group, where each is served by itself
    NORM = 16  # other server to server 0: the squares of its part of an update's gradient; and the answer: of all parts


PUSH = What.PUSH  # (a global name is found faster than a member of an Enum)
FROM_WORKERS = frozenset((What.PULL, What.ACK, What.LEAVE))  # these have no bytes, like those between servers
BETWEEN_SERVERS = frozenset((What.HAVE, What.ROW, What.SAVE, What.SAVED, What.FORGET, What.CLOSED, What.NORM))


class Message(NamedTuple):
    what: int
    key: int = 0
    worker: int = 0
    step: int = 0
    version: int = 0
    number: int = 0
    size: int = 0
    moment: int = 0  # on emulated links, in ns: when it begins to arrive, or was sent; 0: with the message before
    lasts: int = 0  # on emulated links, in ns: how long the link is busy with it


def nanoseconds(moment: float) -> int:
    """A time as a message carries it."""
    return round(moment * 1e9)


def bits_of(value: float) -> int:
    """A number with all its digits, as a message carries it."""
    return int(struct.unpack("!q", struct.pack("!d", value))[0])


def number_of(bits: int) -> float:
    """A number that a message carried."""
    return float(struct.unpack("!d", struct.pack("!q", bits))[0])


def seconds(moment: int) -> float:
    """A time that a message carried."""
    return moment / 1e9


class Stage:
    """Bytes that were received and not used yet: one call can receive several short messages."""

    def __init__(self, ahead: bytes = b"") -> None:
        self.memory = memoryview(bytearray(max(_STAGE, len(ahead))))
        self.start, self.stop = 0, len(ahead)
        self.memory[: self.stop] = ahead

    def __len__(self) -> int:
        return self.stop - self.start

    def room(self) -> memoryview:
        """Memory for more bytes, behind those that are there."""
        if not self.start and not self.stop:
            return self.memory
        rest = self.stop - self.start
        self.memory[:rest] = self.memory[self.start : self.stop]
        self.start, self.stop = 0, rest
        return self.memory[rest:]

    def header(self) -> Message:
        """Take a header, all of which must be there."""
        start = self.start
        self.start += HEADER.size
        return Message(*HEADER.unpack_from(self.memory, start))

    def take(self, into: memoryview) -> int:
        """Take the bytes that are there, at most as many as fit in `into`; returns how many."""
        size = min(len(into), self.stop - self.start)
        into[:size] = self.memory[self.start : self.start + size]
        self.start += size
        return size

    def rest(self) -> bytes:
        return bytes(self.memory[self.start : self.stop])


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address that it has got. `address`: "unix:PATH" (made anew), or "tcp:HOST:PORT", of
    which the port 0 is any that is free."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(rest)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(rest)
        os.chmod(rest, 0o600)
    else:
        host, _, port = rest.rpartition(":")
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        address = f"tcp:{host}:{listener.getsockname()[1]}"
    listener.listen(128)
    listener.setblocking(False)
    return listener, address


def prepare(connection: socket.socket) -> None:
    """Give a socket large buffers; over TCP also no delay, and an end when the other host is gone."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):  # macOS gives nothing where Linux gives what its limits allow
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def process_behind(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket; 0 where it cannot be known, as over TCP and on macOS."""
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return 0
    found: tuple[int, int, int] = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return found[0]


def at_work(process: int) -> bool:
    """Whether a process of this machine exists and was not stopped: then it goes on, however long it computes."""
    return stacks.cpu_and_state(process)[1] not in ("", "T", "t", "Z", "X", "x")


def proof(token: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token, side + first + second, hashlib.sha256).digest()
