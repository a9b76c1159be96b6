"""Messages of the parameter server: a fixed header, then raw bytes, over Unix or TCP sockets that prove who they are.

    server -> client   32 random bytes                       nothing else is read before the proof;
    client -> server   32 random bytes | proof               a proof is the HMAC-SHA256 of both numbers under the token
    server -> client   proof
    both               header (what, key, worker, step, version, number, bytes) | bytes ...

Nothing that a peer sends is unpickled or evaluated: payloads are tensors' bytes, straight into memory that is there,
and small JSON texts. TCP_NODELAY, or a header would wait for the acknowledgement of the message before (44 ms).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from minipar.errors import RankError

_HEADER = struct.Struct("<iiiqqqq")
_NONCE = _PROOF = 32
_BUFFER = 4 << 20  # asked for; the kernel gives what its limits allow
_STAGE = 1 << 14  # bytes that are taken in before it is known where they belong
_PIECES = 16  # of what waits to be written, in one call
_AT_ONCE = 64  # messages read from one connection before the others have their turn
MOST_TEXT = 1 << 16  # bytes of a text


class What(IntEnum):
    HELLO = 1  # client: who it is (JSON)
    WELCOME = 2  # server: the number of its incarnation
    PUSH = 3  # worker: its part of one key's gradient
    ACK = 4  # worker to server 0: tell me when this step's gradient is at all servers; and the answer
    PULL = 5  # worker to server 0
    ANSWER = 6  # a server's parameters
    LEAVE = 7  # worker to server 0
    REFUSED = 8  # server: why (text), before it closes the connection
    CLOSED = 9  # server: it has ended
    HAVE = 10  # other server to server 0: a step's gradient is whole here
    ROW = 11  # server 0 to the others: the next line of the order
    SAVE = 12  # the same: write a snapshot
    SAVED = 13  # other server to server 0: it is on the disk
    RESTORE = 14  # server 0 to the others: go back to a snapshot
    FORGET = 15  # the same: a worker began anew; what it pushed before and is not known whole is void


PUSH = What.PUSH  # (a name of its own is found faster than a member)
FROM_WORKERS = frozenset((What.PUSH, What.PULL, What.ACK, What.LEAVE))
BETWEEN_SERVERS = frozenset((What.HAVE, What.ROW, What.SAVE, What.SAVED, What.FORGET, What.CLOSED))


class Message(NamedTuple):
    what: int
    key: int = 0
    worker: int = 0
    step: int = 0
    version: int = 0
    number: int = 0
    size: int = 0


class Stage:
    """Bytes that have come and were not taken yet: short messages come whole, and several of them, in one call."""

    def __init__(self, ahead: bytes = b"") -> None:
        self.memory = memoryview(bytearray(max(_STAGE, len(ahead))))
        self.start, self.stop = 0, len(ahead)
        self.memory[: self.stop] = ahead

    def __len__(self) -> int:
        return self.stop - self.start

    def room(self) -> memoryview:
        """Where more can come, after what is there."""
        if not self.start and not self.stop:
            return self.memory
        rest = self.stop - self.start
        self.memory[:rest] = self.memory[self.start : self.stop]
        self.start, self.stop = 0, rest
        return self.memory[rest:]

    def header(self) -> Message:
        """Take a header, which is there."""
        start = self.start
        self.start += _HEADER.size
        return Message(*_HEADER.unpack_from(self.memory, start))

    def take(self, into: memoryview) -> int:
        """Take what is there, at most so much; how much it was."""
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


def listen(address: str) -> socket.socket:
    """A listening socket. `address`: "unix:PATH" (made anew), or "tcp:HOST:PORT"."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(rest)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(rest)
    else:
        host, _, port = rest.rpartition(":")
        listener = socket.socket(socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
    listener.listen(128)
    listener.setblocking(False)
    return listener


def prepare(connection: socket.socket) -> None:
    """Large buffers; over TCP no delay, and an end when the other host is gone."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _proof(token: bytes, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token, side + first + second, hashlib.sha256).digest()


# the client's side: it waits ------------------------------------------------------------------------------------------


class Line:
    """A client's connection: sends and receives wait until they are done. ConnectionError when the server is gone."""

    def __init__(self, address: str, token: bytes, seconds: float) -> None:
        kind, _, rest = address.partition(":")
        if kind == "unix":
            self.socket, place = socket.socket(socket.AF_UNIX), rest
        else:
            host, _, port = rest.rpartition(":")
            self.socket, place = socket.socket(socket.AF_INET), (host, int(port))  # type: ignore[assignment]
        prepare(self.socket)
        self.stage = Stage()
        self._have = 0  # bytes of a message that are where they belong
        try:
            self.socket.settimeout(seconds)
            self.socket.connect(place)
            theirs, mine = bytes(self._exactly(_NONCE)), os.urandom(_NONCE)
            self.socket.sendall(mine + _proof(token, b"client", theirs, mine))
            if not hmac.compare_digest(self._exactly(_PROOF), _proof(token, b"server", mine, theirs)):
                raise RankError(f"the server at {address} does not know the token; it is another one's")
        except BaseException:
            self.socket.close()
            raise
        self.wait(None)

    def wait(self, seconds: float | None) -> None:
        """How long a send or receive may take; TimeoutError, a ConnectionError's brother, afterwards. None: for ever.

        (A blocking socket is a little faster than one with a timeout, which asks before every call.)
        """
        self.socket.settimeout(seconds)

    def send(self, message: Message, data: memoryview | bytes = b"") -> None:
        header = _HEADER.pack(*message[:-1], len(data))
        try:
            if not len(data):
                self.socket.sendall(header)
                return
            done = self.socket.sendmsg([header, data])
            if done < len(header):
                self.socket.sendall(header[done:])
                done = len(header)
            if done < len(header) + len(data):
                self.socket.sendall(memoryview(data)[done - len(header) :])
        except TimeoutError as error:
            raise ConnectionError("the server does not take what it is sent") from error

    def receive(self, into: memoryview | None = None) -> Message:
        """The next header. Bytes of its message are read by `read` or `text`.

        into   memory for a message of just this size, if that is what is waited for: its bytes come with its header
        """
        stage = self.stage
        if into is not None and not stage:
            stage.start, stage.stop = 0, 0
            got = self._received([stage.memory[: _HEADER.size], into])
            stage.stop = min(got, _HEADER.size)
            self._have = got - stage.stop
        while len(stage) < _HEADER.size:
            got = self._received([stage.room()])
            stage.stop += got
        message = stage.header()
        if self._have and into is not None and message.size != len(into):  # these bytes belong elsewhere
            self.stage, self._have = Stage(bytes(into[: self._have])), 0
        return message

    def read(self, into: memoryview) -> None:
        """The bytes of a message: those that came with its header, and the others straight to where they belong."""
        have, self._have = self._have or self.stage.take(into), 0
        while have < len(into):
            have += self._received([into[have:]], socket.MSG_WAITALL)

    def text(self, size: int) -> str:
        return bytes(self._exactly(min(size, MOST_TEXT))).decode("utf-8", "replace")

    def _exactly(self, size: int) -> memoryview:
        into = memoryview(bytearray(size))
        self.read(into)
        return into

    def _received(self, places: list[memoryview], flags: int = 0) -> int:
        try:
            got = self.socket.recvmsg_into(places, 0, flags)[0]
        except TimeoutError as error:
            raise ConnectionError("the server does not answer") from error
        if got == 0:
            raise ConnectionError("the server closed the connection")
        return got

    def close(self) -> None:
        self.socket.close()


# the server's side: it never waits ------------------------------------------------------------------------------------


class Refused(Exception):
    """What a peer sent cannot be; it is told why, and its connection ends."""


class Peer:
    """A server's end of a connection: reads and writes what can be at the moment, and remembers the rest.

    target(peer, message)   memory for a message's bytes, called when its header is there; Refused for what cannot be
    done(peer, message)     called when all its bytes are there
    ahead                   what was read of the connection before
    """

    def __init__(
        self,
        connection: socket.socket,
        token: bytes,
        target: Callable[[Peer, Message], memoryview],
        done: Callable[[Peer, Message], None],
        ahead: bytes = b"",
    ) -> None:
        connection.setblocking(False)
        prepare(connection)
        self.socket, self.target, self.done = connection, target, done
        self.token, self.nonce = token, os.urandom(_NONCE)
        self.proved = not token  # no token: this end has proved itself already, as a client
        self.worker = self.server = -1  # who it is, once it has said so
        self.life = 0
        self.text = memoryview(b"")  # with which it introduced itself
        self.since = 0.0  # when the message that comes began to come
        self.ended = False
        self.unread = False  # something was taken in and not looked at: no selector tells of that
        self._stage = Stage(ahead)
        self._first = _HEADER.size if self.proved else _NONCE + _PROOF  # bytes that come first
        self._message: Message | None = None  # that comes
        self._into, self._have = memoryview(b""), 0  # where its bytes go, and how many are there
        self._idle = False  # the last look found less than there was room for
        self._out: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        if token:
            self._write([self.nonce], _NONCE)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def busy(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._out)

    def send(self, message: Message, data: memoryview | bytes = b"", written: Callable[[], None] | None = None) -> None:
        """Write a message, or remember it; `written` is called when the kernel has all of it."""
        size = len(data)
        header = _HEADER.pack(*message[:-1], size)
        self._write([header, data] if size else [header], _HEADER.size + size, written)

    def _write(self, parts: list[memoryview | bytes], size: int, written: Callable[[], None] | None = None) -> None:
        done = 0
        if not self._out and not self.ended:
            try:  # (a header and its bytes at once: the other side is woken once)
                done = self.socket.sendmsg(parts)
            except BlockingIOError:
                pass
            except OSError:
                self.ended = True
        if done == size:
            if written is not None:
                written()
        elif not self.ended:
            for part in parts:
                if done < len(part):
                    self._out.append((memoryview(part)[done:], written if part is parts[-1] else None))
                done = max(done - len(part), 0)

    def flush(self) -> None:
        """Write what the kernel takes. A connection that has ended only forgets."""
        while self._out and not self.ended:
            try:
                done = self.socket.sendmsg([data for data, _ in islice(self._out, _PIECES)])
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                break
            while self._out and done >= len(self._out[0][0]):
                data, written = self._out.popleft()
                done -= len(data)
                if written is not None:
                    written()
            if done:
                data, written = self._out[0]
                self._out[0] = data[done:], written
        if self.ended:
            self._out.clear()

    def read(self) -> None:
        """Take in what is there. `ended` is set when nothing more can come; Refused for what cannot be."""
        stage, self.unread = self._stage, False
        for _ in range(_AT_ONCE):
            if self._message is None and not self._begin():
                return
            if self._have < len(self._into) and not self._gather():
                return
            message, self._message = self._message, None
            assert message is not None
            self.done(self, message)
            if self._idle and stage.start == stage.stop:
                return  # (the selector says when more comes)
        self.unread = stage.start < stage.stop

    def _begin(self) -> bool:
        """The next header, and where its message goes. Nothing is read before the proof of who this is."""
        stage = self._stage
        while stage.stop - stage.start < self._first:
            got = self._receive([stage.room()])
            if not got:
                return False
            stage.stop += got
        if not self.proved:
            self._prove()
            return self._begin()
        message = stage.header()
        self._into, self._have = self.target(self, message), 0
        self._message = message
        return True

    def _gather(self) -> bool:
        """The bytes of the message that comes, and what follows them. Whether they are all there."""
        into, stage = self._into, self._stage
        self._have += stage.take(into[self._have :])
        while self._have < len(into):
            rest = into[self._have :]
            got = self._receive([rest, stage.room()])
            if not got:
                return False
            self._have += min(got, len(rest))
            stage.stop += max(got - len(rest), 0)
        return True

    def _receive(self, places: list[memoryview]) -> int:
        try:
            got = self.socket.recvmsg_into(places)[0]
        except BlockingIOError:
            return 0
        except OSError:
            got = 0
        if got == 0:
            self.ended = True
        self._idle = got < sum(map(len, places))
        return got

    def _prove(self) -> None:
        both = memoryview(bytearray(_NONCE + _PROOF))
        self._stage.take(both)
        theirs, proof = bytes(both[:_NONCE]), both[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self.token, b"client", self.nonce, theirs)):
            self.ended = True  # (and no word to somebody who does not know the token)
            raise Refused("")
        self.proved, self._first = True, _HEADER.size
        self._write([_proof(self.token, b"server", theirs, self.nonce)], _PROOF)

    def close(self) -> None:
        self.ended = True
        self._out.clear()
        self.socket.close()
