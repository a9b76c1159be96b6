"""Where workers find servers: in a folder that only their user can open, or in torch's Store, if they are on several
hosts. Both have texts by name:

handle.json          token, keys, how many servers, whether they use TCP (written once, before any server starts)
address 0, ...       where a server listens: it is bound first, and says it when it can serve
closed               exists when the servers have ended

The folder also has the servers' Unix sockets (0, 1, ...).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minipar.errors import RankError, ServerClosed
from minipar.server.connection import Connection
from minipar.server.shard import ParameterKey, pieces_of

if TYPE_CHECKING:
    import torch.distributed as dist

_RETRY = 0.01  # seconds between two tries to connect
# A server has not started, or is so busy that too many clients wait for it.
_NOT_THERE = (ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError)
_HANDLE, _CLOSED = "handle.json", "closed"


@dataclass(frozen=True)
class Meeting:
    """Where servers and workers meet.

    folder    of this host, for sockets
    store     where they publish texts; None: in the folder, if all are on one host
    address   of this host, at which servers listen; "": they use Unix sockets
    """

    folder: str
    store: dist.Store | None = None
    address: str = ""

    def publish(self, name: str, text: str) -> None:
        """Write a text, in place of an earlier one of this name."""
        if self.store is not None:
            return self.store.set(name, text)
        path = os.path.join(self.folder, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.tmp")  # (of a process that was killed)
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY  # nobody else's file, nor where a link leads
        with open(os.open(f"{path}.tmp", flags, 0o600), "w") as file:
            file.write(text)
        os.rename(f"{path}.tmp", path)

    def find(self, name: str) -> str | None:
        """The text of this name; None if there is none yet."""
        if self.store is not None:
            return self.store.get(name).decode() if self.store.check([name]) else None
        with contextlib.suppress(OSError), open(os.path.join(self.folder, name)) as file:
            return file.read()
        return None


@dataclass(frozen=True)
class ServerHandle:
    """What servers and workers must know to take part. `count`: how many servers there are."""

    meeting: Meeting
    count: int
    tcp: bool
    token: bytes
    keys: tuple[ParameterKey, ...]

    def place(self, server: int) -> str:
        """Where a server is to listen, which is its own host; a port 0 is replaced by one that is free."""
        return f"tcp:{self.meeting.address or '127.0.0.1'}:0" if self.tcp else f"unix:{self.meeting.folder}/{server}"

    def address(self, server: int) -> str:
        """Where a server listens. ConnectionError if it has not started."""
        found = self.meeting.find(f"address {server}")
        if found is None:
            raise ConnectionError(f"server {server} has not started")
        return found

    @property
    def closed(self) -> bool:
        return self.meeting.find(_CLOSED) is not None

    def close(self) -> None:
        self.meeting.publish(_CLOSED, "")


def open_folder(
    meeting: str | Meeting, keys: Sequence[ParameterKey], servers: int = 1, tcp: bool = False
) -> ServerHandle:
    """Write the handle of new servers to a folder, which is made if needed, or another meeting place. They use Unix
    sockets, or TCP if they are on several hosts or `tcp` says so."""
    place = Meeting(meeting) if isinstance(meeting, str) else meeting
    if servers < 1:
        raise RankError(f"servers={servers}: must be at least 1")
    if not all(pieces_of(keys, servers)):
        raise RankError(f"servers={servers}: too many for parameters of {sum(key.nbytes for key in keys)} bytes")
    os.makedirs(place.folder, mode=0o700, exist_ok=True)
    handle = ServerHandle(place, servers, tcp or bool(place.address), secrets.token_bytes(32), tuple(keys))
    known = {"servers": servers, "tcp": handle.tcp, "token": handle.token.hex(), "keys": [list(key) for key in keys]}
    place.publish(_HANDLE, json.dumps(known))
    return handle


def read_handle(meeting: str | Meeting) -> ServerHandle:
    """The handle in a folder, or another meeting place; RankError if there is none."""
    place = Meeting(meeting) if isinstance(meeting, str) else meeting
    text = place.find(_HANDLE)
    if text is None:
        raise RankError(f"{place.folder}: no parameter server has its handle there")
    data = json.loads(text)
    keys = tuple(ParameterKey(name, tuple(shape), dtype) for name, shape, dtype in data["keys"])
    return ServerHandle(place, data["servers"], data["tcp"], bytes.fromhex(data["token"]), keys)


def reach(
    handle: ServerHandle, server: int, patience: float, look: Callable[[int], None] = lambda process: None
) -> Connection:
    """A connection to a server, which is tried for so many seconds. Errors: RankError if nobody is there, or this is no
    server; ServerClosed if the servers have ended."""
    until = time.monotonic() + patience
    while True:
        if handle.closed:
            raise ServerClosed(f"the servers of {handle.meeting.folder} have ended")
        try:
            return Connection(handle.address(server), handle.token, f"server {server}", look)
        except _NOT_THERE as error:
            if time.monotonic() > until:
                reason = f"no server {server} at {handle.meeting.folder} for {patience:g} s"
                raise RankError(f"{reason} ({error or type(error).__name__})") from error
        look(0)
        time.sleep(_RETRY)
