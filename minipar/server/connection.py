"""A client's end of a connection to a parameter server: sends and receives wait until they are done.

receive   header | bytes ...        a header, and in the same call the first bytes of an answer, into their place
read              | bytes ...       the other bytes, straight into their place
"""

from __future__ import annotations

import hmac
import os
import socket

from minipar.errors import RankError
from minipar.server.framing import HEADER, MOST_TEXT, NONCE, PROOF, Message, Stage, What, prepare, proof
from minipar.server.looking import Looking

_AHEAD = 1 << 12  # bytes of an answer that may come with its header


class Connection:
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
        self._kept = memoryview(bytearray(_AHEAD))
        self.looking = Looking()
        self._have = 0  # bytes of a message that are where they belong
        try:
            self.socket.settimeout(seconds)
            self.socket.connect(place)
            theirs, mine = bytes(self._exactly(NONCE)), os.urandom(NONCE)
            self.socket.sendall(mine + proof(token, b"client", theirs, mine))
            if not hmac.compare_digest(self._exactly(PROOF), proof(token, b"server", mine, theirs)):
                raise RankError(f"the server at {address} does not know the token; it is another one's")
        except BaseException:
            self.socket.close()
            raise
        self.wait(None)

    def wait(self, seconds: float | None) -> None:
        """Set how many seconds a send or receive may take; after that it is a ConnectionError. None: for ever.

        (A blocking socket is a little faster than one with a timeout, which polls before every call.)
        """
        self.socket.settimeout(seconds)

    def send(self, message: Message, data: memoryview | bytes = b"") -> None:
        header = HEADER.pack(*message[:6], len(data), *message[7:])
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

        into   memory for the bytes of an expected ANSWER of exactly this size: they are received with its header
        """
        stage, before = self.stage, self._kept
        if into is not None and not stage:
            stage.start, stage.stop = 0, 0
            place = into[:_AHEAD]
            before = self._kept[: len(place)]
            before[:] = place  # (while the server is at work)
            got = self._soon([stage.memory[: HEADER.size], place])
            stage.stop = min(got, HEADER.size)
            self._have = got - stage.stop
        while len(stage) < HEADER.size:
            got = self._received([stage.room()])
            stage.stop += got
        message = stage.header()
        if self._have and into is not None and (message.what != What.ANSWER or message.size != len(into)):
            self.stage = Stage(bytes(into[: self._have]))  # these bytes belong elsewhere
            into[: self._have] = before[: self._have]
            self._have = 0
        return message

    def read(self, into: memoryview) -> None:
        """Read the bytes of a message: those that came with its header, and the others straight into `into`."""
        have, self._have = self._have or self.stage.take(into), 0
        while have < len(into):
            have += self._received([into[have:]], socket.MSG_WAITALL)

    def text(self, size: int) -> str:
        return bytes(self._exactly(min(size, MOST_TEXT))).decode("utf-8", "replace")

    def _exactly(self, size: int) -> memoryview:
        into = memoryview(bytearray(size))
        self.read(into)
        return into

    def _soon(self, places: list[memoryview]) -> int:
        """Like `_received`, for an answer that is expected soon."""
        if self.socket.gettimeout() is None:  # (one with a timeout would wait for that long, and not look)
            return self.looking.find(lambda: self._received(places, socket.MSG_DONTWAIT)) or self._received(places)
        return self._received(places)

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
