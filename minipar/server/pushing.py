"""A worker's end of the parameter server: push and pull.

    ps = Servers(settings, worker)
    while (step := ps.next_step()) is not None:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(ps.pull(name))
        loss(model, batches(step, worker)).backward()
        ps.push({name: parameter.grad for name, parameter in model.named_parameters()})

A step begins with the parameters, all of one version, and ends when every key was pushed. A worker that dies and comes
back connects again, as another session of the same worker; `next_step` says where it goes on.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

from torch import Tensor

from minipar.errors import RankError, ServerClosed
from minipar.server.messages import reach, read, receive, send
from minipar.server.packing import Packer
from minipar.server.shard import Line, Settings, pieces_of


class Servers:
    """All servers together, as one worker sees them. When one of them is gone, every call raises ConnectionError.

    step, version   that this worker is at; -1 before the first step
    weight          (rows, of): what is pushed is of so many rows of those of a step, and scaled by rows / of. An update
                    is of the mean over the rows that it takes. Default: gradients of an update are averaged
    arrived         on emulated links: when the last of a step's parameters arrive
    timing          on emulated links: when the next message begins to arrive (time.perf_counter), and for how many
                    seconds it occupies its link

    Raises ServerClosed if the servers have ended.
    """

    def __init__(self, settings: Settings, worker: int) -> None:
        self.settings, self.worker, self.keys = settings, worker, settings.keys
        self._numbers = {key.name: k for k, key in enumerate(self.keys)}
        line = Line(self.keys, pieces_of(self.keys, 1)[0])
        self._parts = [line.part(pieces) for pieces in settings.pieces]  # what comes from each server
        self._pieces = [{piece.tensor: piece for piece in pieces} for pieces in settings.pieces]
        self._values = line.values(self.keys)
        self._missing: set[tuple[int, int]] = set()  # keys that this step has not pushed yet, by server
        self._packer = Packer(settings.compress)
        self.step = self.version = -1
        self.weight: tuple[float, float] = 1, 1
        self.arrived = 0.0
        self.timing = 0.0, 0.0
        hello = {"what": "worker", "number": worker, "session": secrets.randbits(62)}
        self.connections: list[Connection] = []
        for server in reversed(range(settings.servers)):  # server 0 comes last: all others know this worker by then
            connection = reach(settings.folder, server, settings.secret)
            self.connections.insert(0, connection)
            try:
                send(connection, hello)
                receive(connection)
            except (OSError, EOFError) as error:  # (a server that died is told of by whoever watches its process)
                self.close()
                raise ServerClosed(f"worker {worker}: server {server} has ended") from error

    @contextlib.contextmanager
    def _talking_to(self, server: int) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise ConnectionError(f"worker {self.worker}: server {server} is gone") from error

    def next_step(self) -> int | None:
        """Wait as the mode demands, and get the parameters of this worker's next step. Returns the step's number, or
        None at the end."""
        if self._missing:
            name = self.keys[min(self._missing)[0]].name
            raise RankError(f"worker {self.worker}: step {self.step} is not done, key {name!r} was not pushed")
        self.arrived = 0.0
        for server, connection in enumerate(self.connections):
            with self._talking_to(server):
                answer = receive(connection)
                self.step, self.version = answer["step"], answer["version"]
                self.arrived = max(self.arrived, answer["moment"])
                if self.step < self.settings.steps:
                    read(connection, self._parts[server])
        if self.step >= self.settings.steps:
            self.close()
            return None
        self._missing = {(k, server) for server, pieces in enumerate(self._pieces) for k in pieces}
        return self.step

    def pull(self, name: str) -> Tensor:
        """A parameter, as it was when this step began. The tensor is the worker's copy: it changes when the next step
        begins."""
        return self._values[self._find(name, "pull")]

    def push(self, gradients: Mapping[str, Tensor], server: int | None = None) -> None:
        """Send gradients; with the last one of all keys the step is done. Returns when the system has taken them.

        server   send only the parts of this server; default: of all

        Raises RankError for a key, shape or dtype that the servers do not have, and ServerClosed.
        """
        given = {self._find(name, "push"): gradient for name, gradient in gradients.items()}
        for k, gradient in given.items():
            key = self.keys[k]
            if (gradient.shape, gradient.dtype) != (key.shape, key.dtype):
                raise RankError(
                    f"worker {self.worker}: push of key {key.name!r} as {gradient.dtype} {tuple(gradient.shape)}; the "
                    f"servers have it as {key.dtype} {key.shape}"
                )
        for one in range(self.settings.servers) if server is None else (server,):
            keys = [k for k in given if k in self._pieces[one]]
            if keys:
                self._push_to(one, {k: given[k] for k in keys})

    def _push_to(self, server: int, gradients: dict[int, Tensor]) -> None:
        parts = {(k, server) for k in gradients}
        if again := parts - self._missing:
            name = self.keys[min(again)[0]].name
            raise RankError(f"worker {self.worker}: key {name!r} was pushed before in step {self.step}")
        packed = []
        for k, gradient in gradients.items():
            piece, item = self._pieces[server][k], gradient.element_size()
            flat = gradient.detach().contiguous().view(-1)
            packed.append(self._packer.pack((k, server), flat[piece.start // item : piece.stop // item]))
        rows, of = self.weight
        moment, seconds = self.timing
        message = {"what": "push", "keys": list(gradients), "step": self.step, "rows": rows, "of": of,
                   "moment": moment, "seconds": seconds}  # fmt: skip
        with self._talking_to(server):
            send(self.connections[server], message, packed)
        self._missing -= parts

    def _find(self, name: str, verb: str) -> int:
        """The number of a key."""
        if name not in self._numbers:
            known = ", ".join(repr(key.name) for key in self.keys[:5])
            more = ", ..." if len(self.keys) > 5 else ""
            raise RankError(
                f"worker {self.worker}: {verb} of key {name!r}, which is unknown; the servers have {known}{more}"
            )
        if not self.connections:
            raise ServerClosed(f"worker {self.worker}: {verb} of key {name!r} at servers that have ended")
        return self._numbers[name]

    def close(self) -> None:
        """End all connections: to the servers this worker has died, unless it has done its last step."""
        for connection in self.connections:
            connection.close()
        self.connections = []
