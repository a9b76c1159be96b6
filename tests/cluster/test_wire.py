"""Messages between driver and ranks, whole and in pieces."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from minipar.cluster import parcel, wire

BIG = np.arange(1 << 20, dtype=np.uint8)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_a_message_larger_than_the_socket_holds(pair: Pair) -> None:
    data = os.urandom(5_000_000)
    thread = threading.Thread(target=wire.send, args=(pair[0], data))
    thread.start()
    assert wire.receive(pair[1]) == data
    thread.join()


def test_pieces_are_put_together_without_waiting(pair: Pair) -> None:
    inbox = wire.Inbox(pair[1])
    assert inbox.read() is None
    body = pickle.dumps(("whole", 5))
    for byte in struct.pack("!Q", len(body)) + body:
        assert inbox.read() is None
        pair[0].sendall(bytes([byte]))
    assert inbox.read() == ("whole", 5)
    assert inbox.read() is None


def test_the_end_is_told_also_within_a_message(pair: Pair) -> None:
    inbox = wire.Inbox(pair[1])
    pair[0].sendall(b"\0\0\0")
    assert inbox.read() is None
    pair[0].close()
    with pytest.raises(EOFError):
        inbox.read()
    with pytest.raises(EOFError):
        wire.receive(pair[1])
    pair[1].close()
    with pytest.raises(OSError):
        wire.send(pair[1], "nobody")


def test_a_parcel_brings_its_memory_file(pair: Pair) -> None:
    sent = parcel.pack(BIG)
    for _ in range(2):  # the same parcel to two receivers
        wire.send(pair[0], ("result", sent))
    sent.close()
    wire.send(pair[0], ("no parcel", 1))
    _, first = wire.receive(pair[1])
    _, second = wire.receive(pair[1])
    assert wire.receive(pair[1]) == ("no parcel", 1)
    assert not os.get_inheritable(first.segment.descriptor)
    one, two = parcel.unpack(first), parcel.unpack(second)
    one[:] = 0
    np.testing.assert_array_equal(two, BIG)
