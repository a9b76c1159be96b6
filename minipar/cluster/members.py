"""The driver's side of its ranks: one `Member` each, started, listened to and ended.

One selector in the calling thread serves all of them; the driver starts no threads and joins no process group.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from minipar.cluster import launch, wire
from minipar.cluster.failures import Failure
from minipar.cluster.output import Printer
from minipar.cluster.worker import Setup
from minipar.errors import PlanError, RankDied, RankError

# Seconds that the other ranks get to answer, before they are stopped: after the first failure, and after a death,
# which is the root cause whatever the others say.
GRACE = 0.3
GRACE_AFTER_DEATH = 0.08

Callback = Callable[[int, Any], None]


@dataclass
class Member:
    """One rank as the driver sees it. Once it is not `alive`, it is replaced at the next call."""

    rank: int
    process: launch.Process
    control: socket.socket
    inbox: wire.Inbox
    printers: tuple[Printer, Printer]
    device: str = ""
    alive: bool = True


@dataclass
class Round:
    """What is heard in one run: answers by rank, and failures in order of arrival.

    An answer is ("ready", device), ("refused", reason) or ("result", blob). A rank that is still in `waiting` at the
    end did not answer in time.
    """

    run: int
    ranks: frozenset[int]
    callback: Callback | None = None
    answers: dict[int, tuple[str, Any]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)


@dataclass
class Members:
    """All ranks of one cluster. `generation` changes whenever process groups must be made anew."""

    size: int
    device: str
    start: str  # "fork" or "spawn"
    threads: int
    keep_freed_memory: bool
    owner: int = field(default_factory=os.getpid)
    generation: int = 0
    ranks: dict[int, Member] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    # Starting

    def heal(self) -> list[Failure]:
        """Start every rank that is not there. The deaths that were not known before; PlanError for a device that
        is not there."""
        deaths = []
        for member in list(self.ranks.values()):
            if member.alive and self._ended(member):
                deaths.append(Failure(member.rank, None, member.process.wait(0)))
        self.stop([member.rank for member in self.ranks.values() if not member.alive])
        missing = [rank for rank in range(self.size) if rank not in self.ranks]
        if missing:
            self.generation += 1
            try:
                for rank in missing:
                    self._start(rank)
                self._await_ready(missing)
            except BaseException:
                self.stop(missing)
                raise
        return deaths

    def _ended(self, member: Member) -> bool:
        try:
            while member.inbox.read() is not None:
                pass  # a report that came too late
        except EOFError:
            self._lost(member)
            return True
        return False

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        try:
            start = launch.fork if self.start == "fork" else launch.spawn
            process: launch.Process = start(theirs.fileno(), out[1], err[1])
        except BaseException:
            ours.close()
            os.close(out[0])
            os.close(err[0])
            raise
        finally:
            theirs.close()
            os.close(out[1])
            os.close(err[1])
        printers = (Printer(rank, out[0]), Printer(rank, err[0]))
        member = self.ranks[rank] = Member(rank, process, ours, wire.Inbox(ours), printers)
        self.selector.register(ours, selectors.EVENT_READ, (member, None))
        for printer in printers:
            self.selector.register(printer.descriptor, selectors.EVENT_READ, (member, printer))
        path, folder = tuple(sys.path), os.getcwd()
        self.send(
            rank,
            Setup(rank, self.size, self.device, self.threads, self.keep_freed_memory, path, folder, dict(os.environ)),
        )

    def _await_ready(self, ranks: list[int]) -> None:
        heard = self.collect(ranks, 0)
        if heard.failures:
            raise RankDied(f"could not start: {heard.failures[0].line}; what it printed is above")
        for rank, (kind, value) in heard.answers.items():
            if kind == "refused":
                raise PlanError(value)
            self.ranks[rank].device = value

    # Talking

    def send(self, rank: int, message: Any) -> None:
        """One message to a rank. That it has died is noticed later, by `collect`."""
        with contextlib.suppress(OSError):
            wire.send(self.ranks[rank].control, message)

    def collect(self, ranks: Iterable[int], run: int, callback: Callback | None = None) -> Round:
        """Pump output and reports until each of `ranks` has answered, or a grace after a failure is over.

        The grace also lets the root cause arrive: a rank that only lost its peer often reports first.
        """
        heard = Round(run, frozenset(ranks), callback)
        heard.waiting.update(heard.ranks)
        deadline: float | None = None
        told = 0
        while heard.waiting:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            for key, _ in self.selector.select(left):
                member, printer = key.data
                if printer is None:
                    self._listen(member, heard)
                else:
                    printer.pump()
                    if not printer.open:
                        self.selector.unregister(printer.descriptor)
            for failure in heard.failures[told:]:
                until = time.monotonic() + (GRACE if failure.remote else GRACE_AFTER_DEATH)
                deadline = until if deadline is None else min(deadline, until)
            told = len(heard.failures)
        for member in self.ranks.values():
            for printer in member.printers:
                printer.finish()
        return heard

    def _listen(self, member: Member, heard: Round) -> None:
        """Take in everything that a rank has sent."""
        rank = member.rank
        while True:
            try:
                message = member.inbox.read()
            except EOFError:
                self._lost(member)
                if rank in heard.ranks:
                    heard.failures.append(Failure(rank, None, member.process.wait(0)))
                    heard.waiting.discard(rank)
                return
            if message is None:
                return
            kind, run, value = message
            if run != heard.run:
                continue  # said too late, by a thread that a function left behind
            if kind == "report":
                if heard.callback is not None:
                    heard.callback(rank, unpack(value, f"a report of rank {rank}"))
                continue
            if kind == "error":
                heard.failures.append(Failure(rank, value))
            else:
                heard.answers[rank] = (kind, value)
            heard.waiting.discard(rank)

    # Ending

    def _lost(self, member: Member) -> None:
        """Its socket has ended: nothing more is heard of it, and nothing that it had started may go on."""
        member.alive = False
        self.selector.unregister(member.control)
        member.process.kill()  # no longer changes the exit status of a process that is ending
        member.process.wait(0.5)

    def stop(self, ranks: Iterable[int]) -> None:
        """Kill these ranks with whatever they had started, print their last words, and forget them."""
        members = [self.ranks[rank] for rank in ranks if rank in self.ranks]
        for member in members:
            member.alive = False  # first, so that a rank is replaced even if an interrupt cuts this short
        for member in members:
            member.process.kill()
        for member in members:
            member.process.wait(2)
            for printer in member.printers:
                printer.finish()
            descriptors = [printer.descriptor for printer in member.printers]
            for descriptor in (member.control.fileno(), *descriptors):
                with contextlib.suppress(KeyError, ValueError):  # it had ended already
                    self.selector.unregister(descriptor)
            member.control.close()
            for descriptor in descriptors:
                os.close(descriptor)
            del self.ranks[member.rank]

    def close(self) -> None:
        """End all ranks. Does nothing in a process that was forked from the owner."""
        if os.getpid() == self.owner:
            self.stop(list(self.ranks))
            self.selector.close()


def unpack(blob: bytes, what: str) -> Any:
    """What a rank pickled; RankError, naming `what`, when the driver cannot load it."""
    try:
        return cloudpickle.loads(blob)
    except Exception as error:
        raise RankError(f"{what} cannot be loaded in the driver: {type(error).__name__}: {error}") from error
