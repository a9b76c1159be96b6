"""A worker's end of the parameter server: push and pull.

    ps = connect(folder, worker)
    while (step := ps.next_step()) is not None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(ps.pull(name))
        loss(model, batches(step, worker)).backward()
        for name, parameter in model.named_parameters():
            ps.push(name, parameter.grad)

A step begins with the parameters, all of one version, and ends when every key was pushed. When a server dies, the
worker connects again by itself; gradients that the servers have lost are void, and `next_step` says where it goes on.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from minipar.cluster import stacks
from minipar.cluster.watchdog import STOPPED
from minipar.errors import RankError, ServerClosed
from minipar.models.tensors import dtype_name
from minipar.server.connection import Connection, stopped
from minipar.server.framing import Message, What, bytes_of, nanoseconds, seconds
from minipar.server.packing import Packer
from minipar.server.rendezvous import RETRY, Introduction, Meeting, ServerHandle, read_handle
from minipar.server.shard import Division, Run, digest, kept_by, length, pieces_of, runs_of
from minipar.strategies.shares import Piece
from minipar.wording import several

_LONGEST_RETRY = 0.1
# A server has not started, starts again, or is so busy that too many clients wait for it.
_NOT_THERE = (ConnectionError, FileNotFoundError, TimeoutError, BlockingIOError)


def connect(
    meeting: str | Meeting,
    worker: int,
    patience: float = 30.0,
    reach: Callable[[str], None] = lambda point: None,
    compress: str = "none",
    on_stop: Callable[[int, int], None] | None = None,
    processes: tuple[int, ...] = (),
    division: Division | None = None,
    on_rewind: Callable[[], None] = lambda: None,
) -> Servers:
    """Connect to the servers of a folder, or of another meeting place, as the worker of this number; it replaces an
    earlier worker of that number.

    patience   seconds to wait for servers that have not started, or start again
    reach      called at the points where a fault campaign ends processes: "push" and "pull"
    compress   what gradients are pushed as: bf16, fp16 or topk:R, as in a plan; the servers' `Settings` say the same
    on_stop    called with the number and process of a server that was stopped (SIGSTOP); it must end it, so that it
               starts again. Default: a RankError that names both
    processes  of the servers, where they are on this machine: one that is stopped before it listens is noticed
    division   which workers have which keys, as the servers' `Settings` say it; None: all have all
    on_rewind  called when the servers went back, so that the present step is void

    Raises RankError if there are none, ServerClosed if they have ended.
    """
    return Servers(read_handle(meeting), worker, patience, reach, compress, on_stop, processes, division, on_rewind)


class Servers:
    """All servers together, as one worker sees them."""

    def __init__(
        self,
        handle: ServerHandle,
        worker: int,
        patience: float,
        reach: Callable[[str], None],
        compress: str = "none",
        on_stop: Callable[[int, int], None] | None = None,
        processes: tuple[int, ...] = (),
        division: Division | None = None,
        on_rewind: Callable[[], None] = lambda: None,
    ) -> None:
        if worker < 0:
            raise RankError(f"worker {worker}: must be at least 0")
        self._on_stop, self._processes, self._on_rewind = on_stop, dict(enumerate(processes)), on_rewind
        self.handle, self.worker, self.patience, self.reach = handle, worker, patience, reach
        self.keys = handle.keys
        self._at_servers = pieces_of(self.keys, handle.count)
        held = frozenset(range(len(self.keys))) if division is None else division.own[worker]
        self._numbers: dict[str | int, list[int]] = {}  # (a parameter that is served in pieces has several keys)
        for k, key in enumerate(self.keys):
            if key.cut is None or k in held:
                self._numbers.setdefault(key.name, []).append(k)
        self._pieces = [kept_by(pieces, held) for pieces in self._at_servers]
        self._runs = [runs_of(pieces, held, held) for pieces in self._at_servers]
        self._each = division if division is not None and division.each else None
        self._group_of = {k: g for g, keys in enumerate(self._each.keys) for k in keys} if self._each else {}
        self._runs_of: dict[tuple[int, int], list[Run]] = {}  # (server, group) -> what comes of it
        self._parts_here: dict[tuple[int, int], float] = {}  # (server, group) -> when this step's part has arrived
        self._whole: set[int] = set()  # groups that are here for this step
        self._homes = [
            [(server, piece) for server, pieces in enumerate(self._pieces) for piece in pieces if piece.tensor == k]
            for k in range(len(self.keys))
        ]
        self._parts = [frozenset((k, server) for server, _ in homes) for k, homes in enumerate(self._homes)]
        self._places = frozenset().union(*self._parts)
        # Copies of what the servers keep, one run of bytes for each server. A parameter that comes in several parts has
        # memory of its own.
        several_parts = (ks for ks in self._numbers.values() if sum(len(self._homes[k]) for k in ks) > 1)
        self._cut = {k for ks in several_parts for k in ks}
        self._flats = [torch.zeros(length(pieces), dtype=torch.uint8) for pieces in self._pieces]
        self._bytes = [bytes_of(flat) for flat in self._flats]
        self._size = sum(run.stop - run.start for runs in self._runs for run in runs)
        self._values = {name: self._home_of(ks) for name, ks in self._numbers.items()}
        self.connections: list[Connection] = []
        self._stopped: dict[int, float] = {}  # server -> since when it has been seen as stopped
        self.incarnation = 0
        self.life = 0
        self.request = secrets.randbelow(1 << 40)  # (no answer to an earlier life is one to it)
        self.step = self.version = -1  # that this worker is at
        self.void = True  # whether the servers went back before the beginning of this step: it must begin again
        self.rows, self.of = 1, 1
        self.missing: set[tuple[int, int]] = set()  # parts of keys, by server, that this step has not pushed yet
        self.pushed: dict[int, Tensor] = {}  # gradients that were pushed, until all servers have the step
        self.packer = None if compress == "none" else Packer(compress)
        self.unacknowledged = -1  # the step that servers may not have yet
        self.sent = self.received = 0  # bytes of gradients, and of parameters
        self.arrived = 0.0  # on emulated links: when the last of a step's parameters arrive
        self._timing = 0, 0  # `moment` and `lasts` of the next message
        self._again()

    def _home_of(self, keys: Sequence[int]) -> Tensor:
        """Memory for the parameter that has these keys."""
        key, homes = self.keys[keys[0]], [home for k in keys for home in self._homes[k]]
        if not homes and key.nbytes:
            return torch.empty(0, dtype=key.type)  # (another worker's)
        if len(homes) == 1:
            server, piece = homes[0]
            return self._flats[server][piece.place : piece.place + piece.size].view(key.type).view(key.shape)
        return torch.empty(key.shape, dtype=key.type)

    # connections -----------------------------------------------------------------------------------------------------

    def _again(self) -> bool:
        """Connect to all servers. Returns whether they still have what this worker pushed; if not, its step is void.
        (It is, too, where groups come one by one: those that were on their way are lost.)"""
        if self._each is not None:
            self.life = 0
        until, pause = time.monotonic() + self.patience, RETRY
        while True:
            self._let_go()
            if self.handle.closed:
                raise ServerClosed(f"worker {self.worker}: the servers of {self.handle.folder} have ended")
            try:
                found = self._introduce(self.life or secrets.randbelow(1 << 62) + 1)
            except _NOT_THERE as error:
                if time.monotonic() > until:
                    reason = f"worker {self.worker}: no server at {self.handle.folder} for {self.patience:g} s"
                    raise RankError(f"{reason} ({error or type(error).__name__})") from error
                self._look()
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_RETRY)
                continue
            except OSError as error:
                raise RankError(f"worker {self.worker}: no connection to the servers: {error}") from error
            if found:
                return (found == self.incarnation and self._each is None) or self._rewound(found)

    def _introduce(self, life: int) -> int:
        """Introduce this worker. Returns the incarnation of the servers; 0 if they differ, while servers go back."""
        hello = Introduction(digest(self.keys, len(self._pieces)), self.worker, life).text()
        found = set()
        lead_last = range(len(self._pieces) - 1, -1, -1)  # so that all others know this worker when it joins
        connections: dict[int, Connection] = {}
        for server in lead_last:
            connection = connections[server] = self._connect(server)
            self.connections = list(connections.values())  # (to be closed, should the next one fail)
            connection.send(Message(What.HELLO), hello)
            connection.wait(2.0)
            found.add(self._take(connection, What.WELCOME).number)
            connection.wait(None)
        self.connections = [connections[server] for server in range(len(self._pieces))]
        self.life = life
        return found.pop() if len(found) == 1 else 0

    def _look(self) -> None:
        """Look whether a server was stopped: that which this worker waits for may wait for another one."""
        for server, process in self._processes.items():
            if not stacks.stopped(process):
                self._stopped.pop(server, None)
            elif time.monotonic() - self._stopped.setdefault(server, time.monotonic()) >= STOPPED:
                self._stop(server, f"server {server}", process)

    def _stop(self, server: int, name: str, process: int) -> None:
        """A server was stopped."""
        if self._on_stop is None:
            stopped(f"worker {self.worker}: {name}", process)
        else:
            self._on_stop(server, process)

    def _connect(self, server: int) -> Connection:
        address = self.handle.address(server)
        try:
            stop = partial(self._stop, server)
            made = Connection(address, self.handle.token, 2.0, f"server {server}", stop, self._look)
            self._processes[server] = made.process
            return made
        except FileNotFoundError as error:
            raise ConnectionError(f"server {server} has not started") from error
        except ConnectionRefusedError as error:
            raise ConnectionError(f"server {server} has ended: nobody listens at {address}") from error

    def _rewound(self, incarnation: int) -> bool:
        """The servers went back, or this is the first connection: what this worker has done since then is void."""
        first = self.incarnation == 0
        self.incarnation = incarnation
        self.void = True  # (until the end of the step, pulls and pushes have no effect)
        if self.packer is not None:
            self.packer.void()
        self.pushed.clear()
        self.unacknowledged = -1
        if not first:
            self._on_rewind()
        if (
            not first and self._each is None
        ):  # (a new life, since its next gradients may not be mixed with parts that servers still have)
            self.life = 0
            self._again()
        return False

    def _let_go(self) -> None:
        for connection in self.connections:
            connection.close()
        self.connections = []
        self._parts_here.clear()

    def _take(self, connection: Connection, wanted: What) -> Message:
        """The next message of this kind; acknowledgements before it are noted."""
        while True:
            message = connection.receive()
            if message.what == What.ACK and message.step == self.unacknowledged:
                self.unacknowledged = -1
                self.pushed.clear()
            if message.what == wanted:
                return message
            if message.what == What.REFUSED:
                raise RankError(f"worker {self.worker}: {connection.text(message.size)}")
            if message.what == What.CLOSED:
                raise ServerClosed(f"worker {self.worker}: the servers of {self.handle.folder} have ended")
            if message.what == What.ANSWER:  # to an earlier request
                connection.read(memoryview(bytearray(message.size)))
            elif message.what == What.PART:
                self._take_part(connection, message)

    # steps -----------------------------------------------------------------------------------------------------------

    def next_step(self) -> int | None:
        """Wait as the mode demands, and get the parameters of this worker's next step. Returns the step's number, or
        None at the end."""
        while True:
            try:
                if self._each is not None and not self.void and 0 <= self.step < self._steps - 1:
                    self._begin(self.step + 1, self.version + 1)  # (its parameters come without being asked for)
                else:
                    self._pull()
                if self.step < self._steps:
                    return self.step
                self.connections[0].send(Message(What.LEAVE))
                self._take(self.connections[0], What.CLOSED)
                self._let_go()
                return None
            except ServerClosed:
                self._let_go()
                return None
            except ConnectionError:  # (a server that dies at the end has lost the last steps)
                self._again()

    def _pull(self) -> None:
        self._check_done()
        while True:
            try:
                self.request += 1
                step = -1 if self.void else self.step  # (of a step that is void nothing is pushed)
                ask = Message(What.PULL, step=step, number=self.request, moment=self._timing[0])
                self.connections[0].send(ask)
                self._timing, self.arrived = (0, 0), 0.0
                self.reach("pull")
                for server, connection in enumerate(self.connections):
                    into = self._bytes[server]
                    while True:
                        answer = self._take(connection, What.ANSWER)
                        for start, stop, place in self._runs[server] if answer.size else ():
                            connection.read(into[place : place + stop - start])
                        self.arrived = max(self.arrived, seconds(answer.moment))
                        if answer.number == self.request:
                            break
                break
            except ConnectionError:
                self._resend_after_loss()
        self._steps = answer.key
        if self._each is None and answer.step < self._steps:
            self.received += self._size
        self._begin(answer.step, answer.version)
        if self._each is None:
            self._join(self._cut)

    def _check_done(self) -> None:
        if self.missing and not self.void:
            missing = self.keys[min(self.missing)[0]].name
            raise RankError(f"worker {self.worker}: step {self.step} is not done, key {missing!r} was not pushed")

    def _begin(self, step: int, version: int) -> None:
        """A step begins, since its parameters are here, or come one by one."""
        self._check_done()
        if self.packer is not None:
            self.packer.step_is_over()
        self.void, self.step, self.version = False, step, version
        self.pushed.clear()
        self.unacknowledged = -1  # (no worker gets an answer before that)
        self.missing = set(self._places)
        self._whole.clear()

    def _join(self, keys: Iterable[int]) -> None:
        """Put the parts of parameters together that come in several."""
        for k in keys:
            key = self.keys[k]
            whole = bytes_of(self._values[key.name])
            for server, piece in self._homes[k]:
                begin = key.offset + piece.start
                whole[begin : begin + piece.size] = self._bytes[server][piece.place : piece.place + piece.size]

    def bring(self, group: int) -> None:
        """Wait for the parameters of a group (or a piece of one), where each comes by itself. Those of others may come
        before them. In a step that is void, nothing comes."""
        if self._each is None or self.void or group in self._whole:
            return
        keys = self._each.keys[group]
        servers = sorted({server for k in keys for server, _ in self._homes[k]})
        try:
            for server in servers:
                while (server, group) not in self._parts_here:
                    self._take_part(self.connections[server], self._take(self.connections[server], What.PART))
        except ConnectionError:
            self._again()
            return
        self.arrived = max(self._parts_here.pop((server, group)) for server in servers)
        self._whole.add(group)
        self._join(self._cut.intersection(keys))

    def _take_part(self, connection: Connection, message: Message) -> None:
        """The parameters of a group have come from a server."""
        assert self._each is not None
        server = self.connections.index(connection)
        if (server, message.key) not in self._runs_of:
            held = self._each.own[self.worker]
            wanted = held.intersection(self._each.keys[message.key])
            self._runs_of[server, message.key] = runs_of(self._at_servers[server], held, wanted)
        for start, stop, place in self._runs_of[server, message.key]:
            connection.read(self._bytes[server][place : place + stop - start])
        self.received += message.size
        self._parts_here[server, message.key] = seconds(message.moment)

    def pull(self, index: str | int) -> Tensor:
        """The parameter of a key, as it was when this step began. The tensor is the worker's copy: it changes when the
        next step begins."""
        numbers = self._find(index, "pull")
        if not self.missing and self.next_step() is None:
            raise ServerClosed(f"worker {self.worker}: pull({index!r}) after the last step")
        for k in numbers if self._each is not None else ():
            self.bring(self._group_of[k])
        return self._values[index]

    def here(self, index: str | int) -> Tensor:
        """The parameter of a key as far as it has come, where it comes in pieces."""
        self._find(index, "here")
        return self._values[index]

    def push(self, index: str | int, gradient: Tensor, server: int | None = None, group: int | None = None) -> None:
        """Send the gradient of a key; with that of the last key the step is done. Returns when the system has taken it.
        If servers go back meanwhile, `next_step` says whether this step must be done again.

        server   send only the part of this server; default: of all that keep something of the key
        group    send only the part in this group (or piece of one), where each is served by itself; default: all

        Raises RankError for a key, shape or dtype that the servers do not have, and ServerClosed.
        """
        numbers = self._find(index, "push")
        value = self._values[index]
        if (gradient.shape, gradient.dtype) != (value.shape, value.dtype):
            kind = f"{dtype_name(gradient.dtype)} {tuple(gradient.shape)}"
            raise RankError(
                f"worker {self.worker}: push of key {index!r} as {kind}; the servers have it as {self.keys[numbers[0]]}"
            )
        chosen = [k for k in numbers if group is None or self._each is None or self._group_of[k] == group]
        parts = {part for k in chosen for part in self._parts[k] if server is None or part[1] == server}
        if not parts <= self.missing:
            raise RankError(f"worker {self.worker}: key {index!r} was pushed before in step {self.step}")
        self.missing -= parts
        if self.void:
            return
        whole = (gradient.detach() if gradient.requires_grad else gradient).contiguous()
        self.pushed.update(dict.fromkeys(chosen, whole))
        if not self.missing:
            self.unacknowledged = self.step
        try:
            for k in chosen:
                self._send(k, server)
        except ConnectionError:
            self._resend_after_loss()

    def _send(self, k: int, server: int | None = None) -> None:
        for home, piece in self._homes[k]:
            if server is None or server == home:
                data = self._sent_of(k, home, piece)
                message = Message(What.PUSH, k, self.worker, self.step, self.rows, self.of, 0, *self._timing)
                self._timing = 0, 0
                self.connections[home].send(message, data)
                self.sent += len(data)
        self.reach("push")

    def _sent_of(self, k: int, home: int, piece: Piece) -> memoryview:
        """What is sent of a piece of a gradient."""
        gradient, begin = self.pushed[k], self.keys[k].offset + piece.start
        if self.packer is None or not piece.size:
            return bytes_of(gradient)[begin : begin + piece.size]
        item = gradient.element_size()
        flat = gradient.view(-1)[begin // item : (begin + piece.size) // item]
        return bytes_of(self.packer.pack((k, home), flat))

    def part(self, index: str | int, whole: Tensor, server: int, group: int) -> Tensor | None:
        """The part of a key's whole tensor that a server keeps, of a group (or a piece of one); None if it keeps
        nothing of it."""
        for k in self._find(index, "part"):
            key = self.keys[k]
            for home, piece in self._homes[k] if self._each is None or self._group_of[k] == group else ():
                if home == server:
                    item, flat = key.type.itemsize, key.of(whole.detach().to("cpu", key.type))
                    return flat[piece.start // item : piece.stop // item]
        return None

    def _resend(self) -> None:
        """Send everything that was not acknowledged once more; servers that have some of it take only the rest."""
        for k in list(self.pushed):
            self._send(k)

    def _resend_after_loss(self) -> None:
        """A connection was lost: connect again and resend, as often as a connection is lost while this resends."""
        until = time.monotonic() + self.patience
        while self._again():
            try:
                return self._resend()
            except ConnectionError as error:  # (what servers refuse is no better the next time)
                if time.monotonic() > until:
                    reason = f"worker {self.worker}: its connection is lost again and again for {self.patience:g} s"
                    raise RankError(f"{reason} ({error or type(error).__name__})") from error

    def acknowledge(self) -> None:
        """Wait until all servers have the gradient of this step."""
        while self.unacknowledged >= 0:
            try:
                self.connections[0].send(Message(What.ACK, worker=self.worker, step=self.unacknowledged))
                self._take(self.connections[0], What.ACK)
            except ConnectionError:
                self._resend_after_loss()

    def pace(self, moment: float, lasts: float = 0.0) -> None:
        """On emulated links: the next message begins to arrive at this moment (`time.perf_counter`), and occupies its
        link for so many seconds, together with all messages up to the next call of this."""
        self._timing = nanoseconds(moment), nanoseconds(lasts)

    def weigh(self, rows: int, of: int) -> None:
        """Say that gradients pushed from now on are of `rows` of the `of` rows of a step, and scaled by rows / of. An
        update is of the mean over the rows that it takes. Workers of one replica all say the rows of it. Default: 1 of
        1, so that gradients of an update are averaged."""
        if not 0 <= rows <= of:
            raise RankError(f"worker {self.worker}: {rows} of {several(of, 'row')}; must be from 0 to {of}")
        self.rows, self.of = rows, of

    def _find(self, index: str | int, verb: str) -> list[int]:
        """The numbers of a key: one, or several if it is served in pieces."""
        if index not in self._numbers:
            known = ", ".join(repr(key.name) for key in self.keys[:5]) + (", ..." if len(self.keys) > 5 else "")
            raise RankError(
                f"worker {self.worker}: {verb} of key {index!r}, which is unknown; the servers have {known}"
            )
        if not self.connections:
            raise ServerClosed(f"worker {self.worker}: {verb} of key {index!r} at servers that have ended")
        return self._numbers[index]

    def close(self) -> None:
        """Leave: the servers no longer wait for this worker."""
        if self.connections:
            with contextlib.suppress(ConnectionError):
                self.connections[0].send(Message(What.LEAVE))
        self._let_go()
