"""The sending end of messages between the ranks of one machine; sockets.py has the picture."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from typing import Any, Protocol

from torch import Tensor

from minipar.comm.helper import Helper
from minipar.comm.transport.stream import Stream

LONG = 128 << 10  # bytes from which a ring is faster than a socket
_NAP, _SLICE = 5e-4, 0.05


class Work(Protocol):
    """An operation under way, as torch's process groups hand it out."""

    def wait(self) -> object: ...
    def is_completed(self) -> bool: ...


class Outgoing:
    """The way to one peer. What finds no room at once is written later, in order, by whoever comes first: a wait for
    one of the messages, or the helper thread."""

    def __init__(self, connection: socket.socket, ring: Stream | None, peer: int, flusher: Flusher) -> None:
        self.connection = connection
        self.ring = ring
        self.peer = peer
        self.flusher = flusher
        self.lock = threading.Lock()  # of whoever writes
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
        """What there is room for now; how many bytes. ConnectionError when the peer is gone."""
        try:
            return self.connection.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionError(f"rank {self.peer} is gone") from error

    def _write(self, sent: _Sent) -> int:
        """Go on with a message; how many bytes."""
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
        """Write what waits, as far as there is room; whether anything was. If another thread is at it: leave it to
        that, or (`patient`) wait for it, in slices."""
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
        """Until there is room, or not for long."""
        sent = self.backlog[0] if self.backlog else None
        if sent is not None and sent.ring is not None and len(sent.rest) == 1:
            sent.ring.wait_to_write()
        elif sent is not None:
            select.select([], [self.connection], [], _NAP)

    def close(self) -> None:
        for sent in list(self.backlog):
            sent.error = ConnectionError(f"rank {self.peer} is gone, or this one has closed its Communicator")
            sent.done = True
        self.connection.close()


class _Sent:
    """A message of which a part waits for room. It keeps the tensor until then."""

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


class _Done:
    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


DONE = _Done()  # of a message that the kernel took at once


def ended(connection: socket.socket) -> bool:
    """Whether the other end was closed, by its process or by the end of that."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
