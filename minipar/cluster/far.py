"""Ranks in processes that this driver did not start, on other machines too: each has connected to the driver by TCP.

    both              prove that they know the key (an HMAC, as multiprocessing.connection has it); then the rank says
                      its number, and all that follows are messages of wire.py
    driver -> rank    ("run", number, Situation, parcel) · ("stop",): it has failed elsewhere
                      ("call", name): a call begins, in which all take part; ("end", kind, parcel): it has ended
    rank -> driver    ("report" | "result" | "error", number, value)
                      ("here", 0, None): it has come to its next call

A rank that is not in a call reads nothing, and the system closes a connection whose other end takes nothing for some
seconds. So before the driver sends a function, it waits until the ranks are in the call.

The driver may be a rank itself (`seat`): then it runs its own share of a function in between, and a thread listens to
the others meanwhile. A rank has such a thread, too, since a function may wait for a rank that has failed. What fails is
interrupted as by Ctrl-C. A process that waits in native code, which nothing can interrupt, ends.

Nobody is waited for in vain: a process that ends closes its connection, and the system closes that of a machine that
cannot be reached any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from minipar.cluster import launch, notes, threads, wire, worker
from minipar.cluster.failures import Failure, as_exception
from minipar.cluster.members import Member, Members, Round
from minipar.cluster.parcel import Parcel
from minipar.cluster.processes import readable
from minipar.cluster.ranks import Call
from minipar.cluster.worker import Context, Seat, Situation
from minipar.errors import RankDied

GRACE = 1.0  # seconds that an interrupted function has; a rank that ends here is not started again, as in a Cluster
LINGER = 10.0  # seconds that a rank which must end waits for the driver to say why, and to end first
SHORTLY = 5.0  # seconds in which a new connection proves that it is a rank
_LOST_AFTER = 5  # seconds without an answer of the other machine


# Connecting -----------------------------------------------------------------------------------------------------------


def accept(listener: socket.socket, key: bytes, ranks: Iterable[int], seconds: float) -> dict[int, socket.socket]:
    """The connections of these ranks, by rank. Nothing is unpickled before both ends have proved that they know the
    key, and who does not do so in `SHORTLY` is a stranger. RankDied if a rank does not come in time."""
    found: dict[int, socket.socket] = {}
    missing, deadline = set(ranks), time.monotonic() + seconds
    while missing:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            control, _ = listener.accept()
        except TimeoutError:
            raise RankDied(
                f"rank {min(missing)} did not connect within {seconds:g} s; every process makes the same calls of "
                "minipar, such as train(...), in the same order"
            ) from None
        try:
            rank = int(wire.prove(control, key, SHORTLY, asks_first=True).recv_bytes(8))
        except (OSError, EOFError, ValueError):
            control.close()
            continue
        if rank in missing:
            missing.remove(rank)
            found[rank] = _kept_alive(control)
        else:
            control.close()
    return found


def connect(address: tuple[str, int], key: bytes, rank: int, seconds: float) -> socket.socket:
    """A connection to the driver, which listens already. RankDied if it cannot be reached."""
    try:
        control = socket.create_connection(address, seconds)
        # (The driver may have others to hear before.)
        wire.prove(control, key, seconds, asks_first=False).send_bytes(str(rank).encode())
    except OSError as error:
        raise RankDied(f"rank {rank} cannot reach the driver at {address[0]}:{address[1]}: {error}") from error
    return _kept_alive(control)


def _kept_alive(control: socket.socket) -> socket.socket:
    """The system asks the other machine every second whether it is there, and closes the connection when it is not."""
    control.settimeout(None)
    wire.keep_alive(control, _LOST_AFTER - 2)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # (Linux)
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER * 1000)
    return control


# Interrupting ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _interruptible(watch: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile `_interrupt` reaches the function that this process runs, and a thread calls `watch(ended)`. It returns
    at the latest when something can be read from the descriptor `ended`: then the function is over."""
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGINT, worker.on_interrupt)
    ended, end = os.pipe()
    watched = None
    try:
        watched = threads.start(partial(watch, ended), "listens to the other ranks")
        yield
    finally:
        os.write(end, b".")
        if watched is not None:
            watched.wait()
        notes.ask_to_end(0)
        os.close(ended)
        os.close(end)
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _interrupt(seat: Seat, ended: int) -> bool:
    """From a watching thread: interrupt the function, which may not have begun yet. Returns whether it has ended soon
    after."""
    notes.ask_to_end(seat.run)
    if signal.getsignal(signal.SIGINT) is worker.on_interrupt:  # (else it does not run in the main thread)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
    return bool(readable([ended], GRACE))


# A rank ---------------------------------------------------------------------------------------------------------------


class FarRank:
    """This process as a rank of a driver elsewhere."""

    def __init__(self, control: socket.socket, rank: int, size: int, device: str, backend: str) -> None:
        self.control = control
        self.gone = False  # whether the driver has ended
        self.seat = Seat(self._deliver, Context(rank, size, device, backend, "torchrun"), far=True)

    def _deliver(self, message: tuple[Any, ...]) -> None:
        try:
            wire.send(self.control, message)
        except OSError:
            self.gone = True

    def await_call(self) -> str:
        """The name of the call that the driver begins next. What belongs to a call that this rank has left is passed
        over. RankDied if the driver ends."""
        self.seat.send(("here", 0, None))
        while True:
            kind, *rest = self._receive()
            if kind == "call":
                return str(rest[0])

    def serve(self) -> tuple[Any, ...]:
        """Run the functions that the driver sends, until it sends something else, which is returned. RankDied if the
        driver ends."""
        while True:
            message = self._receive()
            if message[0] == "run":
                self._run(*message[1:])
            elif message[0] != "stop":
                return message

    def _receive(self) -> tuple[Any, ...]:
        if not self.gone:
            try:
                message: tuple[Any, ...] = wire.receive(self.control)
                return message
            except (EOFError, OSError):
                self.gone = True
        raise RankDied(f"the driver of rank {self.seat.context.rank} has ended")

    def _run(self, number: int, situation: Situation, parcel: Parcel) -> None:
        worker.begin(self.seat, number, situation)
        with _interruptible(self._watch), worker.seated(self.seat):
            kind, answer = worker.run_interruptibly(self.seat, parcel)
        self.seat.send((kind, number, answer))

    def _watch(self, ended: int) -> None:
        if ended in readable([self.control.fileno(), ended]):
            return
        try:
            wire.receive(self.control)  # ("stop",): the driver sends nothing else now
        except (EOFError, OSError):
            self.gone = True
        if not _interrupt(self.seat, ended):
            self.await_end()
            os._exit(1)

    def await_end(self, seconds: float = LINGER) -> None:
        """Wait until the driver has ended: torchrun ends all processes as soon as one of them fails, and the driver has
        to say what went wrong before."""
        deadline = time.monotonic() + seconds
        while not self.gone and (left := deadline - time.monotonic()) > 0:
            if readable([self.control.fileno()], left):
                with contextlib.suppress(OSError):
                    if self.control.recv(1 << 16):
                        continue
                self.gone = True


# The driver -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Peer(Member):
    """A rank elsewhere. `calls`: to how many it has come."""

    calls: int = 0


class Driver(Members[Peer]):
    """Runs functions on ranks elsewhere and, if the driver is rank 0, in this process.

    controls   the connections by rank
    way_out    what to do where one of them has ended
    """

    far = True

    def __init__(
        self,
        controls: Mapping[int, socket.socket],
        size: int,
        way_out: str,
    ) -> None:
        super().__init__(size)
        self._way_out = way_out
        for rank, control in controls.items():
            self.add(Peer(rank, control))
        self.seat: Seat | None = None
        self._calls = 0
        self._heard: Round | None = None
        self._wrong: BaseException | None = None  # what the callback raised

    def sit(self, device: str, backend: str) -> None:
        """Be rank 0, too."""
        self.seat = Seat(self._own_report, Context(0, self.size, device, backend, "torchrun"), far=True)

    def begin_call(self, name: str) -> None:
        """Begin a call, in which all ranks take part as soon as they have come to it."""
        self._calls += 1
        self.tell(("call", name))

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message to all ranks elsewhere."""
        for rank in self.ranks:
            self.send(rank, message)

    def begin(self, call: Call, active: tuple[int, ...], heard: Round, parcel: Parcel) -> None:
        peers = [self.ranks[rank] for rank in active if rank in self.ranks]
        lost = [peer.rank for peer in peers if not peer.alive]
        if lost:
            raise RankDied(f"rank {lost[0]} has ended; {self._way_out}")
        heard.waiting = {peer.rank for peer in peers if peer.calls < self._calls}
        self.collect(heard)
        if heard.failures:  # (nobody has been sent anything)
            return heard.waiting.clear()
        heard.waiting = set(active)
        situation = Situation(self.generation, active)
        for peer in peers:
            self.send(peer.rank, ("run", self.run, situation, parcel))
        if self.seat is not None and 0 in active:
            self._own_share(self.seat, heard, situation, parcel)

    def _own_share(self, seat: Seat, heard: Round, situation: Situation, parcel: Parcel) -> None:
        self._heard, self._wrong = heard, None
        worker.begin(seat, heard.run, situation)
        with _interruptible(partial(self._watch, heard)), worker.seated(seat):
            kind, answer = worker.run_interruptibly(seat, parcel)
        self._heard = None
        heard.waiting.discard(0)
        if self._wrong is not None:
            raise self._wrong
        if kind == "result":
            heard.answers[0] = kind, answer
        elif not heard.called_back and answer.name == "KeyboardInterrupt":
            raise KeyboardInterrupt
        else:
            self.fail(0, heard, answer)
        self.call(heard)

    def _own_report(self, message: tuple[Any, ...]) -> None:
        """Rank 0 reports: the callback gets this, and what the other ranks have reported meanwhile."""
        _, number, value = message
        heard = self._heard
        if heard is not None and heard.run == number:
            heard.reports.append((0, value))
            try:
                self.call(heard)
            except BaseException as error:
                self._wrong = error
                raise

    def _watch(self, heard: Round, ended: int) -> None:
        """In a thread, while this process runs its share: listen to the others."""
        if self.collect(heard, ended=ended):
            return
        heard.called_back = True
        self.interrupt(heard)
        assert self.seat is not None
        if not _interrupt(self.seat, ended):  # it waits in native code for a rank that has failed
            error = as_exception(heard.failures, heard.doing, ())
            sys.stdout.flush()
            sys.stderr.write("".join(traceback.format_exception(error)))
            sys.stderr.flush()
            launch.remove_scratch()
            os._exit(1)

    def interrupt(self, heard: Round) -> None:
        for rank in heard.waiting & self.ranks.keys():
            self.send(rank, ("stop",))

    def grace(self, heard: Round) -> float:
        return 2 * GRACE

    def drop(self, ranks: set[int]) -> None:
        """(They will end by themselves.)"""
        for rank in ranks & self.ranks.keys():
            self.ranks[rank].alive = False

    def ended(self, member: Peer, heard: Round) -> None:
        member.alive = False
        self.selector.unregister(member.control)
        if member.rank in heard.waiting:
            heard.waiting.discard(member.rank)
            if heard.called_back:
                heard.lost.add(member.rank)
            else:
                heard.failures.append(self.death(member))

    def death(self, member: Peer) -> Failure:
        return Failure(member.rank, None)

    def take(self, member: Peer, heard: Round, kind: str, run: int, value: Any) -> None:
        if kind == "here":
            member.calls += 1
            if member.calls == self._calls:
                heard.waiting.discard(member.rank)
        else:  # (an error of a run below 0: it makes another call than the driver)
            super().take(member, heard, kind, heard.run if run < 0 else run, value)

    def close(self) -> None:
        """Close the connections, upon which the ranks end or go on with their own work. A second call does nothing."""
        for peer in self.ranks.values():
            peer.alive = False
            peer.control.close()
        self.selector.close()
