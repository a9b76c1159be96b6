"""The two ends of a connection to a parameter server: a client's end waits, a server's end never does.

client   send      header | bytes      until the system has all of them
         receive   header | bytes      a header, and what came behind it, as far as there is room
         read               bytes      the other bytes, straight into their place
server   read      stage -> header -> target(message): memory -> bytes -> done(message)     as far as bytes have arrived
         send      header | bytes -> the system, and what that does not take -> out         until there is room again
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from minipar.cluster import stacks
from minipar.cluster.watchdog import STOPPED
from minipar.errors import RankError
from minipar.server.framing import (
    HEADER,
    MOST_TEXT,
    NONCE,
    PROOF,
    Message,
    Stage,
    prepare,
    process_behind,
    proof,
)

_PIECES = 16  # parts that wait to be written that go in one call
_AT_ONCE = 64  # messages read from one connection before the others have their turn
_LOOK = struct.pack("@ll", 0, 100_000)  # a timeval: after so long a waiting client looks what the server does


def stopped(server: str, process: int) -> None:
    """What a client does about a server that was stopped, unless it is told otherwise."""
    raise RankError(
        f"{server} (process {process}) was stopped (SIGSTOP) and has not answered for {STOPPED:g} s; continue it by "
        f"kill -CONT {process}, or run again"
    )


class Connection:
    """A client's connection: sends and receives wait until they are done. ConnectionError when the server is gone.

    `on_stop(name, process)` is called when the server's process was stopped, if it is known, which it is over a Unix
    socket. When it returns, that is a ConnectionError, too. `looks` is called from time to time while it waits.
    """

    def __init__(
        self,
        address: str,
        token: bytes,
        seconds: float,
        name: str = "",
        on_stop: Callable[[str, int], None] = stopped,
        looks: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.on_stop, self.looks = name or f"the server at {address}", on_stop, looks
        self._limit: float | None = seconds
        self._stopped = 0.0  # since when its process is seen as stopped
        kind, _, rest = address.partition(":")
        if kind == "unix":
            self.socket, place = socket.socket(socket.AF_UNIX), rest
        else:
            host, _, port = rest.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.socket, place = socket.socket(family), (host, int(port))  # type: ignore[assignment]
        prepare(self.socket)
        self.stage = Stage()
        try:
            self.socket.settimeout(seconds)
            self.socket.connect(place)
            self.socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # (Python's own timeout polls before every call)
                self.socket.setsockopt(socket.SOL_SOCKET, option, _LOOK)
            self.process = process_behind(self.socket)
            theirs, mine = bytes(self._exactly(NONCE)), os.urandom(NONCE)
            self._send_all(mine + proof(token, b"client", theirs, mine))
            if not hmac.compare_digest(self._exactly(PROOF), proof(token, b"server", mine, theirs)):
                raise RankError(f"the server at {address} does not know the token; it is another one's")
        except BaseException:
            self.socket.close()
            raise
        self.wait(None)

    def wait(self, seconds: float | None) -> None:
        """Set how many seconds a send or receive may wait for the server; after that it is a ConnectionError. None: for
        ever, while its process is not stopped."""
        self._limit = seconds

    def send(self, message: Message, data: memoryview | bytes = b"") -> None:
        header = HEADER.pack(*message[:6], len(data), *message[7:])
        try:
            done = self.socket.sendmsg([header, data] if len(data) else [header])
        except BlockingIOError:
            done = 0
        if done < len(header):
            self._send_all(header[done:])
            done = len(header)
        if done < len(header) + len(data):
            self._send_all(memoryview(data)[done - len(header) :])

    def _send_all(self, data: memoryview | bytes) -> None:
        rest, since = memoryview(data), 0.0
        while rest:
            try:
                rest, since = rest[self.socket.send(rest) :], 0.0
            except BlockingIOError:
                since = self._look(since, "take what it is sent")

    def _look(self, since: float, what: str) -> float:
        """Nothing has moved for a while: ConnectionError if the server was stopped, or this has lasted too long `since`
        then, which is returned."""
        now = time.monotonic()
        since = since or now
        self._stopped = (self._stopped or now) if stacks.stopped(self.process) else 0.0
        if self._stopped and now - self._stopped >= STOPPED:
            self.on_stop(self.name, self.process)
            raise ConnectionError(f"{self.name} (process {self.process}) was stopped (SIGSTOP)")
        self.looks()
        if self._limit is not None and now - since >= self._limit:
            raise ConnectionError(f"{self.name} does not {what}")
        return since

    def receive(self) -> Message:
        """The next header. Bytes of its message are read by `read` or `text`."""
        stage = self.stage
        while len(stage) < HEADER.size:
            got = self._received([stage.room()])
            stage.stop += got
        return stage.header()

    def read(self, into: memoryview) -> None:
        """Read the bytes of a message: those that came with its header, and the others straight into `into`."""
        have = self.stage.take(into)
        while have < len(into):
            have += self._received([into[have:]], socket.MSG_WAITALL)

    def text(self, size: int) -> str:
        return bytes(self._exactly(min(size, MOST_TEXT))).decode("utf-8", "replace")

    def _exactly(self, size: int) -> memoryview:
        into = memoryview(bytearray(size))
        self.read(into)
        return into

    def _received(self, places: list[memoryview], flags: int = 0) -> int:
        since = 0.0
        while True:
            try:
                got = self.socket.recvmsg_into(places, 0, flags)[0]
            except BlockingIOError:
                since = self._look(since, "answer")
                continue
            if got == 0:
                raise ConnectionError(f"{self.name} closed the connection")
            return got

    def close(self) -> None:
        self.socket.close()


class Refused(Exception):
    """A peer sent something impossible; it gets the reason, and its connection ends."""


class Peer:
    """A server's end of a connection: reads and writes what is possible at the moment, and remembers the rest.

    target(peer, message)   memory for a message's bytes, called when its header is there; may raise Refused
    done(peer, message)     called when all its bytes are there
    ahead                   bytes that were read from the connection before
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
        self.token, self.nonce = token, os.urandom(NONCE)
        self.proved = not token  # no token: this end was a client, and the proof is done
        self.worker = self.server = -1  # its number, once it has said which one it is
        self.life = 0
        self.process = process_behind(connection)  # 0: unknown
        self.text = memoryview(b"")  # its introduction
        self.packed = memoryview(b"")  # a piece of a gradient in fewer bytes
        self.since = 0.0  # when the present message began to arrive
        self.coming: list[Message] = []  # pieces of a gradient that travel together on an emulated link
        self.ended = False
        self.unread = False  # whether bytes were received but not handled: the selector does not report these
        self._stage = Stage(ahead)
        self._first = HEADER.size if self.proved else NONCE + PROOF  # bytes that come first
        self._message: Message | None = None  # the message that is arriving
        self._into, self._have = memoryview(b""), 0  # memory for its bytes, and how many are there
        self._idle = False  # whether the last read got less than there was room for
        self._out: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        if token:
            self._write([self.nonce], NONCE)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def busy(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._out)

    def send(self, message: Message, data: memoryview | bytes = b"", written: Callable[[], None] | None = None) -> None:
        """Write a message, or remember it; `written` is called when the kernel has all of it."""
        size = len(data)
        header = HEADER.pack(*message[:6], size, *message[7:])
        self._write([header, data] if size else [header], HEADER.size + size, written)

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
        """Write what the kernel takes. If the connection has ended, drop everything."""
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
        """Read what is there. Sets `ended` when nothing more can come; Refused for an impossible message."""
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
        """Read the next header, and find the memory for its message. Nothing is read before the proof."""
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
        """Read the bytes of the present message, and what follows them; returns whether all of them are there."""
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
        both = memoryview(bytearray(NONCE + PROOF))
        self._stage.take(both)
        theirs, theirs_proof = bytes(both[:NONCE]), both[NONCE:]
        if not hmac.compare_digest(theirs_proof, proof(self.token, b"client", self.nonce, theirs)):
            self.ended = True  # (and no answer to a client that does not know the token)
            raise Refused("")
        self.proved, self._first = True, HEADER.size
        self._write([proof(self.token, b"server", theirs, self.nonce)], PROOF)

    def close(self) -> None:
        self.ended = True
        self._out.clear()
        self.socket.close()
