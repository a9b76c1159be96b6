"""A parameter server's end of a connection: it never waits.

read    stage -> header -> target(message): memory -> bytes -> done(message)     as far as bytes have arrived
send    header | bytes -> the system, and what that does not take -> out         until there is room again
"""

from __future__ import annotations

import hmac
import os
import socket
from collections import deque
from collections.abc import Callable
from itertools import islice

from minipar.server.framing import HEADER, NONCE, PROOF, Message, Stage, prepare, process_behind, proof

_PIECES = 16  # parts that wait to be written that go in one call
_AT_ONCE = 64  # messages read from one connection before the others have their turn


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
        self.since = 0.0  # when the present message began to arrive
        self.coming: list[Message] = []  # pieces of a gradient that travel together on an emulated link
        self.ended = False
        self.unread = False  # whether bytes were received but not handled: the selector does not report these
        self._stage = Stage(ahead)
        self._first = HEADER.size if self.proved else NONCE + PROOF  # bytes that come first
        self._message: Message | None = None  # the message that is arriving
        self._into, self._have = memoryview(b""), 0  # memory for its bytes, and how many have arrived
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
        """Read bytes that have arrived. Sets `ended` when nothing more can come; Refused for an impossible message."""
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
        """Read the bytes of the present message, and what follows them; returns whether all of them have arrived."""
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
