"""Lanes: collectives by programs of one's own that run while a rank computes.

    rank's thread   B 3 | start AR 3 | B 2 | start AR 2 | B 1 | B 0 | wait for AR 3, AR 2 ...
    lane 0,1,2,3               [ AR 3: send, receive, add ... ][ AR 2 ...   ]

A lane is a thread of a rank for one group of ranks. It plays the group's collectives (playing.py) one after another, in
the order in which they were started, and has messages of its own: nobody else reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Later
from datetime import timedelta
from typing import Any

from torch import Tensor

from minipar.cluster.threads import InTurn
from minipar.comm.transport.interface import OwnMessages, Work

_SLICE = 0.05  # seconds of a wait between two looks for an interrupt


class Lane:
    """A rank's thread for one group, and its messages; `rank` and all peers are numbers within the group. `label`: what
    it plays."""

    def __init__(self, messages: OwnMessages, rank: int, label: str) -> None:
        self.messages, self.rank, self.label = messages, rank, label
        self._turns = InTurn(f"plays {label}")

    def isend(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Start sending a contiguous tensor."""
        return self.messages.send(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int = 0) -> Work:
        """Start receiving into a contiguous tensor."""
        return self.messages.receive(tensor, peer, tag)

    def play(self, run: Callable[[], object]) -> Playing:
        """Run this after all that came before it."""
        return Playing(self._turns.submit(run), self.label)

    def close(self) -> None:
        """End the messages, and so what waits for one; the thread ends then."""
        self._turns.shutdown(patient=False)
        self.messages.close()


class Playing:
    """A collective that a lane plays; it takes the place of a backend's work."""

    def __init__(self, future: Future[Any], label: str) -> None:
        self._future, self.label = future, label

    def wait(self, *_: timedelta) -> None:
        """Return when it is complete. RuntimeError or ConnectionError when a peer is gone."""
        while True:
            try:
                self._future.result(_SLICE)
                return
            except Later:
                if self._future.done():  # (it has ended just now, or the error is its own)
                    self._future.result()
                    return

    def is_completed(self) -> bool:
        return self._future.done()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` when it is complete, from the lane's thread."""
        self._future.add_done_callback(lambda _: call())
