"""Messages between parameter servers and workers, over the standard library's connections.

    meet       server 1 listens -> its address in torch's Store -> a worker connects, and both prove that they know the
               secret of the run (`wire.prove`); before that nothing else is read
    message    | header: a text in JSON | bytes of tensors, as many as both ends expect: from memory into memory |

Nothing that a peer sends is unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch import Tensor

from minipar.cluster import agreement, wire, worker
from minipar.errors import ServerClosed
from minipar.models.tensors import memory_of

_LONGEST = 1 << 24  # bytes of a header
_PATIENCE = 60.0  # seconds for a server to prove that it knows the secret
_RETRY = 0.01  # seconds between two looks for a server that does not listen yet

Header = dict[str, Any]


def _place(folder: str) -> tuple[dist.Store, str]:
    """Where this process says and finds addresses; and the address of its host, "" if there is only one host."""
    if worker.in_rank() and not worker.context().store:  # torchrun started this process
        agreed = agreement.agree()
        several = len(set(agreed.hosts)) > 1
        return dist.PrefixStore(folder, agreed.store), agreed.addresses[agreed.rank] if several else ""
    several = worker.in_rank() and len(set(agreement.hosts_of(worker.context().size))) > 1
    path = os.path.join(folder, "store")
    os.close(os.open(path, os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR, 0o600))
    return dist.FileStore(path), agreement.LOOPBACK if several else ""


def listen(folder: str, server: int) -> socket.socket:
    """Listen as one of the servers that meet by a folder, and say where: in the folder, if all are on one host."""
    store, host = _place(folder)
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.join(folder, str(server)))
        os.chmod(listener.getsockname(), 0o600)
        listener.listen(128)
    store.set(str(server), json.dumps(listener.getsockname()))
    return listener


def reach(folder: str, server: int, secret: bytes) -> Connection:
    """A connection to a server, as soon as that listens. Raises ServerClosed if it has ended."""
    store, _ = _place(folder)
    while not store.check([str(server)]):
        time.sleep(_RETRY)
    address = json.loads(store.get(str(server)))
    try:
        if isinstance(address, str):
            one = socket.socket(socket.AF_UNIX)
            one.connect(address)
        else:
            one = socket.create_connection(address[:2])
        wire.prove(one, secret, _PATIENCE, asks_first=False)
    except (ConnectionError, FileNotFoundError) as error:
        raise ServerClosed(f"server {server} of {folder} has ended ({error})") from error
    one.settimeout(None)
    return connection_of(one)


def connection_of(one: socket.socket) -> Connection:
    if one.family != socket.AF_UNIX:
        wire.keep_alive(one)
    return Connection(one.detach())


def send(to: Connection, header: Header, parts: Iterable[Tensor] = ()) -> None:
    """Send a message; returns when the system has all of it."""
    to.send_bytes(json.dumps(header).encode())
    for part in parts:
        left = memory_of(part)
        while left:
            left = left[os.write(to.fileno(), left) :]


def receive(source: Connection) -> Header:
    """Wait for the header of the next message. The bytes that follow it are read by `read`."""
    header: Header = json.loads(source.recv_bytes(_LONGEST))
    return header


def read(source: Connection, into: Tensor) -> None:
    """Read bytes of a message into the memory of a tensor. (`recv_bytes_into` would copy them twice.)"""
    left = memory_of(into)
    while left:
        got = os.readv(source.fileno(), [left])
        if not got:
            raise EOFError("a message has ended in its middle")
        left = left[got:]


def admit(one: Connection, secret: bytes, seconds: float) -> None:
    """At a server: have who has connected prove within so many seconds that it knows the secret. OSError."""
    with socket.socket(fileno=os.dup(one.fileno())) as same:
        wire.prove(same, secret, seconds, asks_first=True)
        same.settimeout(None)


def hang_up(one: Connection) -> None:
    """End a connection, so that a thread that waits for it learns of it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
