"""A replica of several ranks starts again as a whole when one of its ranks has died: the others wait for its messages.

    rank 0   life 0 | F B .. waits for rank 1 ...| ends itself    life 1 | pulls, F, B ...
    rank 1   life 0 | F B  dies                       life 1 | waits for rank 0 | pulls, F, B ...
    driver                 rank 1: life 1 ->          rank 0: it has been expected

The driver hears of every death before it starts the rank again. If nobody expects this death, the replica's next life
begins: its number is written into the folder of the servers, and all other ranks of the replica are expected to end.
Every rank has a thread that reads the number, and ends the process when it has changed. So all ranks that are alive in
the end have read the same number, by which they make a communicator among themselves. For the servers each of them
begins anew; what the replica had pushed counts only if all of it had arrived.

A rank that has come to its end says in the folder that its replica is over: the others need not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from minipar.cluster import worker
from minipar.cluster.failures import lost_peer
from minipar.comm import communicator
from minipar.comm.communicator import Communicator
from minipar.program import Program

_LOOK = 0.05  # seconds between two looks at the number


@dataclass(frozen=True)
class Again:
    """What a rank reports before it ends itself, so that its replica begins again."""


class Lives:
    """In the driver: the lives of the replicas of several ranks."""

    def __init__(self, folder: str, replicas: Sequence[tuple[int, ...]]) -> None:
        self.folder = folder
        self.replica = {rank: r for r, ranks in enumerate(replicas) if len(ranks) > 1 for rank in ranks}
        self.ranks = dict(enumerate(replicas))
        self.numbers = dict.fromkeys(self.ranks, 0)
        self.expected: set[int] = set()  # ranks that will end, or have ended, in the present life of their replica
        self.willing: set[int] = set()  # ranks that have said that they end themselves

    def died(self, rank: int) -> bool:
        """A rank has died, and will be started again. Returns whether it has not ended itself."""
        if rank not in self.replica:
            return True
        replica = self.replica[rank]
        if rank in self.expected:
            self.expected.discard(rank)
        else:
            self.expected.update(self.ranks[replica])
            self.expected.discard(rank)
            self.numbers[replica] += 1
            path = _path(self.folder, replica)
            with open(f"{path}.new", "w") as file:
                file.write(str(self.numbers[replica]))
            os.replace(f"{path}.new", path)
        willing = rank in self.willing
        self.willing.discard(rank)
        return not willing


class Life:
    """In a rank: the present life of its replica. While it is entered, the process ends when another one begins, and
    when an error says that another rank of the replica is gone.

    dying   whether the replica starts again at all: it has several ranks, and on_death=continue. If not, nothing of
            this happens
    """

    def __init__(self, folder: str, replica: int, dying: bool) -> None:
        self.folder, self.replica, self.dying = folder, replica, dying
        self.number = (self._read() or 0) if dying else 0
        self.over = dying and os.path.exists(self._over)
        self._comm: Communicator | None = None  # of all ranks of the replica, once all are in this life
        self._ending = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watches its replica", daemon=True)

    @staticmethod
    def of(folder: str, program: Program, rank: int, dying: bool) -> Life:
        """The life of a rank's replica. `dying`: on_death=continue."""
        return Life(folder, program.replica(rank), dying and program.workers > program.replicas)

    def __enter__(self) -> Life:
        if self.dying:
            self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.dying:
            if error is not None and lost_peer(error):
                self.void()
            self._stop.set()
            self._thread.join()
            if self._comm is not None:
                self._comm.close()

    def meet(self, ranks: tuple[int, ...]) -> Communicator:
        """A communicator of the ranks of the replica that are in this life. Waits for all of them."""
        self._comm = communicator.among(ranks, f"{self.folder[-8:]}-{self.replica}-{self.number}")
        return self._comm

    def finish(self) -> None:
        """The rank has done all its steps: it is not ended any more, and the others need not wait for it."""
        with self._ending:
            self._stop.set()
            if self.dying:
                with contextlib.suppress(OSError), open(self._over, "w"):
                    pass

    def void(self) -> None:
        """What the replica is at is void: end this process, so that it begins again."""
        if self.dying:
            worker.report(Again())
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def _over(self) -> str:
        return f"{_path(self.folder, self.replica)}.over"

    def _read(self) -> int | None:
        try:
            with open(_path(self.folder, self.replica)) as file:
                return int(file.read())
        except OSError:
            return None  # (no rank has died yet, or the run is over)

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK):
            with self._ending:
                in_vain = self._comm is None and not self.over and os.path.exists(self._over)
                if not self._stop.is_set() and (in_vain or self._read() not in (None, self.number)):
                    self.void()


def _path(folder: str, replica: int) -> str:
    return os.path.join(folder, f"life of {replica}")
