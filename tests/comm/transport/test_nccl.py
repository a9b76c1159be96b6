"""NCCL's pairs without a GPU: a double connects two ranks at their first message, where each waits for the other."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minipar.comm.transport.nccl import _Messages

SOON = 2.0  # seconds that a rank waits for the other one


class Pairs:
    """Who has come to the first message of a pair in a group."""

    def __init__(self) -> None:
        self.barriers: dict[Any, threading.Barrier] = defaultdict(lambda: threading.Barrier(2))

    def group(self, name: str, rank: int) -> Any:
        connected: set[int] = set()

        def message(tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            if peer not in connected:
                self.barriers[name, min(rank, peer), max(rank, peer)].wait(SOON)
                connected.add(peer)
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(send=message, recv=message)


def ranks(count: int) -> list[_Messages]:
    """The messages of so many ranks, which are threads here."""
    pairs = Pairs()

    def messages(rank: int) -> _Messages:
        transport: Any = SimpleNamespace(
            rank=rank, device=torch.device("cpu"), make=lambda name, everyone: pairs.group(name, rank)
        )
        return _Messages(transport, tuple(range(count)))

    return [messages(rank) for rank in range(count)]


def in_threads(count: int, prepared: bool) -> list[BaseException]:
    """Every rank sends to all others before it receives from them, the next one first. What went wrong."""
    wrong: list[BaseException] = []

    def run(messages: _Messages) -> None:
        peers = [(messages.rank + k) % count for k in range(1, count)]
        try:
            if prepared:
                messages.warm_up(peers)
                messages.warm_up(peers)  # (nothing more happens)
            for way in (messages.send, messages.receive):
                for peer in peers:
                    way(torch.zeros(1), peer, 0)
        except threading.BrokenBarrierError as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(messages,)) for messages in ranks(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.parametrize("count", [2, 3, 5])
def test_pairs_that_both_send_first_are_connected_before(count: int) -> None:
    assert in_threads(count, prepared=True) == []


def test_without_that_they_would_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SOON", 0.2)
    assert len(in_threads(2, prepared=False)) == 2
