"""Ranks in processes that the driver has started on its own machine: how they start, are watched, and end."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minipar.cluster import launch, stacks, wire
from minipar.cluster.failures import Failure, lost_state, who_waits
from minipar.cluster.members import Member, Members, Round
from minipar.cluster.notes import Page
from minipar.cluster.output import Printer
from minipar.cluster.parcel import Parcel
from minipar.cluster.processes import LOST_DRIVER, describe_status, ending, ends, held, killed_for_memory
from minipar.cluster.ranks import Call
from minipar.cluster.watchdog import STOPPED, Watchdog
from minipar.cluster.worker import Setup, Situation
from minipar.errors import PlanError, RankDied, RankError

_LONGEST_END = 2.0  # seconds that a rank may take from the moment when the system begins to end it
# Seconds that interrupted ranks have to answer before they are killed: after a failure, and else.
GRACE_AFTER_FAILURE = 0.25
GRACE = 0.5


@dataclass(kw_only=True)
class Child(Member):
    """A rank of this driver's own. If it is not `alive`, it is replaced at the next call."""

    process: launch.Process
    page: Page
    device: str = ""
    killed: int | None = field(default_factory=killed_for_memory)  # by the system, when it started
    cut_off: bool = False  # it lived when its socket had ended
    cause: str = ""  # why it was ended, if the driver did that


class Revived(NamedTuple):
    """What the callback of a run gets when a rank died and starts again: `line` says how it died."""

    line: str


class Children(Members[Child]):
    """All ranks of a `Cluster`.

    start      "fork" or "spawn"
    settings   of glibc in the ranks (`launch.settings_of_glibc`)
    patience   seconds until ranks that wait for each other are a deadlock
    local      whether all messages are carried by this machine's memory and sockets
    """

    far = False

    def __init__(self, size: int, device: str, start: str, threads: int, settings: str, transport: str) -> None:
        super().__init__(size)
        self.device, self.start, self.threads, self.settings, self.transport = (
            device,
            start,
            threads,
            settings,
            transport,
        )
        self.patience, self.local = math.inf, True
        self.owner = os.getpid()
        self.unheard: list[Failure] = []  # deaths of ranks that nobody waited for
        self.folder = tempfile.mkdtemp(prefix="cluster-", dir=launch.scratch_folder())  # where ranks meet
        self._met = -1  # the generation whose ranks may have met

    # Starting

    def heal(self) -> list[Failure]:
        """Start every rank that is missing, until all are there: others may die meanwhile. Returns the deaths that were
        not known before. PlanError for a device that does not exist."""
        deaths, self.unheard = self.unheard, []
        while True:
            for member in list(self.ranks.values()):
                if member.alive and self._has_ended(member):
                    deaths.append(self.death(member))
            self.stop([member.rank for member in self.ranks.values() if not member.alive])
            missing = [rank for rank in range(self.size) if rank not in self.ranks]
            if not missing:
                return deaths
            self.generation += 1
            try:
                if self.start == "fork":
                    launch.zygote(self.settings)
                for rank in missing:
                    with held():  # else descriptors of a rank that nobody knows would stay open
                        self._start(rank)
                self._await_ready(missing)
            except BaseException:
                self.stop(missing)
                raise
            deaths += self.unheard
            self.unheard = []

    def _has_ended(self, member: Child) -> bool:
        try:
            while member.inbox.read() is not None:
                pass  # (a report that came too late)
        except EOFError:
            self._lose(member)
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
        wire.look_while_sending(ours)
        self.add(Child(rank, ours, tuple(printers), process=process, page=page))
        path, folder, environment = tuple(sys.path), os.getcwd(), dict(os.environ)
        numbers = rank, self.size, self.device, self.transport, self.threads
        self.send(rank, Setup(*numbers, path, folder, environment, page.path))

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

    # A run

    def begin(self, call: Call, active: tuple[int, ...], heard: Round, parcel: Parcel) -> None:
        for death in self.heal():
            warnings.warn(f"{death.line}; it starts anew, without its state", RuntimeWarning, stacklevel=6)
        heard.watch = Watchdog(self.patience, self.local)
        situation = Situation(self.generation, active, self._meeting_place(), _free_port())
        heard.message = (self.run, situation, tuple(sys.path), parcel)
        for rank in active:
            heard.waiting.add(rank)
            self.send(rank, heard.message)

    def _meeting_place(self) -> str:
        """The path where ranks of this generation meet. What those of earlier ones have left there goes: a rank that is
        killed leaves its socket."""
        os.makedirs(self.folder, exist_ok=True)  # (a helper process removes it when it ends)
        if self._met != self.generation:
            self._met = self.generation
            for name in os.listdir(self.folder):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.folder, name))
        return os.path.join(self.folder, str(self._met))

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

    def collect(self, heard: Round, seconds: float | None = None, ended: int = -1) -> bool:
        over = super().collect(heard, seconds, ended)
        if heard.failures and not heard.called_back and all(one.lost_peer for one in heard.failures):
            self._await_dying(heard)
        return over

    def _await_dying(self, heard: Round) -> None:
        """All that has failed has lost a peer, whose own end was not heard of. A rank that is about to end is it: on a
        busy machine, or where a process that it has started holds its socket, its connections do not end at once."""
        for rank in sorted(heard.waiting):
            member = self.ranks[rank]
            if member.alive and ending(member.process.pid) and ends(member.process.pid, _LONGEST_END):
                self._listen(member, heard)
                if member.alive and rank in heard.waiting:
                    self.ended(member, heard)

    def look_after(self, heard: Round) -> float | None:
        watch = heard.watch
        if watch is None:
            return None
        if not heard.called_back and watch.due():
            stuck = watch.look(self.pages(heard.waiting), self.pages(self.ranks.keys() - heard.waiting))
            heard.stuck = None if stuck and self._end_stopped(heard) else stuck
        return watch.interval

    def _end_stopped(self, heard: Round) -> bool:
        """End ranks that were stopped, if they may start again; returns whether there are any."""
        stopped = [rank for rank, process, _ in self.pages(heard.waiting) if stacks.stopped(process.pid)]
        if len(heard.deaths) + len(stopped) > heard.revivals:
            return False
        for rank in stopped:
            self.ranks[rank].cause = "was stopped (SIGSTOP), so that it was ended"
            self.end(rank)
        return bool(stopped)

    def grace(self, heard: Round) -> float:
        return GRACE_AFTER_FAILURE if heard.failures else GRACE

    def interrupt(self, heard: Round) -> None:
        """Interrupt the ranks that have not answered. What they were doing is noted before."""
        with held():  # (a second one must not lose what is being read)
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

    def give_up(self, heard: Round, error: BaseException) -> None:
        """Interrupt the ranks of a run, so that they keep their state where that is possible."""
        stuck = None
        try:
            if isinstance(error, KeyboardInterrupt) and not heard.called_back and heard.watch is not None:
                stuck = heard.watch.waits(self.pages(heard.waiting))
            if heard.called_back or not isinstance(error, Exception | KeyboardInterrupt):
                heard.lost |= heard.waiting
                self.stop(heard.waiting)  # the button was pressed twice, or the driver ends
            else:
                self.call_back(heard)
        except BaseException as second:
            heard.lost |= heard.waiting
            self.stop(heard.waiting)
            if isinstance(second, KeyboardInterrupt):  # the button was pressed twice
                second.args = (_interrupted(heard, None),)
            raise
        if isinstance(error, KeyboardInterrupt):
            error.args = (_interrupted(heard, stuck),)

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

    # Ending

    def ended(self, member: Child, heard: Round) -> None:
        rank = member.rank
        self._lose(member)
        if rank not in heard.ranks:
            self.unheard.append(self.death(member))
        elif heard.called_back:
            heard.lost.add(rank)
        elif heard.revivals > len(heard.deaths) and rank in heard.waiting:
            return self._revive(member, heard)
        else:
            heard.failures.append(self.death(member))
        heard.waiting.discard(rank)

    def _revive(self, member: Child, heard: Round) -> None:
        """Start a rank that died during a run again, and send it the same message."""
        rank = member.rank
        heard.deaths.append(self.death(member))
        self.call(heard)  # (what it had reported)
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

    def death(self, member: Child) -> Failure:
        status, killed = member.process.wait(0), killed_for_memory()
        cause = describe_status(status, None if killed is None or member.killed is None else killed > member.killed)
        if member.cause:
            cause = member.cause
        elif member.cut_off:
            cause = describe_status(LOST_DRIVER)
        elif status is None and not member.process.has_parent:
            cause = "ended with the helper process that ranks are forked from, which has died"
        return Failure(member.rank, None, cause, member.page.read().last)

    def _lose(self, member: Child) -> None:
        """A rank's socket has ended: stop listening to it, and kill everything that it had started."""
        member.alive = False
        self.selector.unregister(member.control)
        # A rank that ends closes its socket on the way; one that has only lost its descriptors goes on.
        pid = member.process.pid
        member.cut_off = not (ends(pid, 0.2) or (ending(pid) and ends(pid, _LONGEST_END)))
        member.process.kill()
        member.process.wait(_LONGEST_END)

    def drop(self, ranks: set[int]) -> None:
        self.stop(ranks)

    def stop(self, ranks: Iterable[int]) -> None:
        """Kill these ranks and everything that they had started, print their last output, and forget them."""
        with held():
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
            with held():  # it is called once only
                self.stop(list(self.ranks))
                self.selector.close()
                shutil.rmtree(self.folder, ignore_errors=True)


def _interrupted(heard: Round, stuck: dict[int, str] | None) -> str:
    lines = [*who_waits(stuck or {}, heard.ranks), *lost_state(heard.lost)]
    return "\n".join(["the ranks were interrupted", *lines])


def _free_port() -> int:
    """A port for users' own `init_process_group`; a new one for each run, so that no old store answers on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
