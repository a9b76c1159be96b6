"""The parameter server: it takes gradients, updates its part of the parameters, and sends them to workers.

    worker  PUSH ...........> every server     each keeps its part of the gradient, and tells server 0 when it is whole
            PULL ...........> server 0         ANSWER <.......... every server
    server 0  decides what happens next (program/server_rule.py), and the others do the same, row by row

So there is one order of updates and answers for all servers: they always take the same gradients, in whatever order
these arrive at each server. Server 0 keeps that order, from which a run can be replayed exactly.

A worker that dies and comes back connects again, as another session of the same worker. A gradient that all servers had
whole counts; of any other one they drop what has arrived, and the new session computes it again. When a server is gone,
its part of the parameters is lost, and the run ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from minipar.cluster import stacks
from minipar.cluster.watchdog import STOPPED
from minipar.errors import RankError
from minipar.execution.emulation import Pace, Pacing
from minipar.execution.saving.folder import Saved
from minipar.execution.updating import Form, Optimizer, Scheduler
from minipar.program.server_rule import ANSWER, APPLY, DROP, SYNC, TAKE, Consistency, Kind, Mode, Row
from minipar.server.connection import Peer, Refused
from minipar.server.framing import (
    BETWEEN_SERVERS,
    FROM_WORKERS,
    Message,
    What,
    at_work,
    bytes_of,
    listen,
)
from minipar.server.packing import unpack
from minipar.server.rendezvous import Meeting, reach, read_handle
from minipar.server.shard import Gradients, Pushed, Shard, digest, pieces_of, squares
from minipar.server.switchboard import Done, Switchboard
from minipar.strategies.passes.compress import pushed_bytes

_NOTHING = memoryview(b"")
_LOOK = 0.2  # seconds between two searches for silent workers


@dataclass(frozen=True)
class Settings:
    """How a group of servers works.

    workers       expected from the start; more may come
    steps         of a worker (async, ssp), or updates (sync, k-of-n), after which everything ends
    optimizer     makes the optimizer of the whole model, of which each server has a part; it must work element by
                  element
    scheduler     makes a scheduler of it, which steps once for each update
    forms         the parameters that the optimizer is made of, in the model's order; (): the keys
    patience      seconds after which a worker that is gone or hangs is removed; None: never. Over a Unix socket a
                  worker hangs if its process was stopped, which is seen after half a second, and not while that
                  computes; over TCP, where the server cannot see the process, if it sends nothing for so long
    on_death      "continue" without it, or "abort"
    wait_for_all  whether no worker begins before all that are expected have asked for parameters
    pacing        of emulated devices; None: nothing is delayed
    compress      how workers push gradients: none, bf16, fp16, topk:R
    processes     of the workers, where they are on this machine: one that is stopped before it connects is noticed
    clip          the norm to which an update's gradient is scaled down, that of all parts of it; None: it is not
    saved         the saved run from which everything goes on
    """

    workers: int
    steps: int
    optimizer: Optimizer
    mode: Mode = SYNC
    patience: float | None = 30.0
    on_death: str = "continue"
    wait_for_all: bool = False
    pacing: Pacing | None = None
    scheduler: Scheduler | None = None
    forms: tuple[Form, ...] = ()
    clip: float | None = None
    compress: str = "none"
    saved: Saved | None = None
    processes: tuple[int, ...] = ()


class Clipping(NamedTuple):
    """An update that waits for the norm of its whole gradient: each server has the squares of its part."""

    row: Row
    taken: list[Pushed]
    gradients: Gradients
    start: float
    squares: dict[int, float]  # by server


class ServerEvent(NamedTuple):
    """What a server did, and when (time.perf_counter). `kind` 0: it received a piece of tensor `which`; otherwise as
    in Row, and `which` is the version."""

    kind: int
    worker: int
    step: int
    which: int
    start: float
    end: float
    bytes: int = 0


@dataclass
class Served:
    """What a server brings back. `order` is server 0's; `values` are its pieces of the parameters, as bytes."""

    values: Tensor
    order: list[Row] = field(default_factory=list)
    events: list[ServerEvent] = field(default_factory=list)
    silent: list[tuple[int, int, float]] = field(default_factory=list)  # (worker, step, seconds) of removed workers
    received: int = 0  # bytes of gradients
    sent: int = 0  # bytes of parameters
    states: dict[int, int] = field(default_factory=dict)  # bytes that the optimizer keeps, by tensor
    clock_error: float = 0.0  # by which times of events may be wrong against those of another host


class Server:
    """One server: a loop over its connections. Server 0 leads: it decides, and the others follow.

    others    the other servers, at server 0; server 0, at the others
    sessions  at server 0: the present session of each worker
    arrived   at server 0: the servers at which a worker's gradient is whole, until it is whole at all of them
    early     at server 0: workers that ask before all servers have what they pushed
    """

    def __init__(
        self,
        meeting: str | Meeting,
        number: int,
        settings: Settings,
        values: Sequence[Tensor],
        report: Callable[[object], None],
        updated: Callable[[Server], None],
    ) -> None:
        self.handle = handle = read_handle(meeting)
        self.digest = digest(handle.keys, handle.count)
        self.number, self.settings, self.report, self.updated = number, settings, report, updated
        saved = settings.saved
        self.shard = Shard(
            handle.keys, pieces_of(handle.keys, handle.count)[number], values, settings.optimizer, settings.scheduler,
            settings.forms, None if saved is None else saved.header.schedule,
        )  # fmt: skip
        if saved is not None:
            from minipar.execution.saving.storage import Reading

            self.shard.resume(Reading(saved))
        self.rule = Consistency(settings.mode, settings.workers, settings.steps)
        if settings.wait_for_all:
            self.rule.absent = set(range(settings.workers))
        self.served = Served(self.shard.flat)
        self.pace = Pace() if settings.pacing is not None else None
        os.makedirs(handle.meeting.folder, mode=0o700, exist_ok=True)  # (on another host than the one that opened it)
        listener, self.address = listen(handle.place(number))
        self.board = Switchboard(listener, handle.token, self._target, self._done, self._gone)
        self.workers: dict[int, Peer] = {}
        self.others: dict[int, Peer] = {}
        self.processes = dict(enumerate(settings.processes[: settings.workers]))  # of workers that have not connected
        self.sessions: dict[int, int] = {}
        self.arrived: dict[int, set[int]] = {}
        self.early: set[int] = set()
        self.heard: dict[int, float] = {}  # when a worker has last said something, or was at work
        self.stopped: dict[int, float] = {}  # since when a worker's process is seen as stopped
        self.taking: list[Row] = []
        self.clipping: Clipping | None = None
        self.left = False  # whether a worker has done all its steps (if not, those that were removed come back)
        self.ending = self.over = False
        self.on: dict[int, Done] = {
            What.HELLO: self._hello,
            What.PUSH: self._pushed,
            What.PULL: self._pull,
            What.LEAVE: self._leave,
            What.HAVE: lambda peer, m: self._whole(m.worker, m.step, m.number, peer.server),
            What.ROW: self._row,
            What.FORGET: lambda peer, m: self._forget(m.worker, m.number),
            What.CLOSED: self._closed,
            What.NORM: self._norm,
        }

    # the loop --------------------------------------------------------------------------------------------------------

    def run(self) -> Served:
        self._meet()
        looked = time.monotonic()
        while not self.over:
            self.board.wait(_LOOK if self.pace is None else self.pace.left(_LOOK))
            while self.pace is not None and self.pace.go_on():
                self._decide()
            if self.number == 0 and time.monotonic() - looked > _LOOK:
                looked = time.monotonic()
                self._look_for_silent()
            self._decide()
        while self.pace is not None and not self.pace.idle:
            time.sleep(self.pace.left(_LOOK))
            self.pace.go_on()
        self.served.values, self.served.states = self.shard.flat, self.shard.state_bytes()
        return self.served

    def _meet(self) -> None:
        """Say where this server listens. The others do so when server 0 knows them; workers connect to it last."""
        if self.number:
            connection = reach(self.handle, 0, float("inf"))
            connection.send(Message(What.HELLO, key=self.number), self.digest)
            connection.receive()
            self.others[0] = self.board.adopt(connection.socket)
            self.others[0].server = 0
        self.handle.meeting.publish(f"address {self.number}", self.address)

    def _gone(self, peer: Peer) -> None:
        """A connection has ended. Without another server nothing can go on; without a worker, all the others can."""
        if peer.server >= 0:
            del self.others[peer.server]
            if not self.ending:
                raise ConnectionError(f"server {self.number}: server {peer.server} is gone")
        if self.workers.get(peer.worker) is peer:
            del self.workers[peer.worker]
            self.heard[peer.worker] = time.monotonic()  # (it has as long as any other to come back)

    def _send_others(self, message: Message) -> None:
        """Send a message to the other servers, on emulated devices with the time of the present event."""
        moment = 0.0 if self.pace is None else self.pace.now
        for peer in self.others.values():
            self.board.send(peer, message._replace(moment=moment))

    # messages --------------------------------------------------------------------------------------------------------

    def _target(self, peer: Peer, message: Message) -> memoryview:
        """Memory for the bytes of a message. A message that no correct peer sends is refused before it is read."""
        what, size = message.what, message.size
        if what == What.PUSH and peer.worker >= 0:
            return self._room(peer, message)
        if what == What.HELLO and peer.worker < 0 and peer.server < 0 and size == len(self.digest):
            peer.digest = memoryview(bytearray(size))
            return peer.digest
        expected = FROM_WORKERS if peer.worker >= 0 else BETWEEN_SERVERS if peer.server >= 0 else ()
        if size or what not in expected:
            raise Refused(f"message {what} of {size} bytes is none that server {self.number} expects")
        return _NOTHING

    def _room(self, peer: Peer, message: Message) -> memoryview:
        """Memory for a piece of a gradient."""
        key, size = message.key, message.size
        piece, wanted = self.shard.by_tensor.get(key), -1
        if piece is not None:
            item = self.handle.keys[key].type.itemsize
            wanted = pushed_bytes(piece.size // item, item, self.settings.compress)
        if wanted != size or not 0 <= message.version <= message.number:
            known = "another" if piece is None else f"one of {wanted} bytes"
            raise Refused(f"key {key}: {size} bytes were pushed, but server {self.number} keeps {known}")
        peer.since = time.perf_counter()
        pushed = self.shard.pushing(peer.worker, peer.session, message.step, message.version, message.number)
        if key not in pushed.missing:
            raise Refused(f"key {key} of step {message.step} was pushed before")
        if self.settings.compress == "none":
            return pushed.room.bytes[key]
        peer.packed = memoryview(bytearray(size))
        return peer.packed

    def _done(self, peer: Peer, message: Message) -> None:
        if peer.worker >= 0:
            self.heard[peer.worker] = time.monotonic()
        if self.pace is not None:
            self.pace.hear(0.0 if message.what == What.PUSH else message.moment)
        self.on[message.what](peer, message)
        if self.pace is not None:  # (before the next event, which may have another emulated time)
            self._decide()

    def _hello(self, peer: Peer, message: Message) -> None:
        if peer.digest != self.digest:
            raise Refused(f"server {self.number} keeps other keys, shapes or dtypes; connect by its folder")
        if message.key:
            peer.server = message.key
            self.others[peer.server] = peer
        else:
            self._join(peer, message.worker, message.number)
        self.board.send(peer, Message(What.WELCOME))

    def _join(self, peer: Peer, worker: int, session: int) -> None:
        """A worker has begun, or has begun anew."""
        if worker in self.workers:
            self.board.drop(self.workers[worker])
        peer.worker, peer.session = worker, session
        self.workers[worker] = peer
        self.processes.pop(worker, None)
        if self.number:
            return
        self.heard[worker] = time.monotonic()
        self.sessions[worker] = session
        self.early.discard(worker)
        self.arrived.pop(worker, None)
        self.rule.forget(worker)
        if worker not in self.rule.pushed:
            self._forget(worker, session)
            self._send_others(Message(What.FORGET, worker=worker, number=session))
        self._tell_all(self.rule.join(worker))

    def _forget(self, worker: int, session: int) -> None:
        """A worker began anew: drop the parts of its earlier gradient, which may not be mixed with the new ones. (One
        that an update has taken stays until the update is made.)"""
        taken = {id(pushed) for pushed in self.clipping.taken} if self.clipping is not None else set()
        for pushed in list(self.shard.pushed.values()):
            if pushed.worker == worker and pushed.session != session and id(pushed) not in taken:
                self.shard.let_go(pushed)

    def _pull(self, peer: Peer, message: Message) -> None:
        if message.step < 0 or self.rule.known(peer.worker, message.step):
            self.rule.ask(peer.worker)
        else:
            self.early.add(peer.worker)

    def _leave(self, peer: Peer, message: Message) -> None:
        if peer.worker in self.rule.members:
            self.left = True
            self._tell_all(self.rule.leave(peer.worker))

    def _pushed(self, peer: Peer, message: Message) -> None:
        """A piece of a gradient was received. On an emulated link it arrives later, with those that travel with it."""
        if self.settings.compress != "none":
            here = self.shard.pushed[peer.worker, peer.session]
            unpack(peer.packed, here.room.of[message.key], self.settings.compress)
        if self.pace is None or not (message.moment or peer.coming):
            self._keep(peer, message, peer.since, time.perf_counter())
        elif message.moment:
            pace, travelling = self.pace, [message]
            peer.coming = travelling

            def arrive(start: float, end: float) -> None:
                if peer.coming is travelling:
                    peer.coming = []
                for each in travelling:
                    self._keep(peer, each, start, end)

            def begin() -> None:
                pace.work(message.lasts, arrive)

            pace.later(message.moment, begin)
        else:
            peer.coming.append(message)

    def _keep(self, peer: Peer, message: Message, start: float, end: float) -> None:
        """Keep a piece of a gradient that has arrived. The last piece makes the gradient whole."""
        worker, step, key = peer.worker, message.step, message.key
        pushed = self.shard.pushed.get((worker, peer.session))
        if pushed is None or key not in pushed.missing:
            return  # (on an emulated link: its worker began anew meanwhile)
        pushed.missing.discard(key)
        self.served.received += message.size
        self.served.events.append(ServerEvent(0, worker, step, key, start, end, message.size))
        if pushed.missing:
            return
        if self.number == 0:
            self._whole(worker, step, peer.session, 0)
        else:
            self._send_others(Message(What.HAVE, 0, worker, step, number=peer.session))

    def _whole(self, worker: int, step: int, session: int, server: int) -> None:
        """Server 0: a gradient is whole at a server. When it is whole at all of them, it counts."""
        if self.sessions.get(worker) != session:
            return  # (its worker began anew meanwhile)
        arrived = self.arrived.setdefault(worker, set())
        arrived.add(server)
        if len(arrived) < self.handle.count:
            return
        del self.arrived[worker]
        self.rule.push(worker, step)
        if worker in self.early:
            self.early.discard(worker)
            self.rule.ask(worker)

    # what happens ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Server 0: do everything that is ready, and let the other servers do it, too."""
        while self.number == 0 and self.clipping is None and (rows := self.rule.decide()):
            for row in rows:
                self._tell_all(row)
        if self.number == 0 and self.clipping is None and self.left and self.rule.over:
            self._end()

    def _tell_all(self, row: Row) -> None:
        """Server 0: let all servers do what a row says. An answer is for the present session of its worker."""
        self.served.order.append(row)
        session = self.sessions.get(row.worker, 0)
        self._send_others(Message(What.ROW, row.kind, row.worker, row.step, row.version, session))
        self._do(row, session)

    def _row(self, peer: Peer, message: Message) -> None:
        self._do(Row(Kind(message.key), message.worker, message.step, message.version), message.number)

    def _do(self, row: Row, session: int) -> None:
        """Do what a row of the order says, on this server's part."""
        if row.kind is TAKE:
            self.taking.append(row)
        elif row.kind is APPLY:
            self._update(row)
        elif row.kind is ANSWER:
            self._answer(row, session)
        elif row.kind is DROP and (dropped := self.shard.find(row.worker, row.step)) is not None:
            self.shard.let_go(dropped)

    # updates ---------------------------------------------------------------------------------------------------------

    def _update(self, row: Row) -> None:
        """Make an update; with `clip` when all servers know the norm of its gradient, and nothing else before that."""
        start = time.perf_counter()
        found = [self.shard.find(take.worker, take.step) for take in self.taking]
        taken = [pushed for pushed in found if pushed is not None]
        self.taking.clear()
        gradients = self.shard.combine(taken)
        if self.settings.clip is None:
            return self._apply(row, taken, gradients, start)
        mine = squares(gradients)
        self.clipping = Clipping(row, taken, gradients, start, {})
        if self.number:
            self._send_others(Message(What.NORM, lasts=mine))
        else:
            self._add_squares(0, mine)

    def _norm(self, peer: Peer, message: Message) -> None:
        if self.number:
            self._clip(message.lasts)
        else:
            self._add_squares(peer.server, message.lasts)

    def _add_squares(self, server: int, mine: float) -> None:
        """Server 0: when the squares of all parts are here, send the others their sum."""
        assert self.clipping is not None
        found = self.clipping.squares
        found[server] = mine
        if len(found) == self.handle.count:
            whole = sum(found[k] for k in range(self.handle.count))
            self._send_others(Message(What.NORM, lasts=whole))
            self._clip(whole)

    def _clip(self, whole: float) -> None:
        """Make the update that has waited for the norm, of which this is the square."""
        assert self.clipping is not None
        assert self.settings.clip is not None
        (row, taken, gradients, start, _), self.clipping = self.clipping, None
        self.shard.clip(gradients, whole, self.settings.clip)
        self._apply(row, taken, gradients, start)

    def _apply(self, row: Row, taken: list[Pushed], gradients: Gradients, start: float) -> None:
        self.shard.apply(taken, gradients)
        end = time.perf_counter()

        def note(start: float, end: float) -> None:
            self.served.events.append(ServerEvent(row.kind, *row[1:], start, end))

        if self.pace is None:
            note(start, end)
        else:  # (on emulated devices it takes their time)
            assert self.settings.pacing is not None
            known = self.settings.pacing.updates
            self.pace.work(end - start if known is None else known[self.number], note)
        self.updated(self)

    # answers ---------------------------------------------------------------------------------------------------------

    def _answer(self, row: Row, session: int) -> None:
        """Send a worker the parameters of its next step; after the last step it needs none."""
        _, worker, step, version = row
        peer = self.workers.get(worker)
        if peer is None or peer.session != session:
            return
        self.heard[worker] = time.monotonic()
        data = bytes_of(self.shard.flat) if step < self.settings.steps else _NOTHING
        message = Message(What.ANSWER, self.settings.steps, worker, step, version)
        flat, start = self.shard.flat, time.perf_counter()

        def note(start: float, end: float) -> None:
            self.served.events.append(ServerEvent(ANSWER, worker, step, version, start, end, len(data)))

        def written(flat: Tensor = flat) -> None:  # (the default keeps the tensor alive until then)
            self.served.sent += len(data)
            if self.pace is None or not len(data):
                note(start, time.perf_counter())

        if self.pace is not None and len(data):
            assert self.settings.pacing is not None
            occupied, delay = self.settings.pacing.replies[self.number][worker, step]
            message = message._replace(moment=self.pace.work(occupied, note) + delay)
        self.shard.readers.append(peer)
        self.board.send(peer, message, data, written)

    # workers that are gone -------------------------------------------------------------------------------------------

    def _look_for_silent(self) -> None:
        """Server 0: remove workers that are gone or hang. One that computes for a long time does not hang."""
        patience = float("inf") if self.settings.patience is None else self.settings.patience
        for worker in sorted(self.rule.members):
            now, peer = time.monotonic(), self.workers.get(worker)
            process = peer.process if peer is not None else self.processes.get(worker, 0)
            stopped = stacks.stopped(process)
            working = process > 0 and not stopped and at_work(process)
            if working:  # (so that a step however long leaves it all the time to come back, should it die then)
                self.heard[worker] = now
            silence = now - self.heard.setdefault(worker, now)
            since = self.stopped.setdefault(worker, now) if stopped else self.stopped.pop(worker, now)
            silent = now - since >= min(patience, STOPPED) if stopped else silence >= patience
            waits = worker in self.rule.asking or worker in self.rule.pushed or worker in self.early
            # (Before a worker has connected for the first time, its cluster watches it.)
            absent = peer is None and worker in self.rule.absent and not stopped
            if silent and not (working or waits or absent):
                self._remove(worker, process if stopped else 0, silence)

    def _remove(self, worker: int, stopped: int, silence: float) -> None:
        """Go on without a worker. `stopped`: its process, if it was stopped, or 0."""
        step, peer = self.rule.clock(worker), self.workers.pop(worker, None)
        if self.settings.on_death == "abort":
            why = f" (process {stopped}) was stopped (SIGSTOP), and" if stopped else ""
            raise RankError(f"worker {worker}{why} has shown no sign of life for {silence:.1f} s, in step {step}")
        self.stopped.pop(worker, None)
        self.heard[worker] = time.monotonic()
        self.served.silent.append((worker, step, silence))
        self._tell_all(self.rule.leave(worker, removed=True))
        self.sessions.pop(worker, None)
        if peer is not None:
            self.board.drop(peer)
        if peer is not None or stopped:  # (else it has ended, or is starting again)
            self.report(("silent", worker))

    # the end ---------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Server 0: all workers are done. The other servers end when they have done all that came before."""
        if not self.ending:
            self.ending = True
            self._send_others(Message(What.CLOSED))
        if not self.others:
            self.handle.close()
            for peer in self.workers.values():
                self.board.send(peer, Message(What.CLOSED))
            self.over = True

    def _closed(self, peer: Peer, message: Message) -> None:
        self.ending = self.over = True


def serve(
    meeting: str | Meeting,
    number: int,
    settings: Settings,
    values: Sequence[Tensor],
    report: Callable[[object], None] = lambda fact: None,
    updated: Callable[[Server], None] = lambda server: None,
    ended: Callable[[Server], None] = lambda server: None,
) -> Served:
    """Be server `number` of those that `rendezvous.open_folder` wrote a handle for, until all workers are done.

    values   the initial parameters, in the order of the keys
    report   called with ("silent", worker) when a worker is removed
    updated  called with the server after each of its updates, before anything else happens; `ended` at the end
    """
    server = Server(meeting, number, settings, values, report, updated)
    with closing(server.board):
        served = server.run()
        ended(server)
        return served
