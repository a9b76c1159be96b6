"""The parameter server: it takes gradients, updates its part of the parameters, and sends them to workers.

    worker  PUSH ...........> every server     each keeps its part of the gradient, and tells server 0 when it is whole
            PULL ...........> server 0         ANSWER <.......... every server
    server 0  decides what happens next (program/server_rule.py), and the others do the same, row by row

So there is one order of updates and answers for all servers: they always take the same gradients, in whatever order
these arrive at each server. Server 0 keeps that order, from which a run can be replayed exactly.

Several workers can be one replica (`Settings.replicas`), and one worker of the rule: their gradients count when the
last of them is at all servers, and they are answered together when all of them have asked, with one version. Where the
stages of a replica do not wait for each other, each of them is such a worker, and each stage has a rule of its own.

When a server dies, all servers go back to the newest snapshot that all of them have; workers connect again and go on
there. When a worker dies, its whole replica connects again, each of its workers as a new one (lives.py). What was
pushed and acknowledged before that snapshot is in it. A gradient has a name (worker, step, key), and counts once,
however often it is sent.

Where every group is served by itself (overlap=priority), a server updates a group as soon as all workers have pushed
it, and sends it at once, to each worker in the order in which that pulls. Nobody decides this, since in mode sync it
changes no number; server 0 only keeps the order of whole updates. So are the layers of pipelines without flushes. A
piece of a group that is served by itself is a group here, with keys of its own, and so are groups that travel together.

A worker that begins a step again then needs groups that are updated already as they were before (on_death=continue).
No server begins an update before the last one is complete everywhere, and until this one is, it keeps what it has
updated as it was. What the worker had pushed of the step counts; of what it pushes again servers take only the rest:

    worker 0   PULL 0 1 2 | F B PUSH 2, dies    begins again: PULL 0 1 2 | F B PUSH 2 1 0
    worker 1   ............ F B PUSH 2 1 0                                             PULL 2 1 0 ...
    server                  APPLY 2             sends 2 as it was           APPLY 1, APPLY 0: complete, 2 as it was goes
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.cluster import stacks
from minipar.cluster.watchdog import STOPPED
from minipar.errors import RankError
from minipar.execution.emulation import Pace, Pacing
from minipar.execution.saving.folder import Saved
from minipar.execution.updating import Form, Optimizer, Scheduler
from minipar.program.server_rule import ANSWER, APPLY, DROP, JOIN, LEAVE, SYNC, TAKE, Kind, Mode, Row, Rules
from minipar.server import snapshot
from minipar.server.connection import Peer, Refused
from minipar.server.framing import (
    BETWEEN_SERVERS,
    FROM_WORKERS,
    MOST_TEXT,
    PUSH,
    Message,
    What,
    at_work,
    bits_of,
    listen,
    nanoseconds,
    number_of,
    seconds,
)
from minipar.server.packing import unpack
from minipar.server.rendezvous import Introduction, Meeting, ServerHandle, present, read_handle
from minipar.server.shard import Division, Gradients, Pushed, Run, Shard, digest, pieces_of, runs_of, scale_of, squares
from minipar.server.switchboard import Done, Switchboard
from minipar.strategies.passes.compress import pushed_bytes
from minipar.strategies.shares import Piece

_NOTHING = memoryview(b"")
_LOOK = 0.2  # seconds between two searches for silent workers


@dataclass(frozen=True)
class Settings:
    """How a group of servers works.

    workers         expected from the start; more may come
    steps           of a worker (async, ssp), or updates (sync, k-of-n), after which everything ends
    optimizer       makes the optimizer of the whole model, of which each server has a part; it must work element by
                    element
    scheduler       makes a scheduler of it, which steps once for each update
    forms           the parameters that the optimizer is made of, in the model's order; (): the keys
    snapshot_every  updates between two snapshots; None: no snapshots, and the run ends when a server dies
    patience        seconds after which a worker that is gone or hangs is removed; None: never. Over a Unix socket a
                    worker hangs if its process was stopped, which is seen after half a second, and not while that
                    computes; over TCP, where the server cannot see the process, if it sends nothing for so long
    on_death        "continue" without it, or "abort"
    together        whether no worker begins before all that are expected have asked for parameters
    pacing          of emulated devices; None: nothing is delayed
    compress        how workers push gradients: none, bf16, fp16, topk:R
    processes       of the workers, where they are on this machine: one that is stopped before it connects is noticed,
                    and one that computes while server 0 starts again is waited for
    division        which workers have which keys; None: each pulls all of them at once
    replicas        the workers of each replica, or of each stage of one; (): every worker is one by itself
    rules           how many rules there are: one, or one for each stage
    clip            the norm to which an update's gradient is scaled down, that of all parts together; None: it is not
    saved           the saved run from which everything goes on
    """

    workers: int
    steps: int
    optimizer: Optimizer
    mode: Mode = SYNC
    snapshot_every: int | None = None
    patience: float | None = 30.0
    on_death: str = "continue"
    together: bool = False
    pacing: Pacing | None = None
    scheduler: Scheduler | None = None
    forms: tuple[Form, ...] = ()
    clip: float | None = None
    compress: str = "none"
    saved: Saved | None = None
    processes: tuple[int, ...] = ()
    division: Division | None = None
    replicas: tuple[tuple[int, ...], ...] = ()
    rules: int = 1

    @property
    def members(self) -> int:
        """How many workers the rules have: the replicas, or their stages, that are expected from the start."""
        return len(self.replicas) or self.workers


class Clipping(NamedTuple):
    """An update that waits for the norm of its whole gradient: each server has the squares of its part."""

    row: Row
    taken: list[Pushed]
    gradients: Gradients
    start: float
    squares: dict[int, float]  # by server


class ServerEvent(NamedTuple):
    """What a server did, and when (time.perf_counter). `kind` 0: it received a piece of tensor `which`; otherwise as
    in Row, and `which` is the version. `group`: of an update or answer of one group."""

    kind: int
    worker: int
    step: int
    which: int
    start: float
    end: float
    bytes: int = 0
    group: int = -1


@dataclass
class Served:
    """What a server brings back. `order` is server 0's; `values` are its pieces of the parameters, as bytes."""

    values: Tensor
    order: list[Row] = field(default_factory=list)
    events: list[ServerEvent] = field(default_factory=list)
    silent: list[tuple[int, int, float]] = field(default_factory=list)  # (worker, step, seconds) of removed workers
    restored: list[int] = field(default_factory=list)  # versions that this process went back to
    received: int = 0  # bytes of gradients
    sent: int = 0  # bytes of parameters
    states: dict[int, int] = field(default_factory=dict)  # bytes that the optimizer keeps, by tensor
    clock_error: float = 0.0  # by which times of events may be wrong against those of another host


def rows_of(table: Tensor) -> list[Row]:
    """An order, from the table of numbers by which a snapshot stores it."""
    return [Row(Kind(row[0]), *row[1:]) for row in table.tolist()]


class Replicas:
    """Which workers are one replica, or one stage of one, as `Settings` say it; one that they do not name is a replica
    by itself."""

    def __init__(self, replicas: Sequence[tuple[int, ...]] = ()) -> None:
        self.workers = dict(enumerate(replicas))
        self.number = {worker: r for r, workers in self.workers.items() for worker in workers}

    def of(self, worker: int) -> int:
        """The replica of a worker."""
        return self.number.get(worker, worker)

    def members(self, replica: int) -> tuple[int, ...]:
        """The workers of a replica."""
        return self.workers.get(replica, (replica,))


ALONE = Replicas()


class Together:
    """What each of a replica's workers has done: it counts when all of them have."""

    def __init__(self, replicas: Replicas = ALONE) -> None:
        self.replicas = replicas
        self.who: dict[int, set[int]] = {}  # replica -> its workers that have done it

    def done(self, worker: int) -> bool:
        """A worker has done it. Returns whether all of its replica have now."""
        self.who.setdefault(self.replicas.of(worker), set()).add(worker)
        return self.all(worker)

    def all(self, worker: int) -> bool:
        replica = self.replicas.of(worker)
        return len(self.who.get(replica, ())) == len(self.replicas.members(replica))

    def forget(self, *workers: int) -> None:
        for worker in workers:
            self.who.get(self.replicas.of(worker), set()).discard(worker)


class Arrivals:
    """At server 0: which servers have a gradient whole, and which workers pull.

    counts    for workers that do not push to all servers, to how many
    pulling   the workers that wait for an answer
    early     replicas that pull before all servers have what they pushed
    """

    def __init__(
        self, servers: int, counts: Mapping[int, int] = MappingProxyType({}), replicas: Replicas = ALONE
    ) -> None:
        self.servers, self.counts, self.replicas = servers, counts, replicas
        self.at: dict[tuple[int, int, int], set[int]] = {}  # worker, step, life
        self.pushed: dict[tuple[int, int], set[int]] = {}  # replica, step -> its workers whose gradient is everywhere
        self.pulling = Together(replicas)
        self.early: set[int] = set()

    def coming(self, worker: int, step: int, life: int) -> None:
        """A gradient is on an emulated link: a pull of its worker waits for it."""
        self.at.setdefault((worker, step, life), set())

    def whole(self, worker: int, step: int, life: int, server: int) -> bool:
        """A gradient is whole at a server. Returns whether that of its replica is whole at all of them now."""
        found = self.at.setdefault((worker, step, life), set())
        found.add(server)
        if len(found) < self.counts.get(worker, self.servers):
            return False
        del self.at[worker, step, life]
        replica = self.replicas.of(worker)
        pushed = self.pushed.setdefault((replica, step), set())
        pushed.add(worker)
        if len(pushed) < len(self.replicas.members(replica)):
            return False
        del self.pushed[replica, step]
        return True

    def wait(self, worker: int, late: bool = False, first: bool = False) -> bool:
        """A worker pulls. Returns whether its replica must wait: for another one of its workers to pull, or since a
        gradient that it pushed is not at all servers yet. late: that is known to be under way, to other servers than
        this one, or from another one of its workers. first: it has pushed nothing in this life."""
        replica = self.replicas.of(worker)
        members = self.replicas.members(replica)
        if first:
            pass
        elif late or any(key[0] in members for key in self.at):
            self.early.add(replica)
        return not self.pulling.done(worker) or replica in self.early

    def awaited(self, worker: int) -> bool:
        """Whether a worker's replica had pulled before its gradient was at all servers; forgets that it was early."""
        replica = self.replicas.of(worker)
        early = replica in self.early
        self.early.discard(replica)
        return early and self.pulling.all(worker)

    def forget(self, worker: int, life: int) -> None:
        """A worker began anew, in this life: forget its earlier ones."""
        replica = self.replicas.of(worker)
        self.early.discard(replica)
        self.at = {key: found for key, found in self.at.items() if key[0] != worker or key[2] == life}
        for (mine, _), pushed in self.pushed.items():
            if mine == replica:
                pushed.discard(worker)


class Gathering:
    """At a server: which groups all workers have pushed, and what each worker gets next, where groups are served one by
    one.

    counts    (group, step) -> pieces of its gradient that have arrived
    updates   the updates of each group
    made      update -> how many groups have had it
    complete  the updates that all servers have made of all groups; each group here has had as many, or one more
    early     groups whose next update waits until the last one is complete, with its step
    next_of   worker -> step and place of what it gets next
    """

    def __init__(self, division: Division, shard: Shard) -> None:
        self.division, self.shard = division, shard
        here = [frozenset(k for k in keys if k in shard.by_tensor) for keys in division.keys]
        self.group_of = {k: g for g, keys in enumerate(division.keys) for k in keys}
        self.wanted = [sum(len(mine & division.own[w]) for w in division.holders(g)) for g, mine in enumerate(here)]
        self.mine = sum(map(bool, self.wanted))
        self.orders = [[g for g in held if here[g]] for held in division.held]
        self.counts: Counter[tuple[int, int]] = Counter()
        self.complete = shard.updates
        self.updates = Counter(dict.fromkeys(range(len(here)), shard.updates))
        self.made: Counter[int] = Counter()
        self.early: list[tuple[int, int]] = []
        self.next_of: dict[int, tuple[int, int]] = {}

    def next(self, key: int, step: int) -> int:
        """A piece of a gradient has arrived. The group of which all workers' gradients are there now; -1: none."""
        group = self.group_of[key]
        self.counts[group, step] += 1
        if self.counts[group, step] < self.wanted[group]:
            return -1
        del self.counts[group, step]
        return group

    def taken(self, group: int, step: int) -> list[Pushed]:
        """The gradients of a group's workers, in their order."""
        holders = self.division.holders(group)
        found = [p for p in self.shard.pushed.values() if p.worker in holders and p.step == step]
        return sorted(found, key=lambda p: p.worker)

    def applied(self, group: int) -> bool:
        """A group is updated. Whether this was the last one of an update."""
        version = self.updates[group] = self.updates[group] + 1
        self.made[version] += 1
        if self.made[version] < self.mine:
            return False
        del self.made[version]
        return True

    def begins(self, worker: int, step: int) -> None:
        """A worker has asked for a step: the first one, or one that it begins again."""
        self.next_of[worker] = step, 0

    def stops(self, worker: int) -> None:
        """Another life of a worker has begun: nothing is sent to it before it asks."""
        self.next_of.pop(worker, None)

    def ready(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """Worker, step and group of all that can be sent now."""
        for worker, (step, k) in list(self.next_of.items()):
            order = self.orders[worker]
            while order and step < steps and self.updates[order[k]] >= step:
                yield worker, step, order[k]
                step, k = (step, k + 1) if k + 1 < len(order) else (step + 1, 0)
            self.next_of[worker] = step, k


class Server:
    """One server: a loop over its connections. Server 0 leads: it decides, and the others follow."""

    def __init__(
        self,
        meeting: str | Meeting,
        number: int,
        settings: Settings,
        values: Sequence[Tensor],
        reach: Callable[[str], None],
        report: Callable[[object], None],
        updated: Callable[[Server], None],
    ) -> None:
        handle: ServerHandle = read_handle(meeting)
        self.folder, self.number, self.settings, self.handle = handle.folder, number, settings, handle
        self.reach, self.report, self.updated = reach, report, updated
        self.count = handle.count
        self.values = [value.detach().clone() for value in values]
        self.all_pieces = pieces_of(handle.keys, self.count)
        self.shard = self._new_shard()
        division = settings.division
        self.held = [] if division is None else list(division.own)
        self.replicas = Replicas(settings.replicas)
        self.each = division if division is not None and division.each else None
        self.runs: dict[tuple[int, int], list[Run]] = {}  # (worker, group) -> what it gets of that; -1: of all groups
        self.digest = digest(handle.keys, self.count)
        self.served = Served(self.shard.flat)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)  # (on another host than the one that opened it)
        listener, address = listen(handle.place(number))
        self.board = Switchboard(listener, handle.token, self._target, self._done, self._gone)
        handle.meeting.publish(f"address {number}", address)
        self.pace = Pace() if settings.pacing is not None else None
        self.incarnation = 0
        self.workers: dict[int, Peer] = {}
        # Processes of workers that have not connected since the servers began or went back. They may compute meanwhile.
        self.expected = dict(enumerate(settings.processes))
        self.over = handle.closed
        self.on: dict[int, Done] = {
            What.HELLO: self._hello,
            What.PUSH: self._pushed,
            What.PULL: self._pull,
            What.ACK: self._ask,
            What.LEAVE: self._leave,
            What.HAVE: lambda peer, m: self._whole(m.worker, m.step, m.number, peer.server),
            What.ROW: self._row,
            What.SAVE: self._save_too,
            What.SAVED: lambda peer, m: self.saved.add(peer.server),
            What.FORGET: lambda peer, m: self._forget(m.worker, m.number),
            What.CLOSED: self._closed,
            What.NORM: self._norm,
        }
        self._fresh()

    def _new_shard(self) -> Shard:
        keys = self.handle.keys
        mine, settings = self.all_pieces[self.number], self.settings
        saved = settings.saved
        schedule = None if saved is None else saved.header.schedule
        given = keys, mine, self.values, settings.optimizer, settings.scheduler, settings.forms, schedule
        shard = Shard(*given)
        if saved is not None:
            from minipar.execution.saving.storage import Reading

            shard.resume(Reading(saved))
        return shard

    def _fresh(self) -> None:
        """Begin without connections, and without any knowledge of workers and servers."""
        self.board.drop_all()
        if self.pace is not None:
            self.pace.forget()
        self.expected |= {worker: peer.process for worker, peer in self.workers.items()}
        self.workers = {}
        self.others: dict[int, Peer] = {}  # the other servers, at server 0; server 0, at the others
        self.lists: dict[int, list[int]] = {}  # snapshots of the other servers
        self.lives: dict[int, int] = {}
        places = [{piece.tensor for piece in pieces} for pieces in self.all_pieces]
        counts = {w: sum(map(bool, map(held.intersection, places))) for w, held in enumerate(self.held)}
        self.arrivals = Arrivals(self.count, counts, self.replicas)
        self.joining, self.leaving = Together(self.replicas), Together(self.replicas)
        self.gathering: Gathering | None = None  # (where groups are served one by one; `_restore` makes it)
        self.heard: dict[int, float] = {}  # when a worker has last said something, or was at work
        self.stopped: dict[int, float] = {}  # since when a worker's process is seen as stopped
        self.requests: dict[int, tuple[int, int]] = {}  # worker -> the step it has done, and its request's number
        self.saved: set[int] = set()  # servers that have the newest snapshot
        self.ending: set[int] | None = None  # servers that have come to the end
        self.questions: dict[int, int] = {}  # worker -> step: it waits until that gradient is at all servers
        self.taking: list[Row] = []
        self.clipping: Clipping | None = None
        self.ready = self.broken = False

    # the loop --------------------------------------------------------------------------------------------------------

    def run(self) -> Served:
        if self.over:  # it was started again after the end
            self._restore(max(snapshot.numbers(self.folder, self.number), default=0), 0)
        else:
            self._meet()
        looked = time.monotonic()
        while not self.over:
            self.board.wait(_LOOK if self.pace is None else self.pace.left(_LOOK))
            if self.broken:
                self._meet()
                continue
            while self.pace is not None and self.pace.go_on():
                self._decide_first()
            if self.number == 0:
                if time.monotonic() - looked > _LOOK:
                    looked = time.monotonic()
                    self._look_for_silent()
                self._decide()
        while self.pace is not None and not self.pace.idle:
            time.sleep(self.pace.left(_LOOK))
            self.pace.go_on()
        self.served.values, self.served.states = self.shard.flat, self.shard.state_bytes()
        return self.served

    @property
    def version(self) -> int:
        """The number of updates that are made here, of all stages together where each has its own."""
        return self.shard.updates

    def _gone(self, peer: Peer) -> None:
        """A connection has ended. Without another server nothing can go on; without a worker, all the others can."""
        if peer.server >= 0 and self.others.get(peer.server) is peer:
            del self.others[peer.server]
            self.lists.pop(peer.server, None)
            self.broken = True
        if self.workers.get(peer.worker) is peer:
            del self.workers[peer.worker]
            self.heard[peer.worker] = time.monotonic()  # (it has as long as any other to come back)

    # servers among themselves ----------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Let all servers go back to the newest snapshot that all of them have; the first time, to the beginning."""
        self._fresh()
        mine = snapshot.numbers(self.folder, self.number)
        if self.number:
            return self._follow(mine)
        while len(self.lists) < self.count - 1:
            self.board.wait(_LOOK)
        common = max(set(mine).intersection(*self.lists.values()), default=0)
        self.next_snapshot = 1 + max([0, *mine, *(n for found in self.lists.values() for n in found)])
        self._restore(common, 1 + secrets.randbelow(1 << 62))
        for peer in self.others.values():
            self.board.tell(peer, Message(What.RESTORE, number=common, version=self.incarnation))
        self.heard = dict.fromkeys(self._members(), time.monotonic())
        self.ready = True

    def _members(self) -> list[int]:
        """The workers of all replicas that take part."""
        return [worker for replica in self.rule.members for worker in self.replicas.members(replica)]

    def _known(self, worker: int, step: int) -> bool:
        """Whether the gradient of a worker's replica has arrived before."""
        return self.rule.known(self.replicas.of(worker), step)

    def _follow(self, mine: list[int]) -> None:
        found = present(self.handle, Introduction(self.digest, server=self.number, snapshots=mine))
        if found is None:
            self.over = True
            return
        connection, order = found
        self._restore(order.number, order.version)
        self.ready = True
        peer = self.board.adopt(connection.socket, connection.stage.rest())
        peer.server = 0
        self.others[0] = peer

    def _restore(self, number: int, incarnation: int) -> None:
        order: list[Row] = []
        if number:
            tensors, facts = snapshot.read(self.folder, self.number, number)
            self.shard.restore(tensors, facts)
            order = rows_of(tensors["order"])
        elif self.incarnation:
            self.shard = self._new_shard()
        snapshot.remove_after(self.folder, self.number, number)
        self.served.order = order
        settings = self.settings
        self.rule = Rules(settings.mode, settings.members, settings.steps, settings.rules, order)
        if self.settings.together:
            here = {row.worker for row in order if row.kind is JOIN}
            self.rule.absent = set(range(self.settings.members)) - here
        self.finished = any(row.kind is LEAVE for row in order)  # (if not, workers that were removed come back)
        if self.each is not None:  # (workers push this step again)
            self.shard.pushed.clear()
            self.gathering = Gathering(self.each, self.shard)
        for replica, step in facts["reported"] if number and self.each is None else ():
            self.rule.push(replica, step)
        self.served.events = [e for e in self.served.events if e.kind != APPLY or e.which < self.version]
        if self.incarnation or number:
            self.served.restored.append(self.version)
            self.report(("restored", number))
        self.incarnation = incarnation

    def _save(self, number: int) -> None:
        tensors, facts = self.shard.state()
        rows = self.served.order if self.number == 0 else []
        tensors["order"] = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
        facts["reported"] = list(self.rule.pushed.items())  # gradients that are whole, and in no update yet
        snapshot.write(self.folder, self.number, number, tensors, facts, self.reach)

    def _save_if_due(self) -> None:
        """Server 0: write a snapshot on all servers if one is due, but not before all of them have the last one."""
        every = self.settings.snapshot_every if self.number == 0 else None
        if every and self.rule.version % every == 0 and len(self.saved) in (0, self.count):
            self._save_all()

    def _save_all(self) -> None:
        """Server 0: write a snapshot on all servers, at the same place of the order."""
        self.saved = set()
        for peer in self.others.values():
            self.board.tell(peer, Message(What.SAVE, number=self.next_snapshot))
        self._save(self.next_snapshot)
        self.saved.add(0)
        self.next_snapshot += 1

    # messages --------------------------------------------------------------------------------------------------------

    def _target(self, peer: Peer, message: Message) -> memoryview:
        """Memory for the bytes of a message. A message that no correct peer sends is refused before it is read."""
        what, size = message.what, message.size
        if what == PUSH and peer.worker >= 0:
            return self._room(peer, message)
        if what == What.HELLO and peer.worker < 0 and peer.server < 0 and 0 < size <= MOST_TEXT:
            peer.text = memoryview(bytearray(size))
            return peer.text
        expected = FROM_WORKERS if peer.worker >= 0 else BETWEEN_SERVERS if peer.server >= 0 else ()
        if size or what not in expected:
            raise Refused(f"message {what} of {size} bytes is none that server {self.number} expects")
        return _NOTHING

    def _room(self, peer: Peer, message: Message) -> memoryview:
        """Memory for a piece of a gradient."""
        key, size, step = message.key, message.size, message.step
        held = self.held[peer.worker] if self.held else None
        piece = self.shard.by_tensor.get(key) if held is None or key in held else None
        wanted = -1 if piece is None else self._pushed_size(piece)
        if wanted != size or not 0 <= message.version <= message.number:
            known = "another" if piece is None else f"one of {wanted} bytes"
            raise Refused(f"key {key}: {size} bytes were pushed, but server {self.number} keeps {known}")
        peer.since = time.perf_counter()
        if self._lacks(peer.worker, step):
            pushed = self.shard.pushing(peer.worker, peer.life, step, message.version, message.number, held)
            if key in pushed.missing and self.settings.compress == "none":
                return pushed.room.bytes[key]
        peer.packed = memoryview(bytearray(size))  # (or this piece was received before, and does not count twice)
        return peer.packed

    def _lacks(self, worker: int, step: int) -> bool:
        """Whether something of a worker's gradient may still be needed here."""
        return not self._known(worker, step) and (self.each is None or step >= self.shard.updates)

    def _pushed_size(self, piece: Piece) -> int:
        """In how many bytes a piece of a gradient comes."""
        item = self.handle.keys[piece.tensor].type.itemsize
        return pushed_bytes(piece.size // item, item, self.settings.compress)

    def _done(self, peer: Peer, message: Message) -> None:
        if peer.worker >= 0:
            self.heard[peer.worker] = time.monotonic()
        if self.pace is None:
            self.on[message.what](peer, message)
            return
        self.pace.hear(0.0 if message.what == PUSH else seconds(message.moment))
        self.on[message.what](peer, message)
        self._decide_first()

    def _decide_first(self) -> None:
        """Server 0: decide before the next event counts, as with emulated times."""
        if self.number == 0 and self.ready and not self.broken and not self.over:
            self._decide()

    def _pull(self, peer: Peer, message: Message) -> None:
        self.requests[peer.worker] = message.step, message.number
        late = bool(self.held) and message.step >= 0 and not self._known(peer.worker, message.step)
        if not self.arrivals.wait(peer.worker, late, first=message.step < 0):
            self.rule.ask(self.replicas.of(peer.worker))

    def _ask(self, peer: Peer, message: Message) -> None:
        self.questions[peer.worker] = message.step
        if self._known(peer.worker, message.step):
            self._acknowledge(peer.worker, message.step)

    def _leave(self, peer: Peer, message: Message) -> None:
        replica = self.replicas.of(peer.worker)
        if self.leaving.done(peer.worker) and replica in self.rule.members:
            self.finished = True
            self._tell_row(self.rule.leave(replica))

    def _row(self, peer: Peer, message: Message) -> None:
        row = Row(Kind(message.key), message.worker, message.step, message.version)
        if row.kind is not ANSWER:
            self.rule.follow(row)
            return self._do(row)
        self.rule.follow(row._replace(worker=self.replicas.of(row.worker)))
        self._answer(row, message.number)

    def _save_too(self, peer: Peer, message: Message) -> None:
        self._save(message.number)
        self.board.tell(peer, Message(What.SAVED, number=message.number))

    def _closed(self, peer: Peer, message: Message) -> None:
        if self.number == 0:
            assert self.ending is not None
            self.ending.add(peer.server)
        else:
            self.board.tell(peer, Message(What.CLOSED))
            self.over = self.handle.closed

    def _hello(self, peer: Peer, message: Message) -> None:
        who = Introduction.read(bytes(peer.text))
        if who is None:
            raise Refused(f"server {self.number} does not understand who is there")
        if who.keys != self.digest:
            raise Refused(f"server {self.number} keeps other keys, shapes or dtypes; connect by its folder")
        worker, life = who.worker, who.life
        if who.server > 0 and self.number == 0:
            peer.server = who.server
            self.others[who.server] = peer
            self.lists[who.server] = who.snapshots
            return
        if worker < 0 or not self.ready:
            peer.ended = True  # (not yet: the client will try again)
            return
        old = self.workers.get(worker)
        if old is not None and old is not peer:
            self.board.drop(old)
        if self.gathering is not None:
            self.gathering.stops(worker)
        peer.worker, peer.life = worker, life
        self.workers[worker] = peer
        self.expected.pop(worker, None)
        self.board.tell(peer, Message(What.WELCOME, number=self.incarnation))
        if self.number == 0:
            self.heard[worker] = time.monotonic()
            replica = self.replicas.of(worker)
            if self.lives.get(worker) != life or replica not in self.rule.members:
                self.lives[worker] = life
                self.requests.pop(worker, None)
                self.rule.forget(replica)  # (until this one asks, too)
                self.arrivals.pulling.forget(worker)
                self.leaving.forget(worker)
                if replica not in self.rule.pushed:
                    self._forget(worker, life)
                    for other in self.others.values():
                        self.board.tell(other, Message(What.FORGET, worker=worker, number=life))
                if self.joining.done(worker):
                    self.joining.forget(*self.replicas.members(replica))
                    self._tell_row(self.rule.join(replica))

    def _forget(self, worker: int, life: int) -> None:
        """A worker began anew: drop the parts of its earlier gradient, which may not be mixed with the new ones. (One
        that an update has taken stays until the update is made.)

        Where groups are served one by one, some of them are updated with it, and so the rest of it counts, too."""
        if self.gathering is not None:
            return self._go_on(self.gathering, worker, life)
        taken = {id(pushed) for pushed in self.clipping.taken} if self.clipping is not None else set()
        for pushed in list(self.shard.pushed.values()):
            if pushed.worker == worker and pushed.life != life and id(pushed) not in taken:
                self.shard.let_go(pushed)
        self.arrivals.forget(worker, life)

    def _go_on(self, gathering: Gathering, worker: int, life: int) -> None:
        """A worker began its step anew: what it had pushed of it is that of its new life."""
        step = gathering.complete
        self.arrivals.forget(worker, life)
        here = [pushed for pushed in self.shard.pushed.values() if pushed.worker == worker and pushed.step == step]
        for pushed in here:
            self.shard.passes_on(pushed, life)
        done = step < self.shard.updates and gathering.orders[worker]  # (it may have nothing on this server)
        if done or any(not pushed.missing for pushed in here):
            self._is_whole(worker, step, life)

    def _pushed(self, peer: Peer, message: Message) -> None:
        """A piece of a gradient was received. On an emulated link it arrives later, with those that travel with it."""
        here = self.shard.pushed.get((peer.worker, peer.life)) if self.settings.compress != "none" else None
        if here is not None and here.step == message.step and message.key in here.missing:
            unpack(peer.packed, here.room.of[message.key], self.settings.compress)
        if self.pace is None or not (message.moment or peer.coming):
            self._keep(peer, message, peer.since, time.perf_counter())
        elif message.moment:
            pace, together, lasts = self.pace, [message], seconds(message.lasts)
            peer.coming = together
            if self._lacks(peer.worker, message.step):
                self.arrivals.coming(peer.worker, message.step, peer.life)

            def arrive(start: float, end: float) -> None:
                if peer.coming is together:
                    peer.coming = []
                for each in together:
                    self._keep(peer, each, start, end)

            def begin() -> None:
                pace.work(lasts, arrive)

            pace.later(seconds(message.moment), begin)
        else:
            peer.coming.append(message)

    def _keep(self, peer: Peer, message: Message, start: float, end: float) -> None:
        """Keep a piece of a gradient that has arrived. The last piece makes the gradient whole."""
        worker, step, key = peer.worker, message.step, message.key
        pushed = self.shard.pushed.get((worker, peer.life))
        if pushed is None or key not in pushed.missing or not self._lacks(worker, step):
            return
        pushed.missing.discard(key)
        self.served.received += message.size
        self.served.events.append(ServerEvent(0, worker, step, key, start, end, message.size))
        whole = not pushed.missing
        if self.gathering is not None:
            self._gathered(self.gathering.next(key, step), step)
        if whole:
            self._is_whole(worker, step, peer.life)

    def _is_whole(self, worker: int, step: int, life: int) -> None:
        """A gradient is whole here: server 0 must know it."""
        if self.number == 0:
            self._whole(worker, step, life, 0)
        else:
            told = Message(What.HAVE, 0, worker, step, number=life, moment=self._moment())
            self.board.tell(self.others.get(0), told)

    def _moment(self) -> int:
        """The emulated time of the present event, for a message about it."""
        return 0 if self.pace is None else nanoseconds(self.pace.now)

    def _whole(self, worker: int, step: int, life: int, server: int) -> None:
        """Server 0: a gradient is whole at a server. If that of its replica is now whole at all of them, it counts."""
        if self.arrivals.whole(worker, step, life, server):
            replica = self.replicas.of(worker)
            self.rule.push(replica, step)
            for member in self.replicas.members(replica):
                self._acknowledge(member, step)
            if self.each is not None and step + 1 < self.settings.steps:
                self.rule.ask(replica)  # (it does not ask for what is sent to it anyway)
            if self.arrivals.awaited(worker):
                self.rule.ask(replica)
            if self.each is not None:  # (before the same worker's next gradient is whole, since it need not wait)
                self._decide_first()

    def _acknowledge(self, worker: int, step: int) -> None:
        """A step's gradient is at all servers: say so to the worker, if it waits for that."""
        if self.questions.get(worker) == step:
            del self.questions[worker]
            self.board.tell(self.workers.get(worker), Message(What.ACK, worker=worker, step=step))

    # what happens ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Server 0: do everything that is ready, and let the other servers do it, too."""
        while self.clipping is None and (rows := self.rule.decide()):
            for row in rows:
                self._tell_row(row)
        if self.clipping is None and self.finished and self.rule.over:
            self._end()

    def _tell_row(self, row: Row) -> None:
        """Let all servers do what a row says. Of an answer they hear for each worker of the replica."""
        self.served.order.append(row)
        if row.kind is APPLY and self.each is not None:  # (before any server goes on to the next update)
            self._save_if_due()
        if row.kind is not ANSWER:
            self._tell_others(row, 0)
            return self._do(row)
        members = self.replicas.members(row.worker)
        # (a rank may have done this step already, where stages do not wait for each other, and ask for the next one)
        asking = [m for m in members if m not in self.requests or self.requests[m][0] < row.step]
        self.arrivals.pulling.forget(*asking)
        numbers = {m: self.requests.pop(m, (-1, 0))[1] for m in asking}
        answers = [(row._replace(worker=member), numbers.get(member, 0)) for member in members]
        for answer in answers:
            self._tell_others(*answer)
        for answer in answers:
            self._answer(*answer)

    def _tell_others(self, row: Row, number: int) -> None:
        moment = self._moment()
        for peer in self.others.values():
            self.board.tell(peer, Message(What.ROW, row.kind, row.worker, row.step, row.version, number, 0, moment))

    def _do(self, row: Row) -> None:
        """Do what a row of the order says, on this server's part."""
        kind = row.kind
        if kind is TAKE:
            self.taking.append(row)
        else:
            start = time.perf_counter()
            if kind is APPLY:
                return self._update(row, start)
            for late in self._found(row) if kind is DROP else ():
                self.shard.let_go(late)
            self.served.events.append(ServerEvent(kind, *row[1:], start, time.perf_counter()))

    def _found(self, row: Row) -> list[Pushed]:
        """The gradients of a replica's step that are here."""
        found = (self.shard.find(worker, row.step) for worker in self.replicas.members(row.worker))
        return [pushed for pushed in found if pushed is not None]

    # updates ---------------------------------------------------------------------------------------------------------

    def _update(self, row: Row, start: float) -> None:
        """Make an update; with `clip` when all servers know the norm of its gradient, and nothing else before that."""
        if self.gathering is not None:  # (its groups are updated already)
            self.taking.clear()
            self.gathering.complete += 1
            early, self.gathering.early = self.gathering.early, []
            for group, step in early:
                self._gathered(group, step)
            return
        found = [self._found(take) for take in self.taking]
        taken = [pushed for some in found for pushed in some]
        self.taking.clear()
        if not taken and self.settings.rules > 1:  # (of this stage nothing is here)
            return
        self.reach("apply")
        number = row.version if self.settings.rules > 1 else None
        some = None if number is None else frozenset().union(*(pushed.held for pushed in taken))
        gradients = self.shard.combine(taken, some, scale_of(found), number)
        if self.settings.clip is None:
            return self._apply(row, taken, gradients, start)
        mine = squares(gradients)
        self.clipping = Clipping(row, taken, gradients, start, {self.number: mine})
        if self.number:
            self.board.tell(self.others.get(0), Message(What.NORM, number=bits_of(mine), moment=self._moment()))
        else:
            self._try_norm()

    def _norm(self, peer: Peer, message: Message) -> None:
        if self.number:
            self._clipped(number_of(message.number))
        elif self.clipping is not None:
            self.clipping.squares[peer.server] = number_of(message.number)
            self._try_norm()

    def _try_norm(self) -> None:
        """Server 0: when the squares of all parts are here, tell their sum."""
        assert self.clipping is not None
        if len(self.clipping.squares) < self.count:
            return
        whole = sum(self.clipping.squares[server] for server in range(self.count))
        for peer in self.others.values():
            self.board.tell(peer, Message(What.NORM, number=bits_of(whole), moment=self._moment()))
        self._clipped(whole)

    def _clipped(self, whole: float) -> None:
        assert self.clipping is not None
        assert self.settings.clip is not None
        (row, taken, gradients, start, _), self.clipping = self.clipping, None
        self.shard.clip(gradients, whole, self.settings.clip)
        self._apply(row, taken, gradients, start)

    def _apply(self, row: Row, taken: list[Pushed], gradients: Gradients, start: float) -> None:
        self.shard.apply(taken, gradients, row.version if self.settings.rules > 1 else None)
        if self.settings.rules > 1:
            self.shard.forget(self.rule.version)
        self.reach("apply")
        end = time.perf_counter()

        self._note(start, end, row)
        self.updated(self)
        self._save_if_due()

    def _note(self, start: float, end: float, row: Row, group: int = -1) -> None:
        """An update was made: on emulated devices it takes their time."""

        def note(start: float, end: float) -> None:
            self.served.events.append(ServerEvent(row.kind, *row[1:], start, end, group=group))

        if self.pace is None:
            return note(start, end)
        assert self.settings.pacing is not None
        known = self.settings.pacing.updates
        which = group if group >= 0 else row.worker
        self.pace.work(end - start if known is None else known[self.number][which], note)

    # groups one by one ------------------------------------------------------------------------------------------------

    def _gathered(self, group: int, step: int) -> None:
        """If a gradient is there of all workers: update its group, and send what can be sent."""
        if group < 0:
            return
        assert self.gathering is not None
        division = self.gathering.division
        if step > self.gathering.complete and not division.ahead:
            self.gathering.early.append((group, step))
            return
        start = time.perf_counter()
        taken = self.gathering.taken(group, step)
        keys = division.keys[group]
        self.reach("apply")
        if self.settings.on_death == "continue":
            self.shard.keep(keys)
        self.shard.step(self.shard.combine(taken, keys), step)
        self.reach("apply")
        self._note(start, time.perf_counter(), Row(APPLY, -1, -1, step), group)
        if self.gathering.applied(group):
            self.shard.end([p for p in self.shard.pushed.values() if p.step == step])
            self.updated(self)
        self._send_groups()

    def _send_groups(self) -> None:
        """Send every worker the groups that come next for it, as far as they are updated."""
        assert self.gathering is not None
        for worker, step, group in self.gathering.ready(self.settings.steps):
            peer = self.workers.get(worker)
            if peer is not None:
                before = self.gathering.updates[group] > step
                message = Message(What.PART, group, worker, step, step)
                self._send(peer, message, self._bytes_for(worker, group, before), group, before)

    # answers ---------------------------------------------------------------------------------------------------------

    def _answer(self, row: Row, number: int) -> None:
        _, worker, step, version = row
        peer = self.workers.get(worker)
        if peer is None:
            return
        self.heard[worker] = time.monotonic()
        here = step < self.settings.steps  # (after the last step nothing is needed)
        message = Message(What.ANSWER, self.settings.steps, worker, step, version, number)
        if self.gathering is None:
            self._send(peer, message, self._bytes_for(worker) if here else _NOTHING)
        elif number:  # (it does not ask for a step that follows the one before)
            self._send(peer, message, _NOTHING)
            if here:
                self.gathering.begins(worker, step)
                self._send_groups()

    def _bytes_for(self, worker: int, group: int = -1, before: bool = False) -> memoryview:
        """What a worker gets: of all its keys, or of those of a group that is served by itself, now or as it was before
        its last update."""
        if not self.held:
            return self.shard.bytes
        if (worker, group) not in self.runs:
            held = self.held[worker]
            wanted = held if self.each is None else held.intersection(self.each.keys[group])
            self.runs[worker, group] = runs_of(self.shard.pieces, held, wanted)
        source = self.shard.bytes_before if before else self.shard.bytes
        return memoryview(b"".join(source[run.start : run.stop] for run in self.runs[worker, group]))

    def _send(self, peer: Peer, message: Message, data: memoryview, group: int = -1, before: bool = False) -> None:
        worker, step, version = message.worker, message.step, message.version
        flat, start = self.shard.flat, time.perf_counter()

        def note(start: float, end: float) -> None:
            self.served.events.append(ServerEvent(ANSWER, worker, step, version, start, end, len(data), group))

        def written(flat: Tensor = flat) -> None:  # (the default keeps the tensor alive until then)
            self.served.sent += len(data)
            if self.pace is None or not len(data):
                note(start, time.perf_counter())

        if self.pace is not None and len(data):
            assert self.settings.pacing is not None
            occupied, delay = self.settings.pacing.replies[self.number][worker, step, group]
            message = message._replace(moment=nanoseconds(self.pace.work(occupied, note) + delay))
        if not self.held:  # (else these bytes are a copy)
            self.shard.readers.append(peer)
        self.board.tell(peer, message, data, written)

    def _look_for_silent(self) -> None:
        """Remove replicas of which a worker is gone or hangs. One that computes for a long time does not hang."""
        patience = float("inf") if self.settings.patience is None else self.settings.patience
        for worker in self._members():
            now, peer, replica = time.monotonic(), self.workers.get(worker), self.replicas.of(worker)
            if replica not in self.rule.members:
                continue  # (another one of its workers was removed just now)
            process = peer.process if peer is not None else self.expected.get(worker, 0)
            stopped = stacks.stopped(process)
            working = process > 0 and not stopped and at_work(process)
            if working:  # (so that a step however long leaves it all the time to come back, should it die then)
                self.heard[worker] = now
            seconds = now - self.heard.setdefault(worker, now)
            since = self.stopped.setdefault(worker, now) if stopped else self.stopped.pop(worker, now)
            silent = now - since >= min(patience, STOPPED) if stopped else seconds >= patience
            pulls = worker in self.arrivals.pulling.who.get(replica, ()) and not stopped
            # (A stage may wait for another one of its replica, which must not go on yet.)
            waiting = {one // self.rule.count for one in (*self.rule.asking, *self.rule.pushed)}
            if not silent or pulls or replica // self.rule.count in waiting:
                continue
            absent = peer is None and replica in self.rule.absent
            if working or (absent and not stopped):
                continue  # (before a worker has connected for the first time, its cluster watches it)
            step = self.rule.clock(replica)
            if self.settings.on_death == "abort":
                why = f" (process {process}) was stopped (SIGSTOP), and" if stopped else ""
                raise RankError(f"worker {worker}{why} has shown no sign of life for {seconds:.1f} s, in step {step}")
            self.stopped.pop(worker, None)
            self.heard[worker] = now
            if self.each is None:  # (else some groups are updated with its gradient: all wait until it is back)
                self.served.silent.append((worker, step, seconds))
                self._tell_row(self.rule.leave(replica, removed=True))
                self.lives.pop(worker, None)
            if peer is not None:
                self.board.drop(self.workers.pop(worker))
            if peer is not None or stopped:  # (else it has ended, or is starting again)
                self.report(("silent", worker))

    def _end(self) -> None:
        """Server 0: all workers are done. Save the last state, and end when all servers have."""
        if self.ending is None:
            self.ending = {0}
            if self.settings.snapshot_every:
                self._save_all()
            for peer in self.others.values():
                self.board.tell(peer, Message(What.CLOSED))
        if len(self.ending) == self.count:
            self.handle.close()
            for peer in (*self.others.values(), *self.workers.values()):
                self.board.tell(peer, Message(What.CLOSED))
            self.over = True


def serve(
    meeting: str | Meeting,
    number: int,
    settings: Settings,
    values: Sequence[Tensor],
    reach: Callable[[str], None] = lambda point: None,
    report: Callable[[object], None] = lambda fact: None,
    updated: Callable[[Server], None] = lambda server: None,
    ended: Callable[[Server], None] = lambda server: None,
) -> Served:
    """Be server `number` of those that `rendezvous.open_folder` wrote a handle for, until all workers are done.

    values   the initial parameters, in the order of the keys
    reach    called at the points where a fault campaign ends processes: "apply" and "snapshot"
    report   called with ("silent", worker) when a worker is removed, and with ("restored", number of the snapshot)
    updated  called with the server after each of its updates, before anything else happens; `ended` at the end

    A server that is started again in the same folder goes on from a snapshot.
    """
    server = Server(meeting, number, settings, values, reach, report, updated)
    with closing(server.board):
        served = server.run()
        ended(server)
        return served
