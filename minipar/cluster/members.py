"""The driver's side of its ranks: one `Member` each, started, listened to, printed for and ended."""

from __future__ import annotations

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
from minipar.cluster.worker import Setup
from minipar.errors import PlanError, RankDied, RankError

GRACE = 0.3  # seconds that ranks get to answer after the first failure, before they are stopped
_CHUNK = 1 << 16
_DRAIN = 1 << 26  # bytes read at most at the end of a run; a grandchild may print for ever

Callback = Callable[[int, Any], None]


class Printer:
    """Prints what comes out of one rank's pipe, whole lines only, each with the rank's name."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self.descriptor = descriptor
        self.open = True
        self._prefix = f"[rank {rank}] "
        self._rest = b""
        os.set_blocking(descriptor, False)

    def pump(self, limit: int = _CHUNK) -> int:
        """Print what is there, at most about `limit` bytes; the bytes read (0: nothing there, or at the end)."""
        total = 0
        while self.open and total < limit:
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                self.open = False
                break
            total += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._print(lines)
        return total

    def finish(self) -> None:
        """Print all that is there, also a last line without its end."""
        self.pump(_DRAIN)
        if self._rest:
            rest, self._rest = self._rest, b""
            self._print([rest])

    def _print(self, lines: list[bytes]) -> None:
        if lines:
            text = [self._prefix + line.decode("utf-8", "replace").rstrip("\r") + "\n" for line in lines]
            sys.stdout.write("".join(text))
            sys.stdout.flush()


@dataclass
class Member:
    """One rank as the driver sees it."""

    rank: int
    process: launch.Process
    control: socket.socket
    inbox: wire.Inbox
    printers: tuple[Printer, Printer]
    device: str = ""
    backend: str = ""
    alive: bool = True


@dataclass
class Members:
    """All ranks of one cluster. `generation` counts the times when process groups had to be made anew."""

    size: int
    device: str
    start: str  # "fork" or "spawn"
    threads: int
    owner: int = field(default_factory=os.getpid)
    generation: int = 0
    ranks: dict[int, Member] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def heal(self) -> list[int]:
        """Start every rank that is not there; their numbers. PlanError for a device that is not there."""
        for member in list(self.ranks.values()):
            if not member.alive or self._ended(member):
                self.remove(member)
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
        return missing

    def _ended(self, member: Member) -> bool:
        try:
            member.inbox.read()  # a late report is dropped
        except EOFError:
            return True
        return False

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        out, err = os.pipe(), os.pipe()
        try:
            process: launch.Process
            if self.start == "fork":
                zygote = launch.zygote()
                process = launch.Forked(zygote, zygote.fork(theirs.fileno(), out[1], err[1]))
            else:
                process = launch.spawn(theirs.fileno(), out[1], err[1])
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
        member = Member(rank, process, ours, wire.Inbox(ours), printers)
        self.ranks[rank] = member
        self.selector.register(ours, selectors.EVENT_READ, (member, None))
        for printer in printers:
            self.selector.register(printer.descriptor, selectors.EVENT_READ, (member, printer))
        path, folder = tuple(sys.path), os.getcwd()
        setup = Setup(rank, self.size, self.device, self.threads, path, folder, dict(os.environ))
        try:
            wire.send(ours, setup)
        except OSError:
            pass  # it died at once, which is noticed when its answer is awaited

    def _await_ready(self, ranks: list[int]) -> None:
        answers, failures = self.collect(ranks, 0, None)
        if failures:
            raise RankDied(f"could not start: {failures[0].line}; what it printed is above")
        for rank in ranks:
            kind, *rest = answers[rank]
            if kind == "refused":
                raise PlanError(rest[0])
            self.ranks[rank].device, self.ranks[rank].backend = rest

    def collect(
        self, ranks: Iterable[int], run: int, callback: Callback | None
    ) -> tuple[dict[int, tuple[Any, ...]], list[Failure]]:
        """Pump output and reports until each of `ranks` has answered, or `GRACE` after the first failure.

        The answers ("ready", ...), ("refused", ...) or ("result", blob), and the failures in order of arrival. A rank
        in neither did not answer in time; it is still running.
        """
        answers: dict[int, tuple[Any, ...]] = {}
        failures: list[Failure] = []
        taking_part = set(ranks)
        waiting = set(taking_part)
        deadline: float | None = None
        while waiting:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            for key, _ in self.selector.select(left):
                member, printer = key.data
                if printer is not None:
                    self._pump(printer)
                    continue
                for message in self._messages(member):
                    if message is None:  # it died
                        self._lost(member)
                        if member.rank in taking_part:
                            failures.append(Failure(member.rank, None, member.process.wait(0)))
                            waiting.discard(member.rank)
                    elif message[0] == "report":
                        if callback is not None and message[1] == run:
                            callback(member.rank, cloudpickle.loads(message[2]))
                    elif message[0] == "error" and message[1] == run:
                        failures.append(Failure(member.rank, message[2]))
                        waiting.discard(member.rank)
                    elif message[0] in ("ready", "refused"):
                        answers[member.rank] = message
                        waiting.discard(member.rank)
                    elif message[1] == run:
                        answers[member.rank] = (message[0], message[2])
                        waiting.discard(member.rank)
            if failures and deadline is None:
                deadline = time.monotonic() + GRACE
        for member in self.ranks.values():
            for printer in member.printers:
                printer.finish()
        return answers, failures

    def _messages(self, member: Member) -> Iterable[tuple[Any, ...] | None]:
        while True:
            try:
                message = member.inbox.read()
            except EOFError:
                yield None
                return
            if message is None:
                return
            yield message

    def _pump(self, printer: Printer) -> None:
        printer.pump()
        if not printer.open:
            self.selector.unregister(printer.descriptor)

    def _lost(self, member: Member) -> None:
        """Its socket ended: nothing more is heard of it, and nothing that it started may go on."""
        member.alive = False
        self.selector.unregister(member.control)
        if member.process.wait(0.2) is None:  # it only closed its socket, or its helper process died with it
            member.process.kill()

    def remove(self, member: Member) -> None:
        """Close our ends of a rank that has ended."""
        for source in (member.control, *(printer.descriptor for printer in member.printers)):
            try:
                self.selector.unregister(source)
            except (KeyError, ValueError):
                pass
        member.control.close()
        for printer in member.printers:
            os.close(printer.descriptor)
        del self.ranks[member.rank]

    def stop(self, ranks: Iterable[int]) -> None:
        """Kill these ranks, with whatever they had started, print their last words, and forget them."""
        members = [self.ranks[rank] for rank in ranks if rank in self.ranks]
        for member in members:
            member.process.kill()
        for member in members:
            member.process.wait(2)
            for printer in member.printers:
                printer.finish()
            self.remove(member)

    def close(self) -> None:
        """End all ranks. Does nothing in a process that was forked from the owner."""
        if os.getpid() == self.owner:
            self.stop(list(self.ranks))
            self.selector.close()

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        """One message to a rank. A rank that has died takes it silently; its end is noticed by `collect`."""
        try:
            wire.send(self.ranks[rank].control, message)
        except OSError:
            pass

    @property
    def alive(self) -> int:
        return sum(member.alive for member in self.ranks.values())


def check_owner(members: Members) -> None:
    """RankError in a process that was forked from the one that made the cluster."""
    if os.getpid() != members.owner:
        raise RankError("this Cluster belongs to another process; make one here")
