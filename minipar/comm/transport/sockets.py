"""Point-to-point messages: a socket for each pair and direction.

    header (tag, bytes, dtype) | data        at once, if the socket's buffer has room

Ranks of one machine use Unix sockets; those of other hosts (`Far`) are reached by TCP. If one of these hosts is cut
off, the system notices after a few seconds that its connections no longer answer.

If there is no room, a helper thread writes the rest, or the thread that waits for the send, whichever comes first. The
receiver reads when it waits for a message, straight into the tensor. If the socket has ended, the other rank is gone.

gloo gives every message to a thread of its own on both sides. On a machine with fewer cores than ranks these
switches cost more than a message of a few kilobytes; here there are none for messages that find room. A message of
another size or dtype than the waiting tensor is an error, where gloo would abort the process or leave stale data.

Who connects from another host proves that it knows the secret of the run, and this rank proves it, too, by the HMAC of
Python's multiprocessing.connection. A helper thread waits for that, and then hands the connection to the rank, as a
message to its Unix socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from minipar.cluster import threads, wire
from minipar.cluster.processes import readable
from minipar.cluster.threads import Helper
from minipar.comm.transport.interface import DONE, Work
from minipar.comm.values import dtype_code
from minipar.errors import RankError
from minipar.models.tensors import memory_of

_HEADER = struct.Struct("<qqI")  # tag, bytes, dtype
_WHO = struct.Struct("<i?")  # rank, and whether a descriptor comes with it: of its connection from another host
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end of a Unix socket: process, user, group
_T = TypeVar("_T")
_BUFFER = 4 << 20  # bytes that are requested; the kernel gives what its limits allow
_SOME = 128 << 10  # bytes that are passed over at once
_NAP, _SLICE = 5e-4, 0.05
_PROOF = 5.0  # seconds in which a new connection says who it is, from its first byte to its last
_PATIENCE = 30.0  # seconds for which a rank waits to be let in: others may come before it


class Far(NamedTuple):
    """How ranks of other hosts are reached: their numbers, the address of this host, where all publish their ports, and
    a secret of all."""

    ranks: frozenset[int]
    address: str
    store: dist.Store
    token: bytes


class Sockets:
    """One rank's connections to the others. `path` is the same for the ranks of a host: in a folder that only they can
    open, or a name in the memory of Linux, which begins with a zero."""

    keeps_memory = True  # a socket copies what it takes, and `_Sent` keeps the tensor of what waits for room

    def __init__(self, rank: int, path: str, far: Far | None = None) -> None:
        self.rank, self.path, self.far = rank, path, far
        here = socket.socket(socket.AF_UNIX)
        self.unlink()
        here.bind(f"{path}.{rank}")
        if not path.startswith("\0"):
            os.chmod(f"{path}.{rank}", 0o600)
        here.listen(128)
        self.listeners = [here]
        if far is not None:
            family = socket.AF_INET6 if ":" in far.address else socket.AF_INET
            self.listeners.append(socket.create_server((far.address, 0), family=family, backlog=128))
            port = self.listeners[1].getsockname()[1]
            threads.start(partial(self._welcome, self.listeners[1], far.token), "lets in ranks of other hosts")
            far.store.set(f"messages {rank}", json.dumps([far.address, port]))
        self.flusher = Flusher("writes messages")
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, _Incoming] = {}

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending a contiguous CPU tensor; never blocks. All ranks must have made their `Sockets` before."""
        link = self.outgoing.get(peer) or self._outgoing(peer)
        data = memory_of(tensor)
        return link.send(_HEADER.pack(tag, len(data), dtype_code(tensor.dtype)), data, tensor)

    def warm_up(self, peers: Iterable[int]) -> None:
        """Connect with those of these ranks that are on other hosts: if one is not reached, that is noticed here."""
        far = frozenset() if self.far is None else self.far.ranks
        for peer in far.intersection(peers):
            self._outgoing(peer)

    def lost(self, peer: int) -> bool:
        """Whether a rank of another host, with which this one has connected, is gone or cut off."""
        link = self.outgoing.get(peer) if self.far is not None and peer in self.far.ranks else None
        return link is not None and ended(link.connection)

    def _outgoing(self, peer: int) -> Outgoing:
        link = self.outgoing.get(peer)
        if link is None:
            far = self.far is not None and peer in self.far.ranks
            opened = self._connect_far(self.far, peer) if self.far is not None and far else _connect(self.path, peer)
            with contextlib.suppress(OSError):  # macOS gives nothing where Linux gives what its limits allow
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            if not far:
                opened.sendall(_WHO.pack(self.rank, False))
            link = self.outgoing[peer] = Outgoing(opened, peer, self.flusher)
        return link

    def _connect_far(self, far: Far, peer: int) -> socket.socket:
        """Connect with a rank of another host. ConnectionError if that is not reached."""
        address, port = json.loads(far.store.get(f"messages {peer}").decode())
        try:
            connection = socket.create_connection((address, port), _PATIENCE)
            wire.prove(connection, far.token, _PATIENCE, asks_first=False).send_bytes(_WHO.pack(self.rank, True))
            wire.keep_alive(connection)
            connection.settimeout(None)
        except OSError as error:
            raise ConnectionError(f"rank {peer} is not reached at {address}, port {port}: {error}") from error
        return connection

    def _welcome(self, listener: socket.socket, token: bytes) -> None:
        """In a thread of its own: let in who proves to know the secret, and no one else."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # this rank has closed its sockets
                return
            with connection, contextlib.suppress(OSError, EOFError):
                who = wire.prove(connection, token, _PROOF, asks_first=True).recv_bytes(_WHO.size)
                wire.keep_alive(connection)
                connection.settimeout(None)
                with _connect(self.path, self.rank) as rank:
                    socket.send_fds(rank, [who], [connection.fileno()])

    def receive(self, tensor: Tensor, peer: int, tag: int, unless: int | None = None) -> SocketReceive:
        """Receive into a contiguous CPU tensor: filled when `wait` of the result has returned.

        unless   the tag of a message that may come in its place: then `wait` returns too, and `done` stays False
        """
        link = self.incoming.get(peer)
        if link is None:
            link = self.incoming[peer] = _Incoming(peer)
        return SocketReceive(self, link, tensor, tag, unless)

    def readable(self, peers: Sequence[int], seconds: float) -> bool:
        """Whether a message of one of these peers is here, or comes within so many seconds.

        True also if a peer is gone: receiving from it raises the error.
        """
        links = [self.incoming.setdefault(peer, _Incoming(peer)) for peer in peers]
        if any(link.early for link in links):
            return True
        watched = [link.connection for link in links if link.connection is not None]
        unknown = self.listeners[:1] if len(watched) < len(links) else []
        found = readable([one.fileno() for one in (*watched, *unknown)], seconds)
        if unknown and unknown[0].fileno() in found:
            self._accept()
            return self.readable(peers, 0.0)
        return bool(found)

    def _accept(self) -> None:
        """Take the connection of a peer that has made one, or refuse that of a stranger."""
        connection, _ = self.listeners[0].accept()
        data, descriptors = b"", list[int]()
        if same_user(connection):
            with contextlib.suppress(OSError):
                connection.settimeout(_PROOF)
                data, descriptors, _, _ = socket.recv_fds(connection, _WHO.size, 1)
                connection.settimeout(None)
        who, far = _WHO.unpack(data) if len(data) == _WHO.size else (-1, False)
        if who < 0 or far != len(descriptors):  # the peer ended before it said who it was, or it is none
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return
        if far:
            connection.close()
            connection = socket.socket(fileno=descriptors[0])
        self.incoming.setdefault(who, _Incoming(who)).connection = connection

    def accept(self, link: _Incoming) -> None:
        """Wait until a peer has made its connection."""
        while link.connection is None:
            self._accept()

    def close(self) -> None:
        """End all connections. What was not delivered is lost."""
        self.flusher.close()
        for out in self.outgoing.values():
            out.close()
        incoming = [link.connection for link in self.incoming.values() if link.connection is not None]
        for one in [*incoming, *self.listeners]:
            with contextlib.suppress(OSError):  # (a thread that waits there learns of it)
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.unlink()

    def unlink(self) -> None:
        """Remove the file of this rank's socket, if there is one."""
        if not self.path.startswith("\0"):
            with contextlib.suppress(OSError):
                os.unlink(f"{self.path}.{self.rank}")


def _connect(path: str, peer: int) -> socket.socket:
    """Connect with a rank of this host."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{path}.{peer}")
    return connection


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of this process's user. Everybody can find the names of
    sockets that are no files."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1]) == os.geteuid()


# sending --------------------------------------------------------------------------------------------------------------


class Outgoing:
    """The connection to one peer. What finds no room at once is written later, in order, by a wait for one of the
    messages or by the helper thread, whichever comes first."""

    def __init__(self, connection: socket.socket, peer: int, flusher: Flusher) -> None:
        self.connection = connection
        self.peer = peer
        self.flusher = flusher
        self.lock = threading.Lock()  # held by the thread that writes
        self.backlog: deque[_Sent] = deque()

    def send(self, header: bytes, data: memoryview, tensor: Tensor) -> Work:
        rest = [memoryview(header), data]
        if not self.backlog:  # only this thread makes it longer
            rest = self._write(rest)
            if not rest:
                return DONE
        sent = _Sent(self, tensor, rest)
        self.backlog.append(sent)
        self.flusher.watch(self)
        return sent

    def _write(self, parts: list[memoryview]) -> list[memoryview]:
        """Write as much as there is room for; returns the rest. ConnectionError when the peer is gone."""
        try:
            count = self.connection.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return parts
        except OSError as error:
            raise ConnectionError(f"rank {self.peer} is gone") from error
        rest = []
        for part in parts:
            if count < len(part):
                rest.append(part[count:])
            count = max(0, count - len(part))
        return rest

    def flush(self, patient: bool = False) -> None:
        """Write what waits, as far as there is room. If another thread is doing that, return, or (`patient`) wait for
        it, in slices."""
        if not self.lock.acquire(patient, _SLICE if patient else -1):
            return
        try:
            while self.backlog:
                sent = self.backlog[0]
                try:
                    sent.rest = self._write(sent.rest)
                except ConnectionError as error:
                    sent.error, sent.rest = error, []
                if sent.rest:
                    return
                sent.tensor = None
                sent.done = True
                self.backlog.popleft()
        finally:
            self.lock.release()

    def wait_for_room(self) -> None:
        """Wait until there is room, for a short time at most: two threads of the writer may wait here."""
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        poll.poll(1000 * _NAP)

    def close(self) -> None:
        for sent in list(self.backlog):
            sent.error = ConnectionError(f"rank {self.peer} is gone, or this one has closed its Communicator")
            sent.done = True
        self.connection.close()


class _Sent:
    """A message of which a part waits for room. It keeps the tensor until that is written."""

    def __init__(self, link: Outgoing, tensor: Tensor, rest: list[memoryview]) -> None:
        self.link = link
        self.tensor: Tensor | None = tensor
        self.rest = rest
        self.done = False
        self.error: ConnectionError | None = None

    def wait(self) -> None:
        while not self.done:
            self.link.flush(patient=True)
            if not self.done:
                self.link.wait_for_room()
        if self.error is not None:
            raise ConnectionError("a rank that a message was for is gone") from self.error

    def is_completed(self) -> bool:
        return self.done


class Flusher(Helper[Outgoing]):
    """Writes what found no room, on all links."""

    def turn(self) -> None:
        for link in list(self.waiting):
            link.flush()
        with self.lock:
            self.waiting -= {link for link in self.waiting if not link.backlog}
            first = next(iter(self.waiting), None)
        if first is not None:
            first.wait_for_room()


def ended(connection: socket.socket) -> bool:
    """Whether the other end was closed: by its process, or because that has ended."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


# receiving ------------------------------------------------------------------------------------------------------------


class _Incoming:
    """The connection from one peer, the receives that wait for its messages, and messages that came early."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.connection: socket.socket | None = None
        self.expected: dict[int, list[SocketReceive]] = {}
        self.early: dict[int, list[tuple[bytearray, int]]] = {}
        self.header = memoryview(bytearray(_HEADER.size))

    def next(self, wait: bool) -> bool:
        """Read the next message, for whoever expects it; returns whether there was one. `wait`: until there is.
        ConnectionError when the peer is gone; RankError if the message does not fit: then it is passed over."""
        assert self.connection is not None
        if not wait:
            try:
                self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError:
                return False
        tag, size, code = _HEADER.unpack(self._read(self.header))
        if tag not in self.expected:
            content = bytearray(size)
            self._read(memoryview(content))
            self.early.setdefault(tag, []).append((content, code))
            return True
        receive = _take(self.expected, tag)
        try:
            place = _place(receive.tensor, size, code, tag, self.peer)
        except RankError:
            some = memoryview(bytearray(min(size, _SOME)))
            for start in range(0, size, _SOME):
                self._read(some[: size - start])
            raise
        self._read(place)
        receive.done = True
        return True

    def _read(self, into: memoryview) -> memoryview:
        """Wait for as many bytes as `into` has. ConnectionError when the peer is gone."""
        assert self.connection is not None
        have = 0
        while have < len(into):
            try:
                got = self.connection.recv_into(into[have:], 0, socket.MSG_WAITALL)
            except OSError:  # it has ended, or its host is cut off
                got = 0
            if not got:
                raise ConnectionError(f"rank {self.peer} is gone: it closed the connection")
            have += got
        return into


class SocketReceive:
    """A receive that was posted. Waiting for it reads the connection until it is there."""

    def __init__(self, sockets: Sockets, link: _Incoming, tensor: Tensor, tag: int, unless: int | None) -> None:
        self.sockets = sockets
        self.link = link
        self.tensor = tensor
        self.tag = tag
        self.unless = unless
        self.done = False
        if tag in link.early:
            content, code = _take(link.early, tag)
            _place(tensor, len(content), code, tag, link.peer)[:] = content
            self.done = True
        else:
            link.expected.setdefault(tag, []).append(self)

    def wait(self) -> None:
        link = self.link
        if link.connection is None:
            self.sockets.accept(link)
        while not self.is_completed(wait=True):
            pass
        if not self.done and self in (waiting := link.expected.get(self.tag, [])):  # another message has come
            waiting.remove(self)
            if not waiting:
                del link.expected[self.tag]

    def is_completed(self, wait: bool = False) -> bool:
        """Whether it is there, or the message in its place. Reads what has come; with `wait`, one message."""
        link = self.link
        while not self.done and self.unless not in link.early:
            if link.connection is None or not link.next(wait) or wait:
                break
        return self.done or self.unless in link.early


def _place(tensor: Tensor, size: int, code: int, tag: int, peer: int) -> memoryview:
    """The memory that a message is read into. RankError if its size or dtype is not the expected one."""
    place = memory_of(tensor)
    if size != len(place) or code != dtype_code(tensor.dtype):
        kind = "the same dtype" if code == dtype_code(tensor.dtype) else "another dtype"
        raise RankError(
            f"message {tag} of rank {peer} has {size} bytes of {kind}, but {len(place)} bytes of "
            f"{tensor.dtype} are expected"
        )
    return place


def _take(table: dict[int, list[_T]], tag: int) -> _T:
    entries = table[tag]
    if len(entries) > 1:
        return entries.pop(0)
    return table.pop(tag)[0]
