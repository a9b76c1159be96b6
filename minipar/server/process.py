"""The parameter server: it takes gradients, updates its part of the parameters, and sends them to workers.

    worker  push ...........> every server     each keeps its part of the gradient, and tells server 0 when it is whole
            step <.......... every server      when server 0 answers: the parameters of the worker's next step
    server 0  decides what happens next (program/server_rule.py), and the others do the same, row by row

So there is one order of updates and answers for all servers: they always take the same gradients, in whatever order
these arrive at each server. Server 0 keeps that order, from which a run can be replayed exactly.

A thread reads each connection, and puts what it has read into the inbox; the main thread does everything else. It may
wait while it sends: whom it sends something is always reading.

A worker that dies and comes back connects again, as another session of the same worker. A gradient that all servers had
whole counts; of any other one they drop what has arrived, and the new session computes it again. When a server is gone,
its part of the parameters is lost, and the run ends.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Event

import torch
from torch import Tensor

from minipar.cluster import threads
from minipar.cluster.far import SHORTLY
from minipar.execution.emulation import Pace
from minipar.execution.updating import Form
from minipar.prediction.service import Times
from minipar.program import Op
from minipar.program.server_rule import ANSWER, APPLY, DROP, TAKE, Consistency, Kind, Row
from minipar.server.messages import Header, admit, connection_of, hang_up, listen, reach, read, receive, send
from minipar.server.packing import unpack
from minipar.server.shard import Gradient, Settings, Shard, clip, combine, squares
from minipar.strategies.passes.compress import pushed_bytes

_LOOK = 0.2  # seconds between two looks of a thread that waits for connections, and of an emulated device


@dataclass
class Served:
    """What a server brings back. `order` is server 0's; `values` are the bytes of its part of the line of all keys.

    times     when it received (ACCEPT), updated (APPLY) and sent (REPLY), by time.perf_counter
    received  bytes of gradients
    sent      bytes of parameters
    states    bytes that the optimizer keeps, by key
    """

    keys: tuple[Form, ...]
    values: Tensor
    order: list[Row] = field(default_factory=list)
    times: Times = field(default_factory=dict)
    received: int = 0
    sent: int = 0
    states: dict[int, int] = field(default_factory=dict)
    clock_error: float = 0.0  # by which times may be wrong against those of another host


@dataclass(eq=False)
class Peer:
    """A connection, and who is at its other end: a session of a worker, or another server; "": a stranger.

    gradient   that its thread is reading
    ended      set when its thread has ended
    """

    connection: Connection
    kind: str = ""
    number: int = -1
    session: int = 0
    gradient: Gradient | None = None
    ended: Event = field(default_factory=Event)


class Server:
    """One server. Server 0 leads: it decides, and the others follow.

    updated   called after each update, before anything else happens
    workers   the last session of each worker
    others    the other servers, at server 0; server 0, at the others
    waiting   gradients that are whole here, by worker
    arrived   at server 0: the servers at which a worker's gradient is whole, until it is whole at all of them
    squares   of parts of an update's gradient, by server; from server 0: of all parts
    """

    def __init__(
        self, settings: Settings, number: int, shard: Shard, updated: Callable[[int], None] = lambda updates: None
    ) -> None:
        self.settings, self.number, self.shard, self.updated = settings, number, shard, updated
        self.rule = Consistency(settings.mode, settings.workers, settings.steps)
        self.rule.absent = set(range(settings.workers))
        self.served = Served(settings.keys, shard.line.bytes)
        self.pace = Pace() if settings.pacing is not None else None
        self.inbox: SimpleQueue[tuple[Peer, Header | Exception]] = SimpleQueue()
        self.peers: set[Peer] = set()
        self.workers: dict[int, Peer] = {}
        self.others: dict[int, Peer] = {}
        self.waiting: dict[int, Gradient] = {}
        self.arrived: dict[int, set[int]] = {}
        self.squares: dict[int, float] = {}
        self.taking: list[Gradient] = []
        self.updating = self.over = False

    # connections -----------------------------------------------------------------------------------------------------

    def run(self) -> Served:
        """Serve until all workers are done."""
        listener = listen(self.settings.folder, self.number)
        try:
            if self.number:
                self._meet_leader()
            threads.start(partial(self._accept, listener), "waits for workers")
            while not self.over:
                self._turn()
        finally:
            self.over = True
            for peer in list(self.peers):
                hang_up(peer.connection)
                peer.ended.wait()
                peer.connection.close()
        while self.pace is not None and not self.pace.idle:
            time.sleep(self.pace.left(_LOOK))
            self.pace.go_on()
        self.served.states = self.shard.state_bytes()
        return self.served

    def _meet_leader(self) -> None:
        """Before any worker can connect: have server 0 know this one, so that it sends all rows of the order here."""
        leader = self.others[0] = Peer(reach(self.settings.folder, 0, self.settings.secret), "server", 0)
        try:
            send(leader.connection, {"what": "server", "number": self.number, "session": 0})
            receive(leader.connection)
        except (OSError, EOFError) as error:
            raise ConnectionError(f"server {self.number}: server 0 is gone") from error
        self._listen_to(leader)

    def _accept(self, listener: socket.socket) -> None:
        """In a thread of its own: take connections."""
        with listener:
            listener.settimeout(_LOOK)
            while not self.over:
                with contextlib.suppress(OSError):
                    self._listen_to(Peer(connection_of(listener.accept()[0])))

    def _listen_to(self, peer: Peer) -> None:
        peer.ended = threads.start(partial(self._hear, peer), "reads a connection")
        self.peers.add(peer)
        if self.over:  # (it came too late)
            hang_up(peer.connection)

    def _hear(self, peer: Peer) -> None:
        """In a thread of its own: read a connection until it ends."""
        try:
            if not peer.kind:
                admit(peer.connection, self.settings.secret, SHORTLY)
            while True:
                message = receive(peer.connection)
                if message["what"] == "push":
                    self._read(peer, message)
                self.inbox.put((peer, message))
        except Exception as error:
            self.inbox.put((peer, error))

    def _read(self, peer: Peer, message: Header) -> None:
        """Read pieces of a gradient, each to its place."""
        start, compress, size = time.perf_counter(), self.settings.compress, 0
        if peer.gradient is None or peer.gradient.step != message["step"]:
            peer.gradient = self.shard.gradient(message["step"], message["rows"], message["of"])
        for k in message["keys"]:
            into = row = peer.gradient.line.of[k]
            if compress != "none":
                row = torch.empty(pushed_bytes(len(into), into.element_size(), compress), dtype=torch.uint8)
            read(peer.connection, row)
            if compress != "none":
                unpack(row, into, compress)
            size += row.nbytes
        message |= {"gradient": peer.gradient, "size": size, "read": (start, time.perf_counter())}

    def _turn(self) -> None:
        """Wait for the next message, and do what it makes possible."""
        with contextlib.suppress(Empty):
            peer, found = self.inbox.get(timeout=None if self.pace is None else self.pace.left(_LOOK))
            if isinstance(found, Exception):
                self._end(peer, found)
            else:
                if self.pace is not None:
                    self.pace.hear(0.0 if found["what"] == "push" else found.get("moment", 0.0))
                self._handle(peer, found)
            self._decide()
        while self.pace is not None and self.pace.go_on():
            self._decide()

    def _handle(self, peer: Peer, message: Header) -> None:
        what = message["what"]
        if what == "push":
            self._pushed(peer, message)
        elif what == "whole":
            self._whole(message["worker"], message["session"], peer.number)
        elif what == "row":
            self._do(Row(Kind(message["row"][0]), *message["row"][1:]), message["session"])
        elif what == "squares":
            self.squares[peer.number] = message["value"]
        else:
            peer.kind, peer.number, peer.session = what, message["number"], message["session"]
            (self.others if what == "server" else self.workers)[peer.number] = peer
            self._tell(peer, {})
            if what == "worker" and self.number == 0:
                self._join(peer)

    def _end(self, peer: Peer, error: Exception) -> None:
        """A connection has ended. Without another server nothing can go on; without a worker, all the others can."""
        peer.connection.close()
        self.peers.discard(peer)
        if peer.kind and not isinstance(error, OSError | EOFError):
            raise error
        lost = self.number == 0 and self.workers.get(peer.number) is peer and peer.number in self.rule.members
        if peer.kind == "server" or (lost and self.settings.on_death == "abort"):
            raise ConnectionError(f"server {self.number}: {peer.kind} {peer.number} is gone") from error

    def _tell(self, peer: Peer, message: Header, parts: Sequence[Tensor] = ()) -> None:
        with contextlib.suppress(OSError):  # (the thread that reads says that a connection has ended)
            send(peer.connection, message, parts)

    def _tell_others(self, message: Header) -> None:
        """Send a message to the other servers, on emulated devices with the time of the present event."""
        moment = 0.0 if self.pace is None else self.pace.now
        for peer in self.others.values():
            self._tell(peer, {**message, "moment": moment})

    def _join(self, peer: Peer) -> None:
        """Server 0: a worker has begun, or has begun anew. It connects here last, so that all others know it."""
        self.arrived.pop(peer.number, None)
        self._lead(self.rule.join(peer.number))
        self.rule.ask(peer.number)

    # gradients -------------------------------------------------------------------------------------------------------

    def _pushed(self, peer: Peer, message: Header) -> None:
        """Pieces of a gradient were read. On an emulated link they arrive later."""
        keep, pace = partial(self._keep, peer, message), self.pace
        if pace is None or not message["moment"]:
            return keep(*message["read"])

        def begin() -> None:
            pace.work(message["seconds"], keep)

        pace.later(message["moment"], begin)

    def _keep(self, peer: Peer, message: Header, start: float, end: float) -> None:
        """Keep pieces of a gradient that have arrived. The last piece makes the gradient whole."""
        if self.workers[peer.number] is not peer:
            return  # (its worker began anew meanwhile)
        gradient: Gradient = message["gradient"]
        gradient.missing.difference_update(message["keys"])
        self.served.received += message["size"]
        self._note(Op.ACCEPT, peer.number, gradient.step, message["keys"], start, end)
        if gradient.missing:
            return
        self.waiting[peer.number] = gradient
        if self.number:
            self._tell_others({"what": "whole", "worker": peer.number, "session": peer.session})
        else:
            self._whole(peer.number, peer.session, 0)

    def _whole(self, worker: int, session: int, server: int) -> None:
        """Server 0: a gradient is whole at a server. When it is whole at all of them, it counts, and its worker asks
        for the parameters of its next step."""
        if self.workers[worker].session != session:
            return  # (its worker began anew meanwhile)
        arrived = self.arrived.setdefault(worker, set())
        arrived.add(server)
        if len(arrived) == self.settings.servers:
            del self.arrived[worker]
            self.rule.push(worker, self.waiting[worker].step)
            self.rule.ask(worker)

    def _note(self, op: Op, peer: int, step: int, keys: Iterable[int], start: float, end: float) -> None:
        """Note when an instruction of this server's program ran."""
        rank = self.settings.workers + self.number
        self.served.times[rank, op, peer, step, self.settings.groups_of(keys)] = start, end

    # what happens ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Server 0: do everything that is ready, and let the other servers do it, too."""
        while self.number == 0 and not self.updating and (rows := self.rule.decide()):
            for row in rows:
                self._lead(row)
                if row.kind is ANSWER and row.step >= self.settings.steps:
                    self._lead(self.rule.leave(row.worker))
        self.over = self.over or self.rule.over

    def _lead(self, row: Row) -> None:
        """Server 0: let all servers do what a row says. An answer is for the present session of its worker."""
        self.served.order.append(row)
        session = 0 if row.kind is APPLY else self.workers[row.worker].session
        self._tell_others({"what": "row", "row": row, "session": session})
        self._do(row, session)

    def _do(self, row: Row, session: int) -> None:
        """Do what a row of the order says, on this server's part."""
        if self.number:
            self.rule.follow(row)
        if row.kind is TAKE:
            self.taking.append(self.waiting.pop(row.worker))
        elif row.kind is APPLY:
            self._update(row.version)
        elif row.kind is DROP:
            del self.waiting[row.worker]
        elif row.kind is ANSWER:
            self.waiting.pop(row.worker, None)  # (what a session that died has pushed here, and not everywhere)
            peer = self.workers[row.worker]
            if peer.session == session:
                self._answer(peer, row.step, row.version)

    def _update(self, version: int) -> None:
        """Make an update of the gradients that are taken."""
        start, gradients = time.perf_counter(), combine(self.taking)
        self.taking = []
        if self.settings.clip is not None:
            clip(gradients, self._square_of_all(squares(gradients)), self.settings.clip)
        self.shard.apply(gradients)
        end, note = time.perf_counter(), partial(self._note, Op.APPLY, -1, version, self.shard.parameters)
        if self.pace is None:
            note(start, end)
        else:  # (on emulated devices it takes their time)
            assert self.settings.pacing is not None
            known = self.settings.pacing.updates
            self.pace.work(end - start if known is None else known[self.number], note)
        self.updated(self.shard.updates)

    def _square_of_all(self, mine: float) -> float:
        """The square of the norm of an update's whole gradient, of which each server has a part. Until it is known
        messages are read, and nothing else is decided."""
        self.updating, wanted = True, [0] if self.number else range(self.settings.servers)
        if self.number:
            self._tell_others({"what": "squares", "value": mine})
        else:
            self.squares[0] = mine
        while not self.squares.keys() >= set(wanted):
            self._turn()
        whole = sum(self.squares.pop(server) for server in wanted)
        if self.number == 0:
            self._tell_others({"what": "squares", "value": whole})
        self.updating = False
        return whole

    def _answer(self, peer: Peer, step: int, version: int) -> None:
        """Send a worker the parameters of its next step; after the last step it needs none."""
        message = {"step": step, "version": version, "moment": 0.0}
        if step >= self.settings.steps:
            return self._tell(peer, message)
        start, note = time.perf_counter(), partial(self._note, Op.REPLY, peer.number, step, self.shard.parameters)
        if self.pace is not None:
            assert self.settings.pacing is not None
            occupied, delay = self.settings.pacing.replies[self.number][peer.number, step]
            message["moment"] = self.pace.work(occupied, note) + delay
        self._tell(peer, message, [self.shard.line.bytes])
        self.served.sent += self.shard.line.bytes.nbytes
        if self.pace is None:
            note(start, time.perf_counter())
        return None
