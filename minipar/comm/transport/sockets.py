"""Point-to-point messages: a socket per pair and direction, and shared memory between ranks of one machine.

    header (tag, bytes, dtype) | data        through the socket: at once if its buffer has room
    header .......... data ...........       a long message's data through a ring in shared memory (stream.py)

Ranks of one machine use Unix sockets; those of other hosts (`Far`) are reached by TCP, without a ring. If one of these
hosts is cut off, the system notices after a few seconds that its connections no longer answer.

If there is no room, a helper thread writes the rest, or the thread that waits for the send, whichever comes first. The
receiver reads when it waits for a message, straight into the tensor. If the socket has ended, the other rank is gone.

gloo gives every message to a thread of its own on both sides. On a machine with fewer cores than ranks these
switches cost more than a message of a few kilobytes; here there are none for messages that find room. Through a
socket the system copies a long message into pages that it must allocate first: the ring takes two thirds of the
time. For a short message the socket is faster, since it wakes the receiver in the same call. A message of another size
or dtype than the waiting tensor is an error, where gloo would abort the process or leave stale data.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import mmap
import os
import select
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from minipar.cluster.processes import readable
from minipar.cluster.threads import Helper
from minipar.comm.transport import shared_memory, stream
from minipar.comm.transport.interface import DONE, Work
from minipar.comm.transport.stream import Stream
from minipar.comm.values import dtype_code
from minipar.errors import RankError

_HEADER = struct.Struct("<qqI")  # tag, bytes, dtype
_WHO = struct.Struct("<i?32s")  # rank, whether a descriptor of memory comes with it, the token
_CREDENTIALS = struct.Struct("3i")  # of the process at the other end of a Unix socket: process, user, group
_T = TypeVar("_T")
_BUFFER = 4 << 20  # bytes that are requested; the kernel gives what its limits allow
LONG = 128 << 10  # bytes from which a ring is faster than a socket
_NAP, _SLICE = 5e-4, 0.05
_PROOF = 10.0  # seconds in which a new connection says who it is
# After so many seconds without a byte the system asks the other host every second, and gives it up after the last time.
_ALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPALIVE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4}


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
        self.token = bytes(32) if far is None else far.token
        here = socket.socket(socket.AF_UNIX)
        self.unlink()
        here.bind(f"{path}.{rank}")
        if not path.startswith("\0"):
            os.chmod(f"{path}.{rank}", 0o600)
        self.listeners = [here]
        if far is not None:
            family = socket.AF_INET6 if ":" in far.address else socket.AF_INET
            self.listeners.append(socket.create_server((far.address, 0), family=family, backlog=128))
            port = self.listeners[1].getsockname()[1]
            far.store.set(f"messages {rank}", json.dumps([far.address, port]))
        here.listen(128)
        self.flusher = Flusher("writes messages")
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, _Incoming] = {}

    def among(self, members: tuple[int, ...]) -> Sockets:
        """Connections of their own among these ranks, which count from 0. All of them must have made theirs before the
        first message."""
        name = f"{zlib.crc32(str(members).encode()):x}"
        far = None
        if self.far is not None:
            others = frozenset(k for k, rank in enumerate(members) if rank in self.far.ranks)
            far = self.far._replace(ranks=others, store=dist.PrefixStore(name, self.far.store))
        return Sockets(members.index(self.rank), f"{self.path}-{name}", far)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending a contiguous CPU tensor; never blocks. All ranks must have made their `Sockets` before."""
        link = self.outgoing.get(peer) or self._outgoing(peer)
        data = _bytes_of(tensor)
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
            opened = self._connect_far(self.far, peer) if self.far is not None and far else self._connect(peer)
            link = self.outgoing[peer] = Outgoing(*opened, peer, self.flusher)
        return link

    def _connect_far(self, far: Far, peer: int) -> tuple[socket.socket, None]:
        """Connect with a rank of another host. ConnectionError if that is not reached."""
        address, port = json.loads(far.store.get(f"messages {peer}").decode())
        try:
            connection = socket.create_connection((address, port), _PROOF)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            keep_alive(connection)
            connection.sendall(_WHO.pack(self.rank, False, self.token))
            connection.settimeout(None)
        except OSError as error:
            raise ConnectionError(f"rank {peer} is not reached at {address}, port {port}: {error}") from error
        return connection, None

    def _connect(self, peer: int) -> tuple[socket.socket, Stream | None]:
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # macOS gives nothing where Linux gives what its limits allow
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        connection.connect(f"{self.path}.{peer}")
        try:
            memory = shared_memory.make(stream.SIZE)
        except OSError:
            connection.sendall(_WHO.pack(self.rank, False, self.token))
            return connection, None
        try:
            ring = Stream(mmap.mmap(memory, stream.SIZE))
            socket.send_fds(connection, [_WHO.pack(self.rank, True, self.token)], [memory])
        finally:
            os.close(memory)
        return connection, ring

    def receive(self, tensor: Tensor, peer: int, tag: int, unless: int | None = None) -> SocketReceive:
        """Receive into a contiguous CPU tensor: filled when `wait` of the result has returned.

        unless   the tag of a message that may come in its place: then `wait` returns too, and `done` stays False
        """
        link = self.incoming.get(peer)
        if link is None:
            link = self.incoming[peer] = _Incoming(peer)
        return SocketReceive(self, link, tensor, tag, unless)

    def take(self, tensor: Tensor, peer: int, tag: int) -> bool:
        """Receive the message, if it is the next one and already here; returns whether it was. Never waits."""
        link = self.incoming.get(peer)
        if link is None or link.connection is None or link.expected or link.early:
            return False
        try:
            got = link.connection.recv_into(link.header, 0, socket.MSG_DONTWAIT)
        except OSError:
            return False  # (nothing is there; if the peer is gone, waiting for the message says so)
        if not got:
            return False
        if got < _HEADER.size:
            link.read(link.header[got:])
        found, size, code = _HEADER.unpack(link.header)
        if found != tag:
            link.keep(found, size, code)
            return False
        link.read_into(tensor, size, code, tag)
        return True

    def readable(self, peers: Sequence[int], seconds: float) -> bool:
        """Whether a message of one of these peers is here, or comes within so many seconds.

        True also if a peer is gone: receiving from it raises the error.
        """
        links = [self.incoming.setdefault(peer, _Incoming(peer)) for peer in peers]
        if any(link.early for link in links):
            return True
        watched = [link.connection for link in links if link.connection is not None]
        unknown = self.listeners if len(watched) < len(links) else []
        found = readable([link.fileno() for link in (*watched, *unknown)], seconds)
        new = [listener for listener in unknown if listener.fileno() in found]
        if new:
            self._accept(new[0])
            return self.readable(peers, 0.0)
        return bool(found)

    def _accept(self, listener: socket.socket) -> None:
        """Take the connection of a peer that has made one, or refuse that of a stranger."""
        connection, _ = listener.accept()
        data, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + _PROOF
            while len(data) < _WHO.size:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                part, more, _, _ = socket.recv_fds(connection, _WHO.size - len(data), 1)
                data, descriptors = data + part, [*descriptors, *more]
                if not part:
                    break
            connection.settimeout(None)
        who, shared, token = _WHO.unpack(data.ljust(_WHO.size, b"\0"))
        known = len(data) == _WHO.size and hmac.compare_digest(token, self.token) and same_user(connection)
        if not known or shared != len(descriptors):  # the peer ended before it said who it was, or it is none
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return
        if connection.family != socket.AF_UNIX:
            keep_alive(connection)
        other = self.incoming.setdefault(who, _Incoming(who))
        if shared:
            other.ring = Stream(mmap.mmap(descriptors[0], stream.SIZE))
            os.close(descriptors[0])
        other.connection = connection

    def accept(self, link: _Incoming) -> socket.socket:
        """The connection of a peer; waits until it has made one."""
        while link.connection is None:
            found = self.listeners
            if len(found) > 1:
                heard = readable(listener.fileno() for listener in found)
                found = [listener for listener in found if listener.fileno() in heard]
            self._accept(found[0])
        return link.connection

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


def keep_alive(connection: socket.socket) -> None:
    """Send short messages at once, and notice when the other host is cut off."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):  # (systems differ)
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is of this process's user. Everybody can find the names of
    sockets that are no files."""
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1]) == os.geteuid()


# sending --------------------------------------------------------------------------------------------------------------


class Outgoing:
    """The connection to one peer. What finds no room at once is written later, in order, by a wait for one of the
    messages or by the helper thread, whichever comes first."""

    def __init__(self, connection: socket.socket, ring: Stream | None, peer: int, flusher: Flusher) -> None:
        self.connection = connection
        self.ring = ring
        self.peer = peer
        self.flusher = flusher
        self.lock = threading.Lock()  # held by the thread that writes
        self.backlog: deque[_Sent] = deque()

    def send(self, header: bytes, data: memoryview, tensor: Tensor) -> Work:
        ring = self.ring if len(data) > LONG else None
        done = 0
        if not self.backlog:  # only this thread makes it longer
            done = self._through_socket([header] if ring is not None else [header, data])
            if ring is not None and done == len(header):
                done += ring.write(data)
            if done == len(header) + len(data):
                return DONE
        rest = [memoryview(header)[done:], data[max(0, done - len(header)) :]]
        sent = _Sent(self, tensor, ring, rest)
        self.backlog.append(sent)
        self.flusher.watch(self)
        return sent

    def _through_socket(self, parts: list[Any]) -> int:
        """Write as much as there is room for; returns how many bytes. ConnectionError when the peer is gone."""
        try:
            return self.connection.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionError(f"rank {self.peer} is gone") from error

    def _write(self, sent: _Sent) -> int:
        """Write more of a message; returns how many bytes."""
        total = 0
        while sent.rest:
            data = sent.rest[0]
            if sent.ring is not None and len(sent.rest) == 1:
                count = self._through_ring(sent.ring, data)
            else:
                count = self._through_socket([data])
            total += count
            if count < len(data):
                sent.rest[0] = data[count:]
                break
            del sent.rest[0]
        return total

    def _through_ring(self, ring: Stream, data: memoryview) -> int:
        count = ring.write(data)
        if not count and ended(self.connection):
            raise ConnectionError(f"rank {self.peer} is gone")
        return count

    def flush(self, patient: bool = False) -> bool:
        """Write what waits, as far as there is room; returns whether anything was written. If another thread is doing
        that, return True at once, or (`patient`) wait for it, in slices."""
        if not self.lock.acquire(patient, _SLICE if patient else -1):
            return True
        moved = False
        try:
            while self.backlog:
                sent = self.backlog[0]
                try:
                    count = self._write(sent)
                except ConnectionError as error:
                    sent.error = error
                    sent.rest.clear()
                    count = 1
                moved = moved or count > 0
                if sent.rest:
                    break
                sent.tensor = None
                sent.done = True
                self.backlog.popleft()
        finally:
            self.lock.release()
        return moved

    def wait_for_room(self) -> None:
        """Wait until there is room, for a short time at most."""
        sent = self.backlog[0] if self.backlog else None
        if sent is not None and sent.ring is not None and len(sent.rest) == 1:
            sent.ring.wait_to_write()
        elif sent is not None:
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

    def __init__(self, link: Outgoing, tensor: Tensor, ring: Stream | None, rest: list[memoryview]) -> None:
        self.link = link
        self.tensor: Tensor | None = tensor
        self.ring = ring  # for the last part
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
        moved = [link.flush() for link in list(self.waiting)]
        with self.lock:
            self.waiting -= {link for link in self.waiting if not link.backlog}
            first = next(iter(self.waiting), None)
        if first is not None and not any(moved):
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
        self.ring: Stream | None = None
        self.expected: dict[int, list[SocketReceive]] = {}
        self.early: dict[int, list[tuple[bytearray, int]]] = {}
        self.header = memoryview(bytearray(_HEADER.size))

    def read(self, into: memoryview, long: bool = False) -> memoryview:
        """Wait for as many bytes as `into` has. ConnectionError when the peer is gone."""
        connection, ring = self.connection, self.ring if long else None
        assert connection is not None
        have, size = 0, len(into)
        while have < size:
            rest = into[have:] if have else into
            if ring is None:
                try:
                    got = connection.recv_into(rest, 0, socket.MSG_WAITALL)
                except OSError:  # it has ended, or its host is cut off
                    got = 0
                over = not got
            else:
                ring.wait_to_read()
                over = ended(connection)  # checked before the last read: the peer may have written all before it ended
                got = ring.read(rest)
            if over and not got:
                raise ConnectionError(f"rank {self.peer} is gone: it closed the connection")
            have += got
        return into

    def read_into(self, tensor: Tensor, size: int, code: int, tag: int) -> None:
        """Read a message, after its header. RankError if it does not fit; then it is passed over, and the next one can
        be read."""
        try:
            place = _place(tensor, size, code, tag, self.peer)
        except RankError:
            some = memoryview(bytearray(min(size, LONG)))
            for start in range(0, size, LONG):
                self.read(some[: size - start], size > LONG)
            raise
        self.read(place, size > LONG)

    def keep(self, tag: int, size: int, code: int) -> None:
        """Read a message that nobody waits for yet, after its header."""
        content = bytearray(size)
        self.read(memoryview(content), size > LONG)
        self.early.setdefault(tag, []).append((content, code))


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
        elif tag in link.expected:
            link.expected[tag].append(self)
        else:
            link.expected[tag] = [self]

    def wait(self) -> None:
        link = self.link
        if link.connection is None:
            self.sockets.accept(link)
        while not self.done:
            if self.unless in link.early:
                waiting = link.expected[self.tag]
                waiting.remove(self)
                if not waiting:
                    del link.expected[self.tag]
                return
            tag, size, code = _HEADER.unpack(link.read(link.header))
            if tag in link.expected:
                receive = _take(link.expected, tag)
                link.read_into(receive.tensor, size, code, tag)
                receive.done = True
            else:
                link.keep(tag, size, code)

    def is_completed(self) -> bool:
        return self.done or self.unless in self.link.early


def _place(tensor: Tensor, size: int, code: int, tag: int, peer: int) -> memoryview:
    """The memory that a message is read into. RankError if its size or dtype is not the expected one."""
    place = _bytes_of(tensor)
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


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, of any dtype."""
    size = tensor.nbytes
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
