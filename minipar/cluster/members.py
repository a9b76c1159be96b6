"""The driver's side of its ranks: it starts one `Member` for each, reads its messages, and ends it.

One selector in the calling thread serves all of them; the driver starts no threads and joins no process group.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from minipar.cluster import launch, stacks, wire
from minipar.cluster.failures import Failure, said
from minipar.cluster.notes import Page
from minipar.cluster.output import USUAL, Output, Printer, Show
from minipar.cluster.parcel import Parcel, pack_call
from minipar.cluster.parcel import unpack as _unpack
from minipar.cluster.processes import LOST_DRIVER, describe_status, ending, ends, killed_for_memory
from minipar.cluster.ranks import Call, Callback, check_ranks
from minipar.cluster.watchdog import STOPPED, Watchdog
from minipar.cluster.worker import Setup
from minipar.errors import PlanError, RankDied, RankError

# Seconds in which other failures may arrive after the first one: a rank that only lost its peer often reports before
# the peer does.
SETTLE = 0.05
SETTLE_AFTER_LOST_PEER = 0.18
_LONGEST_END = 2.0  # that a rank may take from the moment when the system begins to end it
# Seconds that interrupted ranks have to answer before they are killed: after a failure, and else.
GRACE_AFTER_FAILURE = 0.25
GRACE = 0.5


@dataclass(eq=False)
class Interrupts:
    """Interrupts, such as by the stop button of a notebook, while the driver listens to its ranks.

    Inside of `with interrupts:` an interrupt raises KeyboardInterrupt as usual. Inside of `with interrupts.held():`
    it does so only at the end: else half a message of a rank would be lost, and the next message with it. A second one
    does not wait. In threads other than the main one this does nothing, since they are not interrupted. Both may be
    entered again inside."""

    holding: int = 0
    _before: Any = None
    _entered: int = 0
    _missed: bool = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._entered += 1
        before = signal.getsignal(signal.SIGINT)
        if self._entered == 1 and callable(before):
            self._before = before
            signal.signal(signal.SIGINT, self._pressed)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._entered -= 1
        if not self._entered and self._before is not None:
            before, self._before = self._before, None
            signal.signal(signal.SIGINT, before)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self.holding and not self._missed:
            self._missed = True
        elif self._before is not None:
            self._before(number, frame)

    def release(self) -> None:
        """What has waited comes now, unless something still holds it."""
        if self._missed and not self.holding:
            self._missed = False
            self._pressed(signal.SIGINT, None)

    def held(self) -> _Held:
        """While entered, an interrupt waits, if these interrupts are entered, too."""
        return _Held(self)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """While entered, an interrupt waits."""
        with self, self.held():
            yield


@dataclass(frozen=True)
class _Held:
    interrupts: Interrupts

    def __enter__(self) -> None:
        self.interrupts.holding += 1

    def __exit__(self, *_: object) -> None:
        self.interrupts.holding -= 1
        self.interrupts.release()


@dataclass
class Member:
    """One rank as the driver sees it. If it is not `alive`, it is replaced at the next call."""

    rank: int
    process: launch.Process
    control: socket.socket
    inbox: wire.Inbox
    printers: tuple[Printer, Printer]
    page: Page
    device: str = ""
    alive: bool = True
    killed: int | None = field(default_factory=killed_for_memory)  # by the system, when it started
    cut_off: bool = False  # it lived when its socket had ended
    cause: str = ""  # why it was ended, if the driver did that


class Revived(NamedTuple):
    """What the callback of a run gets when a rank died and starts again: `line` says how it died."""

    line: str


@dataclass
class Round:
    """What the driver receives in one run: answers by rank, and failures in order of arrival.

    An answer is ("ready", device), ("refused", reason) or ("result", parcel). `waiting` are the ranks that have not
    answered yet; `doing` says what they did when they were interrupted, `lost` which of them had to be killed.
    `stuck`: what each rank waits for, if that is a deadlock. `revivals`: how many times a rank that dies is started
    again and gets `message` once more; `deaths` are the failures of these ranks.
    """

    run: int
    ranks: frozenset[int]
    callback: Callback | None = None
    answers: dict[int, tuple[str, Any]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    stuck: dict[int, str] | None = None
    called_back: bool = False
    doing: dict[int, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    revivals: int = 0
    message: Any = None
    deaths: list[Failure] = field(default_factory=list)
    show: Show = USUAL


@dataclass
class Members:
    """All ranks of one cluster. `generation` changes whenever process groups must be made again."""

    size: int
    device: str
    start: str  # "fork" or "spawn"
    threads: int
    settings: str  # of glibc in the ranks (`launch.settings_of_glibc`)
    transport: str
    owner: int = field(default_factory=os.getpid)
    generation: int = 0
    ranks: dict[int, Member] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    interrupts: Interrupts = field(default_factory=Interrupts)
    output: Output = field(default_factory=Output)
    unheard: list[Failure] = field(default_factory=list)  # deaths of ranks that nobody waited for

    # Starting

    def heal(self) -> list[Failure]:
        """Start every rank that is missing, until all are there: others may die meanwhile. Returns the deaths that were
        not known before. PlanError for a device that does not exist."""
        deaths, self.unheard = self.unheard, []
        while True:
            for member in list(self.ranks.values()):
                if member.alive and self._ended(member):
                    deaths.append(_death(member))
            self.stop([member.rank for member in self.ranks.values() if not member.alive])
            missing = [rank for rank in range(self.size) if rank not in self.ranks]
            if not missing:
                return deaths
            self.generation += 1
            try:
                if self.start == "fork":
                    launch.zygote(self.settings)
                for rank in missing:
                    with self.interrupts.shielded():  # else descriptors of a rank that nobody knows would stay open
                        self._start(rank)
                self._await_ready(missing)
            except BaseException:
                self.stop(missing)
                raise
            deaths += self.unheard
            self.unheard = []

    def _ended(self, member: Member) -> bool:
        try:
            while member.inbox.read() is not None:
                pass  # (a report that came too late)
        except EOFError:
            self._lost(member)
            return True
        return False

    def _start(self, rank: int) -> None:
        try:
            with contextlib.ExitStack() as undo:
                page = Page(launch.scratch_folder())
                undo.callback(page.close)
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                printers = []
                with theirs, contextlib.ExitStack() as inlets:
                    ends = []
                    for _ in range(2):
                        outlet, inlet = os.pipe()
                        os.set_blocking(outlet, False)
                        undo.callback(os.close, outlet)
                        inlets.callback(os.close, inlet)
                        printers.append(Printer(rank, outlet, self.output))
                        ends.append(inlet)
                    start = launch.fork if self.start == "fork" else launch.spawn
                    process: launch.Process = start(theirs.fileno(), ends[0], ends[1], self.settings)
                undo.pop_all()
        except OSError as error:
            raise RankError(f"rank {rank} cannot be started: {error.strerror or error}") from error
        member = self.ranks[rank] = Member(rank, process, ours, wire.Inbox(ours), (printers[0], printers[1]), page)
        wire.look_while_sending(ours)
        self.selector.register(ours, selectors.EVENT_READ, (member, None))
        for printer in printers:
            self.selector.register(printer.descriptor, selectors.EVENT_READ, (member, printer))
        path, folder = tuple(sys.path), os.getcwd()
        self.send(
            rank,
            Setup(
                rank,
                self.size,
                self.device,
                self.transport,
                self.threads,
                path,
                folder,
                dict(os.environ),
                page.path,
            ),
        )

    def _await_ready(self, ranks: list[int]) -> None:
        heard = Round(0, frozenset(ranks), waiting=set(ranks))
        self.collect(heard)
        for rank in ranks:
            self.ranks[rank].page.unlink()  # (the rank has mapped it by now)
        if heard.failures:
            raise RankDied(f"could not start: {heard.failures[0].line}; what it printed is above")
        for rank, (kind, value) in heard.answers.items():
            if kind == "refused":
                raise PlanError(value)
            self.ranks[rank].device = value

    # Talking

    def send(self, rank: int, message: Any) -> None:
        """Send one message to a rank. If the rank has died, `collect` notices that later; also that it was ended here,
        since it was stopped and does not take a long message."""
        member, since = self.ranks[rank], list[float]()

        def look() -> None:
            if not stacks.stopped(member.process.pid):
                return since.clear()
            since.append(time.monotonic())
            if since[-1] - since[0] >= STOPPED:
                member.cause = "was stopped (SIGSTOP) and did not take what it was sent, so that it was ended"
                member.process.kill()
                raise ConnectionError(member.cause)

        with contextlib.suppress(OSError):
            wire.send(member.control, message, look)

    def collect(self, heard: Round, watch: Watchdog | None = None, seconds: float | None = None) -> None:
        """Read output and reports until no rank is left in `heard.waiting`, until no more failures are expected, until
        `watch` finds a deadlock, or for so many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        known = len(heard.failures)
        self.output.begin(heard.ranks, heard.show)
        for rank in [rank for rank in heard.waiting if not self.ranks[rank].alive]:
            heard.failures.append(_death(self.ranks[rank]))
            heard.waiting.discard(rank)
        while heard.waiting and (heard.stuck is None or heard.called_back):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            last = left == 0.0  # what has come while this process was stopped is read
            if watch is not None and not heard.failures:
                if watch.due():
                    stuck = watch.look(self.pages(heard.waiting), self.pages(self.ranks.keys() - heard.waiting))
                    heard.stuck = None if stuck and self._end_stopped(heard) else stuck
                left = watch.interval
            due = self.output.show()
            if due is not None:
                left = due if left is None else min(left, due)
            for key, _ in self.selector.select(left):
                member: Member
                member, printer = key.data
                if self.ranks.get(member.rank) is not member:
                    continue  # it has died, as an earlier event of this loop showed, and was started again
                if printer is None:
                    self._listen(member, heard)
                else:
                    with self.interrupts.held():
                        printer.pump()
                    if not printer.open:
                        self.selector.unregister(printer.descriptor)
            for failure in heard.failures[known:]:
                until = time.monotonic() + (SETTLE_AFTER_LOST_PEER if failure.lost_peer else SETTLE)
                deadline = until if deadline is None else min(deadline, until)
            known = len(heard.failures)
            if last:
                break
        if heard.failures and not heard.called_back and all(one.lost_peer for one in heard.failures):
            self._await_dying(heard)
        for member in self.ranks.values():
            for printer in member.printers:
                printer.finish()
        self.output.flush()

    def call_back(self, heard: Round, seconds: float) -> None:
        """Interrupt the ranks that have not answered, so that they end the run and keep their state; kill those that do
        not answer within so many seconds. What they were doing is noted before."""
        heard.callback = None
        heard.called_back = True
        with self.interrupts.shielded():  # (a second one must not lose what is being read)
            for member in self.ranks.values():
                for printer in member.printers:
                    printer.pump()  # what was printed before the interrupt is shown together
        gone = {rank for rank in heard.waiting if not self.ranks[rank].alive}  # (such as one that should be revived)
        heard.doing = self.look(heard.waiting)
        found = self.pages({*heard.waiting, *(heard.stuck or {})})
        gone |= {rank for rank, process, _ in found if stacks.stopped(process.pid)}
        heard.lost |= gone
        heard.waiting -= gone
        self.stop(gone)
        for rank in heard.waiting:
            self.ranks[rank].page.interrupt(heard.run)
            self.ranks[rank].process.signal(signal.SIGINT)
        with self.interrupts:
            self.collect(heard, seconds=seconds)
        heard.lost |= heard.waiting
        self.stop(heard.waiting)

    def look(self, ranks: Iterable[int]) -> dict[int, str]:
        """What these ranks are doing at this moment, and where."""
        found = {}
        pages = self.pages(ranks)
        frames = stacks.ask(pages)
        for rank, process, page in pages:
            doing = page.read()
            what = f"waiting in {doing.operation}" if doing.since else "at work"
            if stacks.stopped(process.pid):
                what = "stopped (SIGSTOP)"
            what += f" ({doing.instruction})" if doing.instruction else ""
            place = stacks.text(frames[rank]) if frames.get(rank) else ""
            found[rank] = f"{what}:\n{place}" if place else what
        return found

    def pages(self, ranks: Iterable[int]) -> list[stacks.Entry]:
        """The number, process and notes of those of these ranks that are alive."""
        members = [self.ranks[rank] for rank in sorted(ranks)]
        return [(member.rank, member.process, member.page) for member in members if member.alive]

    def _listen(self, member: Member, heard: Round) -> None:
        """Handle everything that a rank has sent."""
        rank = member.rank
        while True:
            try:
                with self.interrupts.held():
                    message = member.inbox.read()
            except EOFError:
                return self._note_death(member, heard)
            if message is None:
                return
            kind, run, value = message
            if run != heard.run:
                continue  # it came too late, from a thread that a function left behind
            if kind == "report":
                if heard.callback is not None:
                    heard.callback(rank, unpack(value, f"a report of rank {rank}"))
                if not member.alive:
                    return  # the callback ended it
                continue
            if kind == "error":
                if not heard.called_back:  # (else it is the answer to the interrupt)
                    heard.failures.append(Failure(rank, value))
            else:
                heard.answers[rank] = (kind, value)
            heard.waiting.discard(rank)

    def _note_death(self, member: Member, heard: Round) -> None:
        rank = member.rank
        self._lost(member)
        if rank not in heard.ranks:
            self.unheard.append(_death(member))
        elif heard.called_back:
            heard.lost.add(rank)
        elif heard.revivals > len(heard.deaths) and rank in heard.waiting:
            return self._revive(member, heard)
        else:
            heard.failures.append(_death(member))
        heard.waiting.discard(rank)

    def _end_stopped(self, heard: Round) -> bool:
        """End ranks that were stopped, if they may start again; returns whether there are any."""
        stopped = [rank for rank, process, _ in self.pages(heard.waiting) if stacks.stopped(process.pid)]
        if len(heard.deaths) + len(stopped) > heard.revivals:
            return False
        for rank in stopped:
            self.ranks[rank].cause = "was stopped (SIGSTOP), so that it was ended"
            self.end(rank)
        return bool(stopped)

    def _await_dying(self, heard: Round) -> None:
        """All that has failed has lost a peer, whose own end was not heard of. A rank that is about to end is it: on a
        busy machine, or where a process that it has started holds its socket, its connections do not end at once."""
        for rank in sorted(heard.waiting):
            member = self.ranks[rank]
            if member.alive and ending(member.process.pid) and ends(member.process.pid, _LONGEST_END):
                self._listen(member, heard)
                if member.alive and rank in heard.waiting:
                    self._note_death(member, heard)

    def _revive(self, member: Member, heard: Round) -> None:
        """Start a rank that died during a run again, and send it the same message."""
        rank = member.rank
        heard.deaths.append(_death(member))
        if heard.callback is not None:
            heard.callback(rank, Revived(heard.deaths[-1].line))
        self.stop([rank])
        self._start(rank)
        self.ranks[rank].device = member.device
        self.send(rank, heard.message)
        self.generation += 1  # (the next run must make its groups again)

    def end(self, rank: int) -> None:
        """SIGKILL a rank that hangs; its death is noticed like any other."""
        self.ranks[rank].process.kill()

    # Ending

    def _lost(self, member: Member) -> None:
        """A rank's socket has ended: stop listening to it, and kill everything that it had started."""
        member.alive = False
        self.selector.unregister(member.control)
        # A rank that ends closes its socket on the way; one that has only lost its descriptors goes on.
        pid = member.process.pid
        member.cut_off = not (ends(pid, 0.2) or (ending(pid) and ends(pid, _LONGEST_END)))
        member.process.kill()
        member.process.wait(_LONGEST_END)

    def stop(self, ranks: Iterable[int]) -> None:
        """Kill these ranks and everything that they had started, print their last output, and forget them."""
        with self.interrupts.shielded():
            self._stop(ranks)

    def _stop(self, ranks: Iterable[int]) -> None:
        members = [self.ranks[rank] for rank in ranks if rank in self.ranks]
        for member in members:
            member.alive = False  # first, so that a rank is replaced even if an interrupt cuts this short
        for member in members:
            member.process.kill()
        for member in members:
            descriptors = [printer.descriptor for printer in member.printers]
            with contextlib.ExitStack() as closing:  # (all of it happens, whenever a second interrupt comes)
                closing.callback(self.ranks.pop, member.rank, None)
                for descriptor in descriptors:
                    closing.callback(os.close, descriptor)
                closing.callback(member.page.close)
                closing.callback(member.control.close)
                for descriptor in (member.control.fileno(), *descriptors):
                    closing.callback(self._forget, descriptor)
                member.process.wait(2)
                for printer in member.printers:
                    printer.finish()
        self.output.flush()

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError, ValueError):  # (it was unregistered before)
            self.selector.unregister(descriptor)

    def close(self) -> None:
        """End all ranks. Does nothing in a process that was forked from the owner."""
        if os.getpid() == self.owner:
            with self.interrupts.shielded():  # it is called once only
                self.stop(list(self.ranks))
                self.selector.close()


def _death(member: Member) -> Failure:
    status, killed = member.process.wait(0), killed_for_memory()
    cause = describe_status(status, None if killed is None or member.killed is None else killed > member.killed)
    if member.cause:
        cause = member.cause
    elif member.cut_off:
        cause = describe_status(LOST_DRIVER)
    elif status is None and not member.process.has_parent:
        cause = "ended with the helper process that ranks are forked from, which has died"
    return Failure(member.rank, None, cause, member.page.read().last)


def exchanged(
    call: Call,
    size: int,
    busy: threading.Lock,
    whose: str,
    exchange: Callable[[tuple[int, ...], Parcel], dict[int, Parcel]],
    inside: bool = False,
) -> list[Any]:
    """The results of a call, in the order of its ranks: `exchange` sends its parcel to these, and gives their answers.
    RankError while `busy`. `inside`: see `parcel.pack`."""
    active = check_ranks(call.ranks, size)
    parcel = pack_call(call.function, call.args, call.kwargs or {}, inside)
    if not busy.acquire(blocking=False):
        raise RankError(f"{whose} busy with another run")
    try:
        answers = exchange(active, parcel)
    finally:
        parcel.close()
        busy.release()
    return [unpack(answers[rank], f"the result of rank {rank}") for rank in active]


def unpack(parcel: Parcel, what: str) -> Any:
    """What a rank pickled; RankError, naming `what`, when the driver cannot load it."""
    try:
        return _unpack(parcel)
    except Exception as error:
        raise RankError(f"{what} cannot be loaded in the driver: {said(error)}") from error
