"""The two ends of a connection to a parameter server: a client's end waits, a server's end never does.

client   send      header | bytes      until the system has all of them
         receive   header              and then `read`: the bytes, straight into their place
server   read      header -> target(message): memory -> bytes -> done(message)     as far as bytes have arrived
         send      header | bytes -> the system, and what that does not take -> out         until there is room again
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from minipar.errors import RankError
from minipar.server.framing import (
    HEADER,
    MOST_TEXT,
    NONCE,
    PROOF,
    Message,
    place_of,
    prepare,
    process_behind,
    proof,
    rest_of,
)

_AT_ONCE = 128  # headers and payloads read from one connection before the others have their turn
_CONNECTED = 2.0  # seconds in which a server takes a connection
_LOOK = struct.pack("@ll", 0, 100_000)  # a timeval: after so long a waiting client looks what the servers do


class Connection:
    """A client's connection: sends and receives wait until they are done. ConnectionError when the server is gone.

    `look(process)` is called from time to time while it waits, with the server's process, or 0 if that is not known.
    """

    def __init__(
        self, address: str, token: bytes, name: str = "", look: Callable[[int], None] = lambda process: None
    ) -> None:
        self.name, self.look = name or f"the server at {address}", look
        family, place = place_of(address)
        self.socket = socket.socket(family)
        prepare(self.socket)
        try:
            self.socket.settimeout(_CONNECTED)
            self.socket.connect(place)
            self.socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # (Python's own timeout polls before every call)
                self.socket.setsockopt(socket.SOL_SOCKET, option, _LOOK)
            self.process = process_behind(self.socket)
            theirs, mine = self._exactly(NONCE), os.urandom(NONCE)
            self._send([memoryview(mine + proof(token, b"client", theirs, mine))])
            if not hmac.compare_digest(self._exactly(PROOF), proof(token, b"server", mine, theirs)):
                raise RankError(f"the server at {address} does not know the token; it is another one's")
        except BaseException:
            self.socket.close()
            raise

    def send(self, message: Message, data: memoryview | bytes = b"") -> None:
        self._send(message.parts(data))

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            try:
                parts = rest_of(parts, self.socket.sendmsg(parts))
            except BlockingIOError:
                self.look(self.process)

    def receive(self) -> Message:
        """The next header. The bytes of its message are read by `read` or `text`."""
        return Message(*HEADER.unpack(self._exactly(HEADER.size)))

    def read(self, into: memoryview) -> None:
        """Read the bytes of a message."""
        have = 0
        while have < len(into):
            try:
                got = self.socket.recv_into(into[have:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                self.look(self.process)
                continue
            if got == 0:
                raise ConnectionError(f"{self.name} closed the connection")
            have += got

    def text(self, size: int) -> str:
        return self._exactly(min(size, MOST_TEXT)).decode("utf-8", "replace")

    def _exactly(self, size: int) -> bytes:
        into = bytearray(size)
        self.read(memoryview(into))
        return bytes(into)

    def close(self) -> None:
        self.socket.close()


class Refused(Exception):
    """A peer sent something impossible; it gets the reason, and its connection ends."""


class Peer:
    """A server's end of a connection: reads and writes what is possible at the moment, and remembers the rest.

    target(peer, message)   memory for a message's bytes, called when its header is there; may raise Refused
    done(peer, message)     called when all its bytes are there
    token                   "": this end was a client, and the proof is done
    """

    def __init__(
        self,
        connection: socket.socket,
        token: bytes,
        target: Callable[[Peer, Message], memoryview],
        done: Callable[[Peer, Message], None],
    ) -> None:
        connection.setblocking(False)
        prepare(connection)
        self.socket, self.target, self.done = connection, target, done
        self.token, self.nonce = token, os.urandom(NONCE)
        self.proved = not token
        self.worker = self.server = -1  # its number, once it has said which one it is
        self.session = 0
        self.process = process_behind(connection)  # 0: unknown
        self.digest = memoryview(b"")  # of the keys that it expects
        self.packed = memoryview(b"")  # a piece of a gradient in fewer bytes
        self.since = 0.0  # when the present message began to arrive
        self.coming: list[Message] = []  # pieces of a gradient that travel as one message on an emulated link
        self.ended = False
        self._message: Message | None = None  # the message whose bytes are arriving
        self._into, self._have = memoryview(b""), 0  # memory for what arrives, and how much of it is there
        self._expect(HEADER.size if self.proved else NONCE + PROOF)
        self._out: deque[tuple[list[memoryview], Callable[[], None] | None]] = deque()
        if token:
            self._write([memoryview(self.nonce)])

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def busy(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._out)

    def send(self, message: Message, data: memoryview | bytes = b"", written: Callable[[], None] | None = None) -> None:
        """Write a message, or remember it; `written` is called when the system has all of it."""
        self._write(message.parts(data), written)

    def _write(self, parts: list[memoryview], written: Callable[[], None] | None = None) -> None:
        self._out.append((parts, written))
        if len(self._out) == 1:
            self.flush()

    def flush(self) -> None:
        """Write what the system takes. If the connection has ended, drop everything."""
        while self._out and not self.ended:
            parts, written = self._out[0]
            try:
                parts[:] = rest_of(parts, self.socket.sendmsg(parts))
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                break
            if not parts:
                self._out.popleft()
                if written is not None:
                    written()
        if self.ended:
            self._out.clear()

    def read(self) -> None:
        """Read what is there. Sets `ended` when nothing more can come; Refused for an impossible message."""
        for _ in range(_AT_ONCE):
            while self._have < len(self._into):
                try:
                    got = self.socket.recv_into(self._into[self._have :])
                except BlockingIOError:
                    return
                except OSError:
                    got = 0
                if got == 0:
                    self.ended = True
                    return
                self._have += got
            self._arrived()

    def _arrived(self) -> None:
        """All that was expected is there: the proof, the header of a message, or its bytes."""
        message = self._message
        if not self.proved:
            self._prove(bytes(self._into))
            self._expect(HEADER.size)
        elif message is None:
            self._message = Message(*HEADER.unpack(self._into))
            self._into, self._have = self.target(self, self._message), 0
        else:
            self._message = None
            self._expect(HEADER.size)
            self.done(self, message)

    def _expect(self, size: int) -> None:
        self._into, self._have = memoryview(bytearray(size)), 0

    def _prove(self, both: bytes) -> None:
        theirs, given = both[:NONCE], both[NONCE:]
        if not hmac.compare_digest(given, proof(self.token, b"client", self.nonce, theirs)):
            self.ended = True  # (and no answer to a client that does not know the token)
            raise Refused("")
        self.proved = True
        self._write([memoryview(proof(self.token, b"server", theirs, self.nonce))])

    def close(self) -> None:
        self.ended = True
        self._out.clear()
        self.socket.close()
