"""A worker's end of the parameter server: push and pull.

    ps = connect(folder, worker)
    while (step := ps.next_step()) is not None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(ps.pull(name))
        loss(model, batches(step, worker)).backward()
        for name, parameter in model.named_parameters():
            ps.push(name, parameter.grad)

A step begins with the parameters, all of one version, and ends when every key was pushed. A worker that dies and comes
back connects again, as another session of the same worker; `next_step` says where it goes on.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from minipar.cluster import stacks
from minipar.cluster.watchdog import STOPPED
from minipar.errors import RankError, ServerClosed
from minipar.models.tensors import dtype_name
from minipar.server.connection import Connection
from minipar.server.framing import Message, What, bytes_of
from minipar.server.packing import Packer
from minipar.server.rendezvous import Meeting, ServerHandle, reach, read_handle
from minipar.server.shard import digest, length, pieces_of, view


def connect(
    meeting: str | Meeting,
    worker: int,
    patience: float = 30.0,
    compress: str = "none",
    processes: Sequence[int] = (),
) -> Servers:
    """Connect to the servers of a folder, or of another meeting place, as the worker of this number; it replaces an
    earlier worker of that number.

    patience   seconds to wait for servers that have not started
    compress   what gradients are pushed as: bf16, fp16 or topk:R, as in a plan; the servers' `Settings` say the same
    processes  of the servers, where they are on this machine: one that is stopped before it listens is noticed

    Raises RankError if there are none, ServerClosed if they have ended.
    """
    return Servers(read_handle(meeting), worker, patience, compress, processes)


class Servers:
    """All servers together, as one worker sees them. When one of them is gone, every call raises ConnectionError.

    step, version   that this worker is at; -1 before the first step
    arrived         on emulated links: when the last of a step's parameters arrive
    sent, received  bytes of gradients, and of parameters
    """

    def __init__(
        self,
        handle: ServerHandle,
        worker: int,
        patience: float,
        compress: str = "none",
        processes: Sequence[int] = (),
    ) -> None:
        if worker < 0:
            raise RankError(f"worker {worker}: must be at least 0")
        self.handle, self.worker, self.keys = handle, worker, handle.keys
        self._numbers = {key.name: k for k, key in enumerate(self.keys)}
        self._pieces = pieces_of(self.keys, handle.count)
        self._homes = [
            [(server, piece) for server, pieces in enumerate(self._pieces) for piece in pieces if piece.tensor == k]
            for k in range(len(self.keys))
        ]
        # Copies of what the servers keep, one run of bytes for each server. A parameter that comes in several pieces
        # has memory of its own.
        self._flats = [torch.zeros(length(pieces), dtype=torch.uint8) for pieces in self._pieces]
        self._values = [self._value_of(k) for k in range(len(self.keys))]
        self.step = self.version = -1
        self._steps = 0  # of the whole run
        self.rows, self.of = 1, 1
        self.missing: set[tuple[int, int]] = set()  # pieces of keys, by server, that this step has not pushed yet
        self.packer = Packer(compress)
        self.sent = self.received = 0
        self.arrived = 0.0
        self._timing = 0.0, 0.0  # `moment` and `lasts` of the next message
        self._processes = dict(enumerate(processes))
        self._stopped: dict[int, float] = {}  # server -> since when it has been seen as stopped
        self.connections: list[Connection] = []
        self._connect(patience)

    def _value_of(self, k: int) -> Tensor:
        """Memory for a parameter."""
        key, homes = self.keys[k], self._homes[k]
        if len(homes) != 1:
            return torch.empty(key.shape, dtype=key.type)
        server, piece = homes[0]
        return view(self._flats[server], key, piece).view(key.shape)

    # connections -----------------------------------------------------------------------------------------------------

    def _connect(self, patience: float) -> None:
        """Begin a new session with all servers. Server 0 comes last, so that all others know the worker when it
        joins."""
        hello = Message(What.HELLO, worker=self.worker, number=secrets.randbelow(1 << 62) + 1)
        try:
            for server in range(self.handle.count - 1, -1, -1):
                connection = reach(self.handle, server, patience, partial(self._look, server))
                self.connections.insert(0, connection)
                with self._talking():
                    connection.send(hello, digest(self.keys, self.handle.count))
                    self._take(connection, What.WELCOME)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        for connection in self.connections:
            connection.close()
        self.connections = []

    def _look(self, server: int, process: int) -> None:
        """A server does not answer. Look whether one was stopped: the one that this worker waits for may wait for
        another one."""
        if process:
            self._processes[server] = process
        for other, known in self._processes.items():
            if not stacks.stopped(known):
                self._stopped.pop(other, None)
            elif time.monotonic() - self._stopped.setdefault(other, time.monotonic()) >= STOPPED:
                raise RankError(
                    f"worker {self.worker}: server {other} (process {known}) was stopped (SIGSTOP) and has not "
                    f"answered for {STOPPED:g} s; continue it by kill -CONT {known}, or run again"
                )

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """A connection that ends because all servers have ended is no error."""
        try:
            yield
        except ConnectionError as error:
            if self.handle.closed:
                raise self._closed() from error
            raise

    def _closed(self) -> ServerClosed:
        return ServerClosed(f"worker {self.worker}: the servers of {self.handle.meeting.folder} have ended")

    def _take(self, connection: Connection, wanted: What) -> Message:
        """The next message, which is of this kind, unless the server refuses something or has ended."""
        message = connection.receive()
        if message.what == What.REFUSED:
            raise RankError(f"worker {self.worker}: {connection.text(message.size)}")
        if message.what == What.CLOSED:
            raise self._closed()
        if message.what != wanted:
            raise RankError(f"worker {self.worker}: message {message.what} came, and not {wanted.value}")
        return message

    # steps -----------------------------------------------------------------------------------------------------------

    def next_step(self) -> int | None:
        """Wait as the mode demands, and get the parameters of this worker's next step. Returns the step's number, or
        None at the end."""
        if self.missing:
            missing = self.keys[min(self.missing)[0]].name
            raise RankError(f"worker {self.worker}: step {self.step} is not done, key {missing!r} was not pushed")
        try:
            with self._talking():
                self._pull()
                if self.step >= self._steps:
                    self.connections[0].send(Message(What.LEAVE))
                    self._take(self.connections[0], What.CLOSED)  # (which raises ServerClosed)
        except ServerClosed:
            self._let_go()
            return None
        return self.step

    def _pull(self) -> None:
        self.connections[0].send(Message(What.PULL, step=self.step, moment=self._timing[0]))
        self._timing, self.arrived = (0.0, 0.0), 0.0
        for flat, connection in zip(self._flats, self.connections, strict=True):
            answer = self._take(connection, What.ANSWER)
            if answer.size:
                connection.read(bytes_of(flat))
            self.received += answer.size
            self.arrived = max(self.arrived, answer.moment)
        self._steps, self.step, self.version = answer.key, answer.step, answer.version
        self.missing = set()
        for k, homes in enumerate(self._homes) if self.step < self._steps else ():
            self.missing.update((k, server) for server, _ in homes)
            for server, piece in homes if len(homes) > 1 else ():
                flat, place = self._flats[server], slice(piece.place, piece.place + piece.size)
                bytes_of(self._values[k])[piece.start : piece.stop] = bytes_of(flat)[place]

    def pull(self, index: str | int) -> Tensor:
        """The parameter of a key, as it was when this step began. The tensor is the worker's copy: it changes when the
        next step begins."""
        return self._values[self._find(index, "pull")]

    def push(self, index: str | int, gradient: Tensor, server: int | None = None) -> None:
        """Send the gradient of a key; with that of the last key the step is done. Returns when the system has taken it.

        server   send only the part of this server; default: of all that keep something of the key

        Raises RankError for a key, shape or dtype that the servers do not have, and ServerClosed.
        """
        k = self._find(index, "push")
        key, value = self.keys[k], self._values[k]
        if (gradient.shape, gradient.dtype) != (value.shape, value.dtype):
            kind = f"{dtype_name(gradient.dtype)} {tuple(gradient.shape)}"
            raise RankError(f"worker {self.worker}: push of key {index!r} as {kind}; the servers have it as {key}")
        homes = [home for home in self._homes[k] if server is None or server == home[0]]
        parts = {(k, home) for home, _ in homes}
        if not parts <= self.missing:
            raise RankError(f"worker {self.worker}: key {index!r} was pushed before in step {self.step}")
        flat, item = gradient.detach().contiguous().view(-1), key.type.itemsize
        with self._talking():
            for home, piece in homes:
                packed = self.packer.pack((k, home), flat[piece.start // item : piece.stop // item])
                message = Message(What.PUSH, k, self.worker, self.step, self.rows, self.of, 0, *self._timing)
                self._timing = 0.0, 0.0
                self.connections[home].send(message, bytes_of(packed))
                self.sent += packed.nbytes
        self.missing -= parts

    def pace(self, moment: float, lasts: float = 0.0) -> None:
        """On emulated links: the next message begins to arrive at this moment (`time.perf_counter`), and occupies its
        link for so many seconds, together with all messages up to the next call of this."""
        self._timing = moment, lasts

    def weigh(self, rows: int, of: int) -> None:
        """Say that gradients pushed from now on are of `rows` of the `of` rows of a step, and scaled by rows / of. An
        update is of the mean over the rows that it takes. Default: 1 of 1, so that gradients of an update are
        averaged."""
        self.rows, self.of = rows, of

    def _find(self, index: str | int, verb: str) -> int:
        """The number of a key."""
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
