"""Ranks in processes that this driver did not start, on other machines too: each has connected to the driver by TCP.

    both              prove that they know the key (an HMAC, as multiprocessing.connection has it); then the rank says
                      its number, and all that follows are messages of wire.py
    driver -> rank    ("run", number, Situation, parcel) · ("stop",): it has failed elsewhere
                      ("call", name): a call begins, in which all take part; ("end", kind, parcel): it has ended
    rank -> driver    ("report" | "result" | "error", number, value) · ("output", number, bytes): it has printed this
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

from minipar.cluster import failures, launch, notes, threads, wire, worker
from minipar.cluster.failures import Failure, as_exception
from minipar.cluster.members import SETTLE, SETTLE_AFTER_LOST_PEER, Interrupts, Round, exchanged, unpack
from minipar.cluster.output import Output, Printer
from minipar.cluster.parcel import Parcel
from minipar.cluster.processes import readable
from minipar.cluster.ranks import Call
from minipar.cluster.worker import Seat, Situation
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
            known = wire.Timed(control, SHORTLY)
            deliver_challenge(known, key)  # type: ignore[arg-type]
            answer_challenge(known, key)  # type: ignore[arg-type]
            rank = int(known.recv_bytes(8))
        except (OSError, EOFError, ValueError, AssertionError, AuthenticationError):
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
        known = wire.Timed(control, seconds)  # (the driver may have others to hear before)
        answer_challenge(known, key)  # type: ignore[arg-type]
        deliver_challenge(known, key)  # type: ignore[arg-type]
        known.send_bytes(str(rank).encode())
    except (OSError, EOFError, AssertionError, AuthenticationError) as error:
        raise RankDied(f"rank {rank} cannot reach the driver at {address[0]}:{address[1]}: {error}") from error
    return _kept_alive(control)


def _kept_alive(control: socket.socket) -> socket.socket:
    """The system asks the other machine every second whether it is there, and closes the connection when it is not."""
    control.settimeout(None)
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"KEEPIDLE": 2, "KEEPINTVL": 1, "KEEPCNT": _LOST_AFTER - 2, "USER_TIMEOUT": _LOST_AFTER * 1000}
    for name, value in options.items():
        if hasattr(socket, f"TCP_{name}"):  # (Linux)
            control.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
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
    """This process as a rank of a driver elsewhere. `echo`: what it prints in a function goes to the driver."""

    def __init__(
        self, control: socket.socket, rank: int, size: int, device: str, backend: str, echo: bool = False
    ) -> None:
        self.control = control
        self.echo = echo
        self.gone = False  # whether the driver has ended
        self.seat = Seat(self._deliver, rank, size, device, backend, "torchrun", far=True)

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
        raise RankDied(f"the driver of rank {self.seat.rank} has ended")

    def _run(self, number: int, situation: Situation, parcel: Parcel) -> None:
        worker.begin(self.seat, number, situation)
        printing = self._printing(number) if self.echo else contextlib.nullcontext()
        with printing, _interruptible(self._watch), worker.seated(self.seat):
            kind, answer = worker.run_interruptibly(self.seat, parcel)
        self.seat.send((kind, number, answer))

    @contextlib.contextmanager
    def _printing(self, number: int) -> Iterator[None]:
        """Send to the driver what this process, its libraries and its children print."""
        worker.flush()
        streams, kept = (sys.stdout, sys.stderr), (os.dup(1), os.dup(2))
        outlet, inlet = os.pipe()
        os.dup2(inlet, 1)
        os.dup2(inlet, 2)
        os.close(inlet)
        sys.stdout, sys.stderr = worker.streams()

        def pump() -> None:
            with contextlib.suppress(OSError):
                while data := os.read(outlet, 1 << 16):
                    self.seat.send(("output", number, data))
                os.close(outlet)

        pumped = None
        try:
            pumped = threads.start(pump, "sends what this rank prints")
            yield
        finally:
            worker.flush()
            sys.stdout, sys.stderr = streams
            for descriptor, stream in zip(kept, (1, 2), strict=True):
                os.dup2(descriptor, stream)
                os.close(descriptor)
            if pumped is not None:
                pumped.wait(1.0)  # (longer only if a child of this process goes on printing)

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


@dataclass
class Peer:
    """A rank elsewhere. If it is not `alive`, it has ended, or does not answer any more. `calls`: to how many it has
    come."""

    rank: int
    control: socket.socket
    inbox: wire.Inbox
    alive: bool = True
    calls: int = 0


class Driver:
    """Runs functions on ranks elsewhere and, if the driver is rank 0, in this process.

    controls   the connections by rank
    way_out    what to do where one of them has ended
    first_generation    must differ between drivers that the same processes have one after another
    echo       show what ranks print
    """

    def __init__(
        self,
        controls: Mapping[int, socket.socket],
        size: int,
        way_out: str,
        first_generation: int = 0,
        echo: bool = False,
    ) -> None:
        self.size = size
        self._way_out = way_out
        self.peers = {rank: Peer(rank, control, wire.Inbox(control)) for rank, control in controls.items()}
        self.seat: Seat | None = None
        self._number = self._calls = 0
        self._generation = first_generation
        self._interrupts = Interrupts()
        self._output = Output()
        self._printers = {rank: _Printing(rank, self._output) for rank in controls} if echo else {}
        self._busy = threading.Lock()
        self._heard: Round | None = None
        self._reports: deque[tuple[int, Any]] = deque()  # which the callback has not got yet
        self._wrong: BaseException | None = None  # what the callback raised

    def sit(self, device: str, backend: str) -> None:
        """Be rank 0, too."""
        self.seat = Seat(self._own_report, 0, self.size, device, backend, "torchrun", far=True)

    def begin(self, name: str) -> None:
        """Begin a call, in which all ranks take part as soon as they have come to it."""
        self._calls += 1
        self.tell(("call", name))

    def tell(self, message: tuple[Any, ...]) -> None:
        """Send a message to all ranks elsewhere."""
        for peer in self.peers.values():
            self._send(peer, message)

    def _send(self, peer: Peer, message: tuple[Any, ...]) -> None:
        with contextlib.suppress(OSError):  # `_listen` notices that it has ended
            wire.send(peer.control, message)

    def perform(self, call: Call) -> list[Any]:
        """Call a function on ranks; the results in their order. Errors as of `Cluster.run`."""
        exchange = partial(self._exchange, call)
        return exchanged(call, self.size, self._busy, "these ranks are", exchange, inside=True)

    def _exchange(self, call: Call, active: tuple[int, ...], parcel: Parcel) -> dict[int, Parcel]:
        self._number += 1
        heard = Round(self._number, frozenset(active), call.callback, waiting=set(active))
        lost = [rank for rank in active if rank in self.peers and not self.peers[rank].alive]
        if lost:
            raise RankDied(f"rank {lost[0]} has ended; {self._way_out}")
        self._heard, self._wrong = heard, None
        self._output.begin(active, call.show)
        self._reports.clear()
        situation = Situation(self._generation, active)
        with self._interrupts:
            self._await(heard)
        if heard.failures:  # (nobody has been sent anything)
            raise as_exception(heard.failures, heard.doing, heard.lost)
        for rank in active:
            if rank in self.peers:
                self._send(self.peers[rank], ("run", self._number, situation, parcel))
        try:
            if self.seat is not None and 0 in active:
                self._own_share(self.seat, heard, situation, parcel)
            with self._interrupts:
                if not heard.called_back:  # (else the ranks know of a failure, and some of them may never answer)
                    self._collect(heard)
                if heard.failures:
                    self._call_back(heard)
        except BaseException:  # an interrupt, or an error in the callback
            self._generation += 1
            self._call_back(heard)
            raise
        finally:
            self._heard = None
            for printing in self._printers.values():
                printing.finish()
            self._output.flush()
        if heard.failures:
            self._generation += 1
            heard.answers.clear()
            raise as_exception(heard.failures, heard.doing, heard.lost)
        return {rank: answer for rank, (_, answer) in heard.answers.items()}

    # Rank 0 in this process

    def _own_share(self, seat: Seat, heard: Round, situation: Situation, parcel: Parcel) -> None:
        worker.begin(seat, heard.run, situation)
        with _interruptible(partial(self._watch, heard)), worker.seated(seat):
            kind, answer = worker.run_interruptibly(seat, parcel)
        heard.waiting.discard(0)
        if self._wrong is not None:
            raise self._wrong
        if kind == "result":
            heard.answers[0] = kind, answer
        elif heard.called_back:
            heard.doing[0] = _doing(answer)
        elif answer.name == "KeyboardInterrupt":
            raise KeyboardInterrupt
        else:
            heard.failures.append(Failure(0, answer))
        self._call(heard)

    def _own_report(self, message: tuple[Any, ...]) -> None:
        """Rank 0 reports: the callback gets this, and what the other ranks have reported meanwhile."""
        _, number, value = message
        heard = self._heard
        if heard is not None and heard.run == number:
            self._reports.append((0, value))
            try:
                self._call(heard)
            except BaseException as error:
                self._wrong = error
                raise

    def _call(self, heard: Round) -> None:
        while self._reports:
            rank, value = self._reports.popleft()
            if heard.callback is not None and not heard.called_back:
                heard.callback(rank, unpack(value, f"a report of rank {rank}"))

    def _watch(self, heard: Round, ended: int) -> None:
        """In a thread, while this process runs its share: listen to the others."""
        while not heard.failures:
            if self._listen(heard, None, ended):
                return
        if self._settle(heard, ended):
            return
        self._stop(heard)
        assert self.seat is not None
        if not _interrupt(self.seat, ended):
            self._end(heard)

    def _end(self, heard: Round) -> None:
        """This process waits in native code for a rank that has failed: say what went wrong, and end."""
        error = as_exception(heard.failures, heard.doing, ())
        sys.stdout.flush()
        sys.stderr.write("".join(traceback.format_exception(error)))
        sys.stderr.flush()
        launch.remove_scratch()
        os._exit(1)

    # The others

    def _await(self, heard: Round) -> None:
        """Wait until all ranks of a function have come to the call that it belongs to, or one has failed."""
        peers = [self.peers[rank] for rank in heard.waiting & self.peers.keys()]
        while not heard.failures and any(peer.calls < self._calls for peer in peers):
            self._listen(heard, None)

    def _collect(self, heard: Round, seconds: float | None = None) -> None:
        """Listen until all have answered, until one has failed, or for so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while heard.waiting and (heard.called_back or not heard.failures):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            due = self._output.show()
            self._listen(heard, left if due is None else due if left is None else min(left, due))
            self._call(heard)
        if heard.failures and not heard.called_back:
            self._settle(heard)

    def _settle(self, heard: Round, ended: int = -1) -> bool:
        """After a failure: others may follow that explain it. Returns whether this process's own share has ended."""
        lost_peer = all(one.lost_peer for one in heard.failures)
        deadline = time.monotonic() + (SETTLE_AFTER_LOST_PEER if lost_peer else SETTLE)
        while heard.waiting and (left := deadline - time.monotonic()) > 0:
            if self._listen(heard, left, ended):
                return True
        return False

    def _stop(self, heard: Round) -> None:
        heard.called_back = True
        for rank in heard.waiting & self.peers.keys():
            self._send(self.peers[rank], ("stop",))

    def _call_back(self, heard: Round) -> None:
        """Interrupt the ranks that have not answered. Those that do not answer soon will end by themselves."""
        if not heard.called_back:
            self._stop(heard)
        self._collect(heard, 2 * GRACE)
        for rank in heard.waiting & self.peers.keys():
            self.peers[rank].alive = False
            heard.lost.add(rank)

    def _listen(self, heard: Round, seconds: float | None, ended: int = -1) -> bool:
        """Wait for messages, at most so long, and handle them. Returns whether `ended` can be read."""
        peers = {peer.control.fileno(): peer for peer in self.peers.values() if peer.alive}
        found = readable([*peers, *([ended] if ended >= 0 else [])], seconds)
        for descriptor in found:
            if descriptor != ended:
                self._read(peers[descriptor], heard)
        return ended in found

    def _read(self, peer: Peer, heard: Round) -> None:
        rank = peer.rank
        while True:
            try:
                with self._interrupts.held():
                    message = peer.inbox.read()
            except (EOFError, OSError):
                peer.alive = False
                if rank in heard.waiting:
                    heard.waiting.discard(rank)
                    if heard.called_back:
                        heard.lost.add(rank)
                    else:
                        heard.failures.append(Failure(rank, None))
                return
            if message is None:
                return
            kind, number, value = message
            if kind == "here":
                peer.calls += 1
                continue
            if kind == "error" and number < 0:  # it makes another call than the driver
                heard.failures.append(Failure(rank, value))
            elif number != heard.run:
                continue
            elif kind == "output":
                self._printers[rank].write(value)
                continue
            elif kind == "report":
                self._reports.append((rank, value))
                continue
            elif kind == "result":
                heard.answers[rank] = kind, value
            elif heard.called_back:
                heard.doing[rank] = _doing(value)
            else:
                heard.failures.append(Failure(rank, value))
            heard.waiting.discard(rank)

    def close(self) -> None:
        """Close the connections, upon which the ranks end or go on with their own work. A second call does nothing."""
        for peer in self.peers.values():
            peer.alive = False
            peer.control.close()
        for printing in self._printers.values():
            printing.close()
        self._printers = {}


class _Printing:
    """Gives what a rank elsewhere has printed to the Output, by a pipe of this process."""

    def __init__(self, rank: int, output: Output) -> None:
        outlet, self._inlet = os.pipe()
        os.set_blocking(outlet, False)
        self._printer = Printer(rank, outlet, output)

    def write(self, data: bytes) -> None:
        os.write(self._inlet, data)  # (a pipe has room for as much as a rank sends at once)
        self._printer.pump(2 * len(data))

    def finish(self) -> None:
        self._printer.finish()

    def close(self) -> None:
        os.close(self._inlet)
        os.close(self._printer.descriptor)


def _doing(answer: failures.Remote) -> str:
    """What a rank did when it was interrupted, from what it answered."""
    return f"interrupted at:\n{failures.place(answer)}"
