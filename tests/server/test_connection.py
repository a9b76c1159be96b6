"""Both ends of a server's connections: messages in any pieces, bytes in the right place, and messages that wait."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import closing
from functools import partial

import pytest

from minipar.server.connection import Connection, Peer, Refused
from minipar.server.framing import HEADER, Message, What, listen
from minipar.server.switchboard import Switchboard

TOKEN = b"t" * 32


class Heard:
    """A server's messages and their bytes."""

    def __init__(self) -> None:
        self.messages: list[tuple[Message, bytes]] = []
        self.memory = memoryview(b"")

    def target(self, peer: Peer, message: Message) -> memoryview:
        self.memory = memoryview(bytearray(message.size))
        return self.memory

    def done(self, peer: Peer, message: Message) -> None:
        self.messages.append((message, bytes(self.memory)))


@pytest.fixture
def ends(tmp_path):
    """A worker's end and a server's, each of which has proved itself."""
    heard, found = Heard(), []
    with closing(listen(f"unix:{tmp_path}/0")[0]) as listener:
        listener.setblocking(True)
        thread = threading.Thread(target=lambda: found.append(Connection(f"unix:{tmp_path}/0", TOKEN)))
        thread.start()
        peer = Peer(listener.accept()[0], TOKEN, heard.target, heard.done)
    while not peer.proved:
        peer.read()
    thread.join()
    with closing(found[0]) as line, closing(peer):
        yield line, peer, heard


def messages(sizes):
    draw = random.Random(len(sizes))
    return [(Message(What.PUSH, k, 1, 2, 3, 4, size), draw.randbytes(size)) for k, size in enumerate(sizes)]


@pytest.mark.parametrize("longest", [1, 7, 41, 5000, 1 << 20])
def test_messages_come_in_any_pieces(longest):
    """Short ones, none, and one that is longer than what is taken in at once."""
    near, far = socket.socketpair()
    heard, sent = Heard(), messages([0, 1, 40, 0, 3000, 50_000 if longest > 100 else 100, 5] * 3)
    data = b"".join(HEADER.pack(*message) + content for message, content in sent)
    draw = random.Random(longest)
    with closing(far), closing(Peer(near, b"", heard.target, heard.done)) as peer:
        while data:
            size = draw.randint(1, longest)
            done = far.send(data[:size])
            data = data[done:]
            peer.read()
        for _ in sent:
            peer.read()  # (one turn may not be enough for all)
        assert not peer.ended
    assert heard.messages == sent


def test_nothing_is_heard_before_the_proof():
    near, far = socket.socketpair()
    heard = Heard()
    with closing(far), closing(Peer(near, TOKEN, heard.target, heard.done)) as peer:
        far.sendall(bytes(64) + HEADER.pack(*Message(What.LEAVE)))
        with pytest.raises(Refused):
            peer.read()
        assert peer.ended
        assert not heard.messages


def test_an_answer_comes_to_where_it_belongs(ends):
    line, peer, _ = ends
    for size in (0, 10, 1000, 100_000):
        into = memoryview(bytearray(max(1000, size)))
        sent = random.Random(size).randbytes(size)
        peer.send(Message(What.ANSWER, 1, 2, 3, 4, 5), sent)
        message = line.receive()
        assert message == Message(What.ANSWER, 1, 2, 3, 4, 5, size)
        place = into if size == len(into) else memoryview(bytearray(size))
        line.read(place)
        assert place == sent


def test_messages_that_come_at_once_are_read_one_after_the_other(ends):
    """A text that is as long as the answer would be, and an answer behind it."""
    line, peer, _ = ends
    into = memoryview(bytearray(100))
    peer.send(Message(What.REFUSED), b"x" * 100)
    peer.send(Message(What.WELCOME))
    peer.send(Message(What.ANSWER), b"y" * 100)
    assert line.receive() == Message(What.REFUSED, size=100)
    assert line.text(100) == "x" * 100
    assert line.receive() == Message(What.WELCOME)
    assert line.receive().what == What.ANSWER
    line.read(into)
    assert into == b"y" * 100


def test_what_the_system_does_not_take_waits_its_turn():
    near, far = socket.socketpair()
    heard, written = Heard(), []
    sent = messages([0, 30_000_000, 10, 0, 200_000])
    with closing(far), closing(Peer(near, b"", heard.target, heard.done)) as peer:
        peer.send(*sent[0], lambda: written.append(0))
        peer.send(*sent[1], lambda: written.append(1))
        assert peer.busy
        assert written == [0]
        came = far.recv(1_000_000)  # so that there is room again
        for k in (2, 3, 4):
            peer.send(*sent[k], partial(written.append, k))
        while peer.busy:
            came += far.recv(1 << 24)
            peer.flush()
        assert written == [0, 1, 2, 3, 4]
        near.shutdown(socket.SHUT_WR)
        while more := far.recv(1 << 24):
            came += more
    assert came == b"".join(HEADER.pack(*message) + content for message, content in sent), "and nothing overtakes"


def test_many_small_messages_at_once_are_all_heard():
    """More than a connection's turn is long, in one write."""
    near, far = socket.socketpair()
    heard = Heard()
    with closing(socket.socket(socket.AF_UNIX)) as listener, closing(far):
        listener.bind("")
        listener.listen()
        board = Switchboard(listener, b"", heard.target, heard.done, lambda _: None)
        board.adopt(near)
        far.sendall(b"".join(HEADER.pack(*Message(What.PUSH, k, size=8)) + bytes(8) for k in range(200)))
        for _ in range(20):
            board.wait(0.05)
        board.close()
    assert [message.key for message, _ in heard.messages] == list(range(200))


def test_a_server_sleeps_until_a_message_comes_or_its_time_is_over():
    near, far = socket.socketpair()
    heard = Heard()
    with closing(socket.socket(socket.AF_UNIX)) as listener, closing(far):
        listener.bind("")
        listener.listen()
        board = Switchboard(listener, b"", heard.target, heard.done, lambda _: None)
        board.adopt(near)
        later = threading.Timer(0.05, far.sendall, [HEADER.pack(*Message(What.ROW, 2, size=3)) + b"abc"])
        later.start()
        board.wait(10)  # once: it does not return before the message is there
        later.join()
        assert [content for _, content in heard.messages] == [b"abc"]
        start = time.perf_counter()
        board.wait(0.02)
        assert 0.015 <= time.perf_counter() - start < 5
        assert len(heard.messages) == 1
        board.close()
