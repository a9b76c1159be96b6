"""Point-to-point messages between the ranks of one machine, over Unix sockets: one connection per pair and direction.

    header (tag, bytes, dtype) | data        written at once if the kernel's buffer takes it, else by a helper thread
    read by the receiver when it waits for it, straight into the tensor

gloo hands every message to a thread of its own on both sides. On a machine with fewer cores than ranks these
switches cost more than a message of a few kilobytes; here there are none for messages that fit the kernel's buffer
(about 200 KiB). A message of another size or dtype than the waiting tensor is an error, where gloo would abort the
process or leave stale data.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import struct
import threading
import zlib
from collections import deque
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from minipar.errors import RankError

_HEADER = struct.Struct("<qqI")  # tag, bytes, dtype
_WHO = struct.Struct("<i")
_T = TypeVar("_T")
_BUFFER = 4 << 20  # asked for; the kernel gives what its limits allow


class Work(Protocol):
    """An operation under way, as torch's process groups hand it out."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Sockets:
    """One rank's connections to the others. `path` is the same for all ranks, in a folder that only they can open."""

    def __init__(self, rank: int, path: str) -> None:
        self.rank = rank
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.{rank}")
        self.listener.bind(f"{path}.{rank}")
        self.listener.listen(128)
        self.outgoing: dict[int, _Outgoing] = {}
        self.incoming: dict[int, _Incoming] = {}

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending a contiguous CPU tensor; never blocks. All ranks must have made their `Sockets` before."""
        link = self.outgoing.get(peer)
        if link is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            connection.connect(f"{self.path}.{peer}")
            connection.sendall(_WHO.pack(self.rank))
            link = self.outgoing[peer] = _Outgoing(connection, peer)
        data = _bytes_of(tensor)
        return link.send(_HEADER.pack(tag, len(data), _code(tensor.dtype)), data, tensor)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Receive into a contiguous CPU tensor: filled when `wait` of the result has returned."""
        link = self.incoming.get(peer)
        if link is None:
            link = self.incoming[peer] = _Incoming(peer)
        return _Received(self, link, tensor, tag)

    def accept(self, link: _Incoming) -> socket.socket:
        """The connection of a peer; waits until it has made one."""
        while link.connection is None:
            connection, _ = self.listener.accept()
            (who,) = _WHO.unpack(_exactly(connection, memoryview(bytearray(_WHO.size)), link.peer))
            other = self.incoming.setdefault(who, _Incoming(who))
            other.connection = connection
        return link.connection

    def close(self) -> None:
        """End all connections. What was not delivered is lost."""
        for out in self.outgoing.values():
            out.close()
        for link in self.incoming.values():
            if link.connection is not None:
                link.connection.close()
        self.listener.close()
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}.{self.rank}")


# sending --------------------------------------------------------------------------------------------------------------


class _Outgoing:
    """The connection to one peer. What the kernel does not take at once is written by a thread, in order."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.connection = connection
        self.peer = peer
        self.lock = threading.Lock()
        self.waiting = 0  # messages that the thread has not written yet
        self.backlog: queue.SimpleQueue[tuple[_Sent, memoryview] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def send(self, header: bytes, data: memoryview, tensor: Tensor) -> Work:
        done = 0
        if not self.waiting:  # only the thread makes it smaller, and only this one makes it larger
            try:
                done = self.connection.sendmsg([header, data], [], socket.MSG_DONTWAIT)
            except BlockingIOError:
                done = 0
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ConnectionError(f"rank {self.peer} is gone") from error
            if done == len(header) + len(data):
                return DONE
        rest = memoryview(header + data)[done:] if done < len(header) else data[done - len(header) :]
        sent = _Sent(tensor)
        with self.lock:
            self.waiting += 1
        self.backlog.put((sent, rest))
        if self.thread is None:
            self.thread = threading.Thread(target=self._write, name=f"to rank {self.peer}", daemon=True)
            self.thread.start()
        return sent

    def _write(self) -> None:
        while (entry := self.backlog.get()) is not None:
            sent, rest = entry
            try:
                self.connection.sendall(rest)
            except OSError as error:
                sent.error = error
            with self.lock:
                self.waiting -= 1
            sent.tensor = None
            sent.written.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.backlog.put(None)
        self.connection.close()


class _Sent:
    """A message that the thread writes. It keeps the tensor until then."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.written = threading.Event()
        self.error: OSError | None = None

    def wait(self) -> None:
        self.written.wait()
        if self.error is not None:
            raise ConnectionError("a rank that a message was for is gone") from self.error

    def is_completed(self) -> bool:
        return self.written.is_set()


class _Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


DONE = _Done()  # of a message that the kernel took at once


# receiving ------------------------------------------------------------------------------------------------------------


class _Incoming:
    """The connection from one peer, the receives that wait for its messages, and messages that came unexpected."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.connection: socket.socket | None = None
        self.expected: dict[int, deque[_Received]] = {}
        self.early: dict[int, deque[tuple[bytearray, int]]] = {}
        self.header = memoryview(bytearray(_HEADER.size))


class _Received:
    """A receive that was posted. Waiting for it reads the connection until it is there."""

    def __init__(self, sockets: Sockets, link: _Incoming, tensor: Tensor, tag: int) -> None:
        self.sockets = sockets
        self.link = link
        self.tensor = tensor
        self.tag = tag
        self.done = False
        if tag in link.early:
            content, code = _take(link.early, tag)
            self._check(len(content), code)
            _bytes_of(tensor)[:] = content
            self.done = True
        else:
            link.expected.setdefault(tag, deque()).append(self)

    def wait(self) -> None:
        link = self.link
        connection = link.connection or self.sockets.accept(link)
        while not self.done:
            tag, size, code = _HEADER.unpack(_exactly(connection, link.header, link.peer))
            if tag in link.expected:
                receive = _take(link.expected, tag)
                receive._check(size, code)
                _exactly(connection, _bytes_of(receive.tensor), link.peer)
                receive.done = True
            else:
                content = bytearray(size)
                _exactly(connection, memoryview(content), link.peer)
                link.early.setdefault(tag, deque()).append((content, code))

    def is_completed(self) -> bool:
        return self.done

    def _check(self, size: int, code: int) -> None:
        expected = self.tensor.numel() * self.tensor.element_size()
        if (size, code) != (expected, _code(self.tensor.dtype)):
            kind = "the same dtype" if code == _code(self.tensor.dtype) else "another dtype"
            raise RankError(
                f"message {self.tag} of rank {self.link.peer} has {size} bytes of {kind}, but {expected} bytes of "
                f"{self.tensor.dtype} are expected"
            )


def _take(table: dict[int, deque[_T]], tag: int) -> _T:
    entries = table[tag]
    entry = entries.popleft()
    if not entries:
        del table[tag]
    return entry


def _exactly(connection: socket.socket, into: memoryview, peer: int) -> memoryview:
    """Read as many bytes as `into` has."""
    have, size = 0, len(into)
    while have < size:
        try:
            got = connection.recv_into(into[have:] if have else into, 0, socket.MSG_WAITALL)
        except ConnectionResetError as error:
            raise ConnectionError(f"rank {peer} is gone") from error
        if got == 0:
            raise ConnectionError(f"rank {peer} is gone: it closed the connection")
        have += got
    return into


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, of any dtype."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


_codes: dict[torch.dtype, int] = {}


def _code(dtype: torch.dtype) -> int:
    """A number for a dtype, the same in every process."""
    if dtype not in _codes:
        _codes[dtype] = zlib.crc32(str(dtype).encode())
    return _codes[dtype]
