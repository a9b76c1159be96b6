"""Looking before sleeping: it finds what comes soon, gives up after a while, and is rare where it finds nothing."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from minipar.server import looking
from minipar.server.looking import Looking


def nothing() -> int:
    raise BlockingIOError


@pytest.fixture
def waits() -> Looking:
    found = Looking()
    found.alone = False
    return found


def test_what_comes_while_it_looks_is_found(waits: Looking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "SHORT", 30.0)
    here, there = socket.socketpair()
    with here, there:
        later = threading.Timer(0.05, there.send, [b"abc"])
        later.start()
        assert waits.find(lambda: len(here.recv(8, socket.MSG_DONTWAIT))) == 3
        later.join()
    assert waits.misses == 0


def test_it_gives_up_and_then_looks_rarely(waits: Looking) -> None:
    looked = []
    for _ in range(200):
        count = waits.misses
        assert waits.find(nothing) is None
        looked.append(waits.misses > count or waits.asleep == 63)
    assert [k for k, did in enumerate(looked) if did] == [0, 2, 6, 14, 30, 62, 126, 190]
    misses = waits.misses
    assert waits.find(lambda: 5) == 5
    assert waits.misses == misses  # it was there already
    while waits.asleep:
        waits.find(nothing)
    found = iter((False, False, True))
    assert waits.find(lambda: 6 if next(found) else nothing()) == 6
    assert waits.misses == waits.asleep == 0  # at once again


def test_it_gives_up_soon(waits: Looking) -> None:
    start = time.perf_counter()
    waits.find(nothing)
    assert looking.SHORT <= time.perf_counter() - start < 1.0


def test_an_error_is_no_wait(waits: Looking) -> None:
    def broken() -> int:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        waits.find(broken)


def test_with_one_core_it_never_looks(waits: Looking) -> None:
    waits.alone = True
    looks = iter((False, True))
    assert waits.find(lambda: 5 if next(looks) else nothing()) is None
    assert next(looks)
