"""The driver's side of its ranks: it sends them a function, and listens until all have answered.

One selector serves all of them. What is different between ranks that the driver has started itself (children.py) and
those that have connected to it (far.py) is how a run begins, how a rank is interrupted, and what its end means.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from minipar.cluster import failures, wire
from minipar.cluster.failures import Failure, as_deadlock, as_exception
from minipar.cluster.output import USUAL, Output, Printer, Show
from minipar.cluster.parcel import Parcel, pack_call
from minipar.cluster.parcel import unpack as _unpack
from minipar.cluster.processes import held
from minipar.cluster.ranks import Call, Callback, check_ranks
from minipar.cluster.watchdog import Watchdog
from minipar.errors import RankError

# Seconds in which other failures may arrive after the first one: a rank that only lost its peer often reports before
# the peer does.
SETTLE = 0.05
SETTLE_AFTER_LOST_PEER = 0.18


@dataclass
class Member:
    """One rank as the driver sees it. If it is not `alive`, it has ended, or does not answer any more."""

    rank: int
    control: socket.socket
    printers: tuple[Printer, ...] = ()
    alive: bool = True
    inbox: wire.Inbox = field(init=False)

    def __post_init__(self) -> None:
        self.inbox = wire.Inbox(self.control)


M = TypeVar("M", bound=Member)


@dataclass
class Round:
    """What the driver receives in one run: answers by rank, and failures in order of arrival.

    An answer is ("ready", device), ("refused", reason) or ("result", parcel). `waiting` are the ranks that have not
    answered yet; `doing` says what they did when they were interrupted, `lost` which of them were given up.
    `reports` are those which the callback has not got yet. `stuck`: what each rank waits for, if `watch` has found
    a deadlock. `revivals`: how many times a rank that dies is started again and gets `message` once more; `deaths` are
    the failures of these ranks.
    """

    run: int
    ranks: frozenset[int]
    callback: Callback | None = None
    answers: dict[int, tuple[str, Any]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    reports: deque[tuple[int, Any]] = field(default_factory=deque)
    watch: Watchdog | None = None
    stuck: dict[int, str] | None = None
    called_back: bool = False
    doing: dict[int, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    revivals: int = 0
    message: Any = None
    deaths: list[Failure] = field(default_factory=list)
    show: Show = USUAL


class Members(ABC, Generic[M]):
    """All ranks of one driver.

    generation   changes whenever process groups must be made again
    far          ranks may be on other machines
    """

    far: bool

    def __init__(self, size: int) -> None:
        self.size, self.generation = size, 0
        self.ranks: dict[int, M] = {}
        self.run = 0
        self.busy = threading.Lock()
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self.output = Output()

    # What is different for ranks here and elsewhere

    @abstractmethod
    def begin(self, call: Call, active: tuple[int, ...], heard: Round, parcel: Parcel) -> None:
        """Send the function of a run to its ranks."""

    @abstractmethod
    def interrupt(self, heard: Round) -> None:
        """Interrupt the ranks that have not answered."""

    @abstractmethod
    def drop(self, ranks: set[int]) -> None:
        """Give up ranks that do not answer."""

    @abstractmethod
    def death(self, member: M) -> Failure:
        """How a rank has ended."""

    @abstractmethod
    def ended(self, member: M, heard: Round) -> None:
        """A rank's connection has ended."""

    @abstractmethod
    def grace(self, heard: Round) -> float:
        """Seconds that interrupted ranks have to answer."""

    def look_after(self, heard: Round) -> float | None:
        """Look whether ranks can go on, if it is time; the seconds until it is time again."""
        return None

    def give_up(self, heard: Round, error: BaseException) -> None:
        """End a run in which the driver itself met an error, such as an interrupt."""
        self.call_back(heard)

    # What is the same

    def perform(self, call: Call) -> list[Any]:
        """Carry out a call; the results in the order of its ranks. RankError while another one is carried out."""
        active = check_ranks(call.ranks, self.size)
        parcel = pack_call(call.function, call.args, call.kwargs or {}, self.far)
        if not self.busy.acquire(blocking=False):
            raise RankError("these ranks are busy with another run")
        try:
            answers = self._exchange(call, active, parcel)
        finally:
            parcel.close()
            self.busy.release()
        return [unpack(answers[rank], f"the result of rank {rank}") for rank in active]

    def _exchange(self, call: Call, active: tuple[int, ...], parcel: Parcel) -> dict[int, Parcel]:
        self.run += 1
        heard = Round(self.run, frozenset(active), call.callback, revivals=call.revivals, show=call.show)
        try:
            self.begin(call, active, heard, parcel)
            if not heard.called_back:
                self.collect(heard)
            if heard.waiting:
                self.call_back(heard)
        except BaseException as error:  # the stop button, or an error in the callback
            self.generation += 1
            self.give_up(heard, error)
            raise
        if heard.failures or heard.stuck is not None:
            self.generation += 1
            heard.answers.clear()  # (a traceback would keep their memory files)
        if heard.failures:
            raise as_exception(heard.failures, heard.doing, heard.lost)
        if heard.stuck is not None and heard.watch is not None:
            raise as_deadlock(heard.stuck, heard.ranks, heard.watch.lasted, heard.watch.patience, heard.lost)
        return {rank: answer for rank, (_, answer) in heard.answers.items()}

    def add(self, member: M) -> None:
        """Listen to a rank from now on."""
        self.ranks[member.rank] = member
        self.selector.register(member.control, selectors.EVENT_READ, partial(self._listen, member))
        for printer in member.printers:
            self.selector.register(printer.descriptor, selectors.EVENT_READ, partial(self._pump, member, printer))

    def send(self, rank: int, message: Any) -> None:
        """Send one message to a rank. If the rank has ended, `collect` notices that later."""
        with contextlib.suppress(OSError):
            wire.send(self.ranks[rank].control, message)

    def collect(self, heard: Round, seconds: float | None = None, ended: int = -1) -> bool:
        """Listen until no rank is left in `heard.waiting`, until no more failures are expected, until ranks are stuck,
        or for so many seconds. A thread that listens, and leaves the callback to the main thread, does so until
        something can be read from `ended`: whether that is so."""
        deadline = None if seconds is None else time.monotonic() + seconds
        known = len(heard.failures) if heard.called_back else 0
        over: list[int] = []
        self.output.begin(heard.ranks, heard.show)
        for rank in heard.waiting & self.ranks.keys():
            if not self.ranks[rank].alive:
                heard.failures.append(self.death(self.ranks[rank]))
                heard.waiting.discard(rank)
        if ended >= 0:
            self.selector.register(ended, selectors.EVENT_READ, lambda _: over.append(ended))
        while heard.waiting and (heard.stuck is None or heard.called_back) and not over:
            for failure in heard.failures[known:]:
                until = time.monotonic() + (SETTLE_AFTER_LOST_PEER if failure.lost_peer else SETTLE)
                deadline = until if deadline is None else min(deadline, until)
            known = len(heard.failures)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            last = left == 0.0  # what has come while this process was stopped is read
            pauses = [left, None if heard.failures else self.look_after(heard), self.output.show()]
            found = self.selector.select(min((pause for pause in pauses if pause is not None), default=None))
            with held():  # (else half a message would be lost, and the next one with it)
                for key, _ in found:
                    key.data(heard)
            if ended < 0:
                self.call(heard)
            if last:
                break
        if ended >= 0:
            self.selector.unregister(ended)
        for member in self.ranks.values():
            for printer in member.printers:
                printer.finish()
        self.output.flush()
        return bool(over)

    def call(self, heard: Round) -> None:
        """Give the callback what ranks have reported."""
        while heard.reports:
            rank, value = heard.reports.popleft()
            if heard.callback is not None and not heard.called_back:
                heard.callback(rank, unpack(value, f"a report of rank {rank}"))

    def call_back(self, heard: Round) -> None:
        """Interrupt the ranks that have not answered, so that they end the run and keep their state; give up those that
        do not answer soon."""
        heard.callback = None
        if not heard.called_back:
            heard.called_back = True
            self.interrupt(heard)
        self.collect(heard, self.grace(heard))
        heard.lost |= heard.waiting
        self.drop(heard.waiting)

    def _listen(self, member: M, heard: Round) -> None:
        """Handle everything that a rank has sent."""
        while self.ranks.get(member.rank) is member:  # (else it has died, as an earlier event showed)
            try:
                message = member.inbox.read()
            except (EOFError, OSError):
                return self.ended(member, heard)
            if message is None:
                return
            self.take(member, heard, *message)

    def take(self, member: M, heard: Round, kind: str, run: int, value: Any) -> None:
        """Handle a message. One of an earlier run came too late, from a thread that a function left behind."""
        rank = member.rank
        if run != heard.run:
            return
        if kind == "report":
            heard.reports.append((rank, value))
            return
        heard.waiting.discard(rank)
        if kind == "error":
            self.fail(rank, heard, value)
        else:
            heard.answers[rank] = (kind, value)

    def fail(self, rank: int, heard: Round, error: failures.Remote) -> None:
        """A function has raised this on a rank."""
        if heard.called_back:  # it is the answer to the interrupt
            heard.doing.setdefault(rank, f"interrupted at:\n{failures.place(error)}")
        else:
            heard.failures.append(Failure(rank, error))

    def _pump(self, member: M, printer: Printer, heard: Round) -> None:
        if self.ranks.get(member.rank) is member:
            printer.pump()
            if not printer.open:
                self.selector.unregister(printer.descriptor)


def unpack(parcel: Parcel, what: str) -> Any:
    """What a rank pickled; RankError, naming `what`, when the driver cannot load it."""
    try:
        return _unpack(parcel)
    except Exception as error:
        raise RankError(f"{what} cannot be loaded in the driver: {failures.said(error)}") from error
