"""Messages over sockets, tried with two ends in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from minipar.comm.transport.sockets import Far, Sockets
from minipar.errors import RankError


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Sockets, Sockets]]:
    a, b = (Sockets(rank, str(tmp_path / "s")) for rank in range(2))
    yield a, b
    a.close()
    b.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.randn(5).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.arange(3 << 20, dtype=torch.int64),  # 24 MiB: more than any kernel buffer
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_what_is_sent_arrives(ends, tensor):
    a, b = ends
    sent = a.send(tensor, 1, 5)
    got = torch.empty_like(tensor)
    received = b.receive(got, 0, 5)
    assert not received.is_completed()
    received.wait()
    received.wait()
    sent.wait()
    assert received.is_completed()
    assert sent.is_completed()
    assert torch.equal(got, tensor)


def test_a_send_never_blocks_and_order_is_kept(ends):
    """Far more than the kernel buffers, before anybody receives; also small messages behind large ones."""
    a, b = ends
    sizes = [10, 1 << 20, 10, 1 << 21, 10]
    sends = [a.send(torch.full((n,), float(k)), 1, k) for k, n in enumerate(sizes)]
    assert not sends[-1].is_completed()
    for k, n in enumerate(sizes):
        got = torch.empty(n)
        b.receive(got, 0, k).wait()
        assert got.eq(k).all()
    for sent in sends:
        sent.wait()


def test_messages_are_told_apart_by_tag_whatever_their_order(ends):
    a, b = ends
    for tag in (1, 2, 3):
        a.send(torch.tensor([float(tag)]), 1, tag)
    third, first, second = torch.empty(1), torch.empty(1), torch.empty(1)
    b.receive(third, 0, 3).wait()  # 1 and 2 have come, and were expected by nobody
    late = b.receive(first, 0, 1)
    assert late.is_completed()
    b.receive(second, 0, 2).wait()
    assert [t.item() for t in (first, second, third)] == [1, 2, 3]


@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(200_000)]
)
@pytest.mark.parametrize("early", [False, True])
def test_another_size_or_dtype_is_an_error(ends, other, early):
    """gloo would abort the process, or leave stale data."""
    a, b = ends
    a.send(other, 1, 9)
    if early:
        a.send(torch.zeros(1), 1, 10)
        b.receive(torch.empty(1), 0, 10).wait()
        with pytest.raises(RankError, match="message 9 of rank 0"):
            b.receive(torch.empty(4), 0, 9)
    else:
        with pytest.raises(RankError, match=r"16 bytes of torch\.float32 are expected"):
            b.receive(torch.empty(4), 0, 9).wait()
    a.send(torch.ones(4), 1, 11)  # the next message arrives
    got = torch.empty(4)
    b.receive(got, 0, 11).wait()
    assert got.tolist() == [1, 1, 1, 1]


def test_what_is_here_is_read_without_waiting(ends):
    a, b = ends
    got, other = torch.empty(3), torch.empty(1)
    first, second = b.receive(got, 0, 1), b.receive(other, 0, 2)
    assert not first.is_completed(), "nobody has connected"
    a.send(torch.zeros(1), 1, 0)
    b.receive(torch.empty(1), 0, 0).wait()
    assert not first.is_completed(), "nothing has come"
    a.send(torch.ones(1), 1, 2)
    a.send(torch.arange(3.0), 1, 1)
    assert first.is_completed()
    assert got.tolist() == [0, 1, 2]
    assert second.done, "it came before, and was expected"


def test_a_peer_that_is_gone(ends):
    a, b = ends
    a.send(torch.zeros(4), 1, 0)
    received = b.receive(torch.empty(4), 0, 0)
    waiting = b.receive(torch.empty(4), 0, 1)
    received.wait()
    threading.Timer(0.1, a.close).start()
    with pytest.raises(ConnectionError, match="rank 0 is gone"):
        waiting.wait()


def test_sending_to_a_peer_that_is_gone(ends):
    a, b = ends
    a.send(torch.zeros(4), 1, 0)
    b.receive(torch.empty(4), 0, 0).wait()
    large = a.send(torch.zeros(3 << 21), 1, 1)  # 24 MiB: more than any kernel buffer
    b.close()
    with pytest.raises(ConnectionError, match="gone"):
        large.wait()
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        a.send(torch.zeros(4), 1, 2)


# ranks of other hosts -------------------------------------------------------------------------------------------------


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Sockets, Sockets]]:
    store = dist.HashStore()
    made = tuple(
        Sockets(rank, str(tmp_path / f"host {rank}"), Far(frozenset({1 - rank}), "127.0.0.1", store, b"t" * 32))
        for rank in range(2)
    )
    yield made  # type: ignore[misc]
    for each in made:
        each.close()


def test_messages_between_hosts(far):
    """The order of tags is free, and a message that is here can be seen."""
    a, b = far
    assert not b.readable([0], 0.0)
    short, long = torch.arange(3), torch.randn(500_000)
    sent = [a.send(short, 1, 7), a.send(long, 1, 8)]
    assert b.readable([0], 5.0)
    into = torch.empty(500_000)
    b.receive(into, 0, 8).wait()
    again = torch.empty(3, dtype=torch.int64)
    b.receive(again, 0, 7).wait()
    for one in sent:
        one.wait()
    assert torch.equal(into, long)
    assert torch.equal(again, short)


def test_both_ends_prove_the_key(far):
    a, b = far
    a.far = a.far._replace(token=b"x" * 32)
    with pytest.raises(ConnectionError, match=r"rank 1 is not reached at 127\.0\.0\.1"):
        a.send(torch.ones(1), 1, 3)
    assert not b.readable([0], 0.1)
    a.far = a.far._replace(token=b"t" * 32)
    a.send(torch.ones(1), 1, 3)
    b.receive(into := torch.zeros(1), 0, 3).wait()
    assert into.item() == 1.0


def test_a_host_that_is_gone(far):
    a, b = far
    a.warm_up([1])
    assert not a.lost(1)
    b.readable([0], 5.0)  # (which takes the connection)
    b.close()
    until = time.monotonic() + 5.0
    while not a.lost(1):
        assert time.monotonic() < until
    b.far.store.set("messages 0", '["127.0.0.1", 9]')
    with pytest.raises(ConnectionError, match="rank 0 is not reached at 127.0.0.1"):
        b.send(torch.ones(1), 0, 1)
