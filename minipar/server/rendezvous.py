"""Where workers find servers: a folder that only their user can open, with addresses, the token and the keys.

handle.json          addresses, token, keys (written once, before any server starts)
0, 1, ...            Unix sockets of the servers
snapshot-3.0         see snapshot.py
closed               exists when the servers have ended
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from minipar.errors import RankError
from minipar.server.connection import Connection
from minipar.server.framing import Message, What
from minipar.server.shard import ParameterKey, pieces_of

RETRY = 0.01  # seconds between two tries to connect


@dataclass(frozen=True)
class ServerHandle:
    """What servers and workers must know to take part."""

    folder: str
    addresses: tuple[str, ...]
    token: bytes
    keys: tuple[ParameterKey, ...]

    @property
    def closed(self) -> bool:
        return os.path.exists(os.path.join(self.folder, "closed"))

    def close(self) -> None:
        with open(os.path.join(self.folder, "closed"), "w"):
            pass


def open_folder(
    folder: str, keys: Sequence[ParameterKey], servers: int = 1, tcp: bool = False, host: str = "127.0.0.1"
) -> ServerHandle:
    """Write the handle of new servers to a folder, which is made if needed. They use Unix sockets, or TCP at `host`."""
    if servers < 1:
        raise RankError(f"servers={servers}: must be at least 1")
    if not all(pieces_of(keys, servers)):
        raise RankError(f"servers={servers}: too many for parameters of {sum(key.nbytes for key in keys)} bytes")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    addresses = tuple(f"tcp:{host}:{_free_port(host)}" if tcp else f"unix:{folder}/{k}" for k in range(servers))
    token = secrets.token_bytes(32)
    text = json.dumps({"addresses": addresses, "token": token.hex(), "keys": [list(key) for key in keys]})
    path = os.path.join(folder, "handle.json")
    with open(os.open(f"{path}.tmp", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)
    os.rename(f"{path}.tmp", path)
    return ServerHandle(folder, addresses, token, tuple(keys))


def read_handle(folder: str) -> ServerHandle:
    """The handle in a folder; RankError if there is none."""
    try:
        with open(os.path.join(folder, "handle.json")) as file:
            data = json.load(file)
    except OSError as error:
        raise RankError(f"{folder}: no parameter server has its handle there") from error
    keys = tuple(ParameterKey(name, tuple(shape), dtype) for name, shape, dtype in data["keys"])
    return ServerHandle(folder, tuple(data["addresses"]), bytes.fromhex(data["token"]), keys)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Introduction:
    """The first message of a client that connects to a server: a worker and its life, or another server.

    keys        `shard.digest` of the keys that it expects
    life        of a worker: another number each time that it begins anew
    snapshots   of a server: the numbers of those that it can read
    """

    keys: str
    worker: int = -1
    life: int = 0
    server: int = -1
    snapshots: list[int] = field(default_factory=list)

    def text(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def read(text: bytes) -> Introduction | None:
        """The introduction in a received text; None if it is not one."""
        try:
            data = json.loads(text)
            worker, life, server = (int(data[name]) for name in ("worker", "life", "server"))
            return Introduction(str(data["keys"]), worker, life, server, [int(n) for n in data["snapshots"]])
        except (ValueError, TypeError, KeyError):
            return None


def present(handle: ServerHandle, who: Introduction) -> tuple[Connection, Message] | None:
    """Introduce a server to server 0, and wait for its answer, which comes when all other servers are there, too.

    None when the servers have ended meanwhile.
    """
    while True:
        try:
            connection = Connection(handle.addresses[0], handle.token, 2.0)
            connection.send(Message(What.HELLO), who.text())
            return connection, connection.receive()
        except (OSError, ConnectionError):
            if handle.closed:
                return None
            time.sleep(RETRY)
