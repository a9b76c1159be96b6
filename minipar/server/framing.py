"""Messages of the parameter server: a fixed header, then raw bytes, over Unix or TCP sockets, after mutual proofs.

    server -> client   32 random bytes                       nothing else is read before the proof;
    client -> server   32 random bytes | proof               a proof is the HMAC-SHA256 of both numbers under the token
    server -> client   proof
    both               header (what, key, worker, step, version, number, bytes, two reals) | bytes ...

Nothing that a peer sends is unpickled or evaluated: payloads are tensors' bytes, which are read straight into memory of
their size, and short texts.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from minipar.cluster import stacks
from minipar.comm.transport.sockets import keep_alive

HEADER = struct.Struct("<iiiqqqqdd")
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end of a Unix socket: process, user, group
NONCE = PROOF = 32
_BUFFER = 4 << 20  # bytes that are requested; the kernel gives what its limits allow
MOST_TEXT = 1 << 16  # bytes of a text


class What(IntEnum):
    HELLO = 1  # client: who it is, a worker or (`key`) a server; its bytes are the digest of the keys that it expects
    WELCOME = 2  # server: it knows the client now
    PUSH = 3  # worker: its part of one key's gradient
    PULL = 4  # worker to server 0: it has done a step, and asks for the parameters of the next one
    ANSWER = 5  # a server's parameters
    LEAVE = 6  # worker to server 0
    REFUSED = 7  # server: the reason (text), before it closes the connection
    CLOSED = 8  # server: it has ended
    HAVE = 9  # other server to server 0: a step's gradient is whole here
    ROW = 10  # server 0 to the others: the next row of the order
    FORGET = 11  # server 0 to the others: a worker began anew; its earlier gradient does not count
    NORM = 12  # other server to server 0: the squares of its part of an update's gradient; and the answer: of all parts


FROM_WORKERS = frozenset((What.PULL, What.LEAVE))  # these have no bytes, like those between servers
BETWEEN_SERVERS = frozenset((What.HAVE, What.ROW, What.FORGET, What.CLOSED, What.NORM))


class Message(NamedTuple):
    """A header. `number` is of a PUSH all rows of the step, of which `version` are the worker's; otherwise the worker's
    session. `lasts` is of a NORM the sum of the squares.

    On emulated links `moment` says when a message begins to arrive, or was sent (0: with the message before), and
    `lasts` for how many seconds the link is busy with it.
    """

    what: int
    key: int = 0
    worker: int = 0
    step: int = 0
    version: int = 0
    number: int = 0
    size: int = 0
    moment: float = 0.0
    lasts: float = 0.0

    def parts(self, data: memoryview | bytes = b"") -> list[memoryview]:
        """What goes through the socket: the header, and these bytes."""
        header = HEADER.pack(*self._replace(size=len(data)))
        return [memoryview(header), memoryview(data)] if len(data) else [memoryview(header)]


def rest_of(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of some bytes when the first `done` of them are sent."""
    rest = []
    for part in parts:
        if done < len(part):
            rest.append(part[done:])
        done = max(0, done - len(part))
    return rest


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def place_of(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """What an address means: "unix:PATH" or "tcp:HOST:PORT"."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port))


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address that it has got: a Unix socket is made anew, and port 0 is any that is
    free."""
    family, place = place_of(address)
    if isinstance(place, str):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(place)
        listener = socket.socket(family)
        listener.bind(place)
        os.chmod(place, 0o600)
        listener.listen(128)
    else:
        listener = socket.create_server(place, family=family, backlog=128)
        address = f"tcp:{place[0]}:{listener.getsockname()[1]}"
    listener.setblocking(False)
    return listener, address


def prepare(connection: socket.socket) -> None:
    """Give a socket large buffers; over TCP also no delay, and an end when the other host is gone."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):  # macOS gives nothing where Linux gives what its limits allow
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    if connection.family != socket.AF_UNIX:
        keep_alive(connection)


def process_behind(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket; 0 where it cannot be known, as over TCP and on macOS."""
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return 0
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[0])


def at_work(process: int) -> bool:
    """Whether a process of this machine exists and was not stopped: then it goes on, however long it computes."""
    return stacks.cpu_and_state(process)[1] not in ("", "T", "t", "Z", "X", "x")


def proof(token: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token, side + first + second, hashlib.sha256).digest()
