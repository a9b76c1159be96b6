"""The communication of one rank with all others: its transports, and the groups that it is in.

World    the transports, and the groups made so far
Group    some ranks: a Queue of collectives, an Arena (shared memory, if they have it), a gloo or NCCL group
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minipar.cluster import agreement, notes
from minipar.cluster.worker import Context
from minipar.comm.handles import Handle
from minipar.comm.queues import Collective, Queue, Starter
from minipar.comm.transport import gloo, shared
from minipar.comm.transport.calls import Steps, announcement
from minipar.comm.transport.gloo import Gloo
from minipar.comm.transport.interface import Messages, Transport
from minipar.comm.transport.local import LocalTransport
from minipar.comm.transport.nccl import Nccl
from minipar.comm.transport.sockets import Far, Sockets
from minipar.errors import RankError

_LONGEST_FOLDER = 40  # bytes: the name of a socket in it has at most about a hundred
CLOSED = "this Communicator is closed; communicator.create() makes a new one"


class Way(NamedTuple):
    """The two implementations of one collective: in shared.py and backend.py of transport/."""

    shared: Callable[..., Steps]
    backend: Callable[..., Any]


@dataclass(eq=False)
class World:
    """One rank's part of the communication among all ranks.

    host    what carries tensors on the CPU
    hosts   by rank, the name of its host
    gpus    what carries tensors on GPUs; None: they go through host memory
    """

    store: dist.Store
    rank: int
    size: int
    device: torch.device
    backend: str
    host: Transport
    hosts: tuple[str, ...]
    gpus: Transport | None = None
    closed: bool = False
    pending: set[Handle] = field(default_factory=set)
    starter: Starter = field(default_factory=lambda: Starter("starts collectives"))
    groups: dict[tuple[Transport, tuple[int, ...]], RankGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group(tuple(range(self.size)), self.host)
        self.messages: Messages = self.host.messages
        self.reader: Sockets | None = self.host.reader
        if self.backend == "nccl" and self.size > 1:
            self.gpus = Nccl(self.store, self.rank, self.size, self.device, self.host)

    def group(self, members: tuple[int, ...], transport: Transport) -> RankGroup:
        """Those ranks, made at the first use, which waits for all of them."""
        found = self.groups.get((transport, members))
        if found is None:
            if self.closed:
                raise RankError(CLOSED)
            if list(members) != sorted(set(members) & set(range(self.size))) or self.rank not in members:
                raise RankError(
                    f"group {members}: must be sorted ranks of 0 to {self.size - 1}, this rank {self.rank} among them"
                )
            found = self.groups[transport, members] = RankGroup(self, transport, members)
        return found

    def close(self) -> None:
        """Close all groups. Later use raises RankError."""
        if self.closed:
            return
        self.closed = True
        self.starter.close()
        transports = [one for one in (self.host, self.gpus) if one is not None]
        for one in transports:
            one.close(bool(self.pending))
        if self.pending and any(one.native for one in transports):
            _abandoned.append((self.groups, transports, self.pending))
        self.groups, self.pending = {}, set()
        closed: Any = _Closed()
        self.host = self.gpus = self.messages = self.reader = closed


class RankGroup:
    """Some ranks of a world, this one among them: made by all of them together."""

    def __init__(self, world: World, transport: Transport, members: tuple[int, ...]) -> None:
        self.transport, self.members = transport, members
        self.index = members.index(world.rank)
        self.queue = Queue(members, world.starter, lambda: transport.lost(members))
        self._pending, self._backend = world.pending, None
        with _connecting(members):
            self.arena = transport.memory(transport.name, members) if len(members) > 1 else None

    @property
    def shares(self) -> bool:
        """Whether its ranks exchange data in shared memory."""
        return self.arena is not None and self.transport.on_host

    @property
    def backend(self) -> Any:
        """Its gloo or NCCL group; the first use waits for all members, and this wait cannot be interrupted."""
        if self._backend is None:
            if self.arena is not None:
                self.meet("the making of a group")
            with _connecting(self.members):
                self._backend = self.transport.process_group(self.members)
        return self._backend

    def agree(self, text: str, key: str | None = None, row: Sequence[int] = ()) -> Steps:
        """The steps of announcing a collective: they return the numbers that each member brings, as many as this one.
        All must agree in `key`, or in `text` if there is no key."""
        call = announcement(text, key)
        if self.arena is None:
            announcing = self.transport.announcing(self.transport.name, self.members)
            return gloo.agree(announcing, self.members, call, row)
        self.arena.announce(call)
        return shared.rows(self.arena, row)

    def submit(
        self,
        text: str,
        way: Way,
        arguments: Callable[[list[list[int]]], tuple[Any, ...] | None],
        shared: bool,
        *,
        key: str | None = None,
        row: Sequence[int] = (),
        unattended: bool = True,
    ) -> Collective:
        """Start a collective.

        text, key    what it is, for errors; and what of it must agree
        row          numbers of this rank
        arguments    what `way` gets, a function of the numbers of all ranks; None: there is nothing to do
        shared       whether it goes through shared memory; else it is the backend's own
        unattended   whether it must go on while nobody waits for it
        """
        backend = None if shared else self.backend  # (made while all ranks are here)

        def steps() -> Steps:
            if shared and not row and self.arena is not None:  # (announced with the first piece)
                given = arguments([])
                assert given is not None
                self.arena.announce(announcement(text, key))
                return (yield from way.shared(self.arena, *given))
            given = arguments((yield from self.agree(text, key, row)))
            if given is None:
                return None
            if shared:
                return (yield from way.shared(self.arena, *given))
            return way.backend(backend, self.index, *given)

        return self._submit(text, steps(), unattended)

    def meet(self, text: str = "barrier", key: str | None = None, row: Sequence[int] = ()) -> list[list[int]]:
        """Return when all members have called this; what `agree` gives. Meanwhile the driver can see what this rank
        waits for, and the wait can be interrupted."""
        found: list[list[int]] = []

        def steps() -> Steps:
            found.extend((yield from self.agree(text, key, row)))

        Handle(self._submit(text, steps(), False), None, self._pending).wait()
        return found

    def _submit(self, text: str, steps: Steps, unattended: bool) -> Collective:
        return self.queue.submit(text, steps, unattended, not self.transport.on_host)


@contextlib.contextmanager
def _connecting(members: tuple[int, ...]) -> Iterator[None]:
    """While entered, the driver can see that this rank waits for others: it cannot be interrupted there."""
    notes.waiting(f"the making of a group over {','.join(map(str, members))}", time.monotonic())
    try:
        yield
    finally:
        notes.going_on()


class _Closed:
    """Takes the place of messages and groups that were closed: every use is an error."""

    def __getattr__(self, name: str) -> Any:
        raise RankError(CLOSED)


_abandoned: list[tuple[Any, ...]] = []  # which may not end before what native code does with it has ended: never


def of_rank(context: Context, count: int) -> World:
    """The World of a rank of a Cluster, its `count`-th in this generation."""
    rank, size = context.rank, context.size
    os.close(os.open(context.store, os.O_CREAT | os.O_RDWR, 0o600))  # (the store itself would let others read it)
    store = dist.PrefixStore(str(count), dist.FileStore(context.store, size))
    path = f"{context.store}-{count}"
    device = torch.device(context.device)
    if context.transport == "gloo":
        alone = Gloo(store, rank, size, agreement.LOOPBACK, "transport='gloo'")
        return World(store, rank, size, device, context.backend, alone, ("",) * size)
    hosts = agreement.hosts_of(size)
    if rank == 0 and len(set(hosts)) > 1:
        store.set("token", secrets.token_hex(32))
    token = bytes.fromhex(store.get("token").decode()) if len(set(hosts)) > 1 else b""
    host = _host(store, rank, hosts, agreement.LOOPBACK, token, path)
    return World(store, rank, size, device, context.backend, host, hosts)


def under_torchrun(count: int | str) -> World:
    """This process's World, if torchrun started it. RankError otherwise. Processes of one host share memory."""
    missing = agreement.missing()
    if missing:
        raise RankError(
            "communicator.create() works inside a rank: call it in a function given to cluster.run "
            f"(or under torchrun; {', '.join(missing)} not set)"
        )
    agreed = agreement.agree()
    device = torch.device(agreed.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.PrefixStore(f"world {count}", agreed.store)
    token = bytes.fromhex(agreed.token)
    # Every user of the system can read this name: it tells nothing of the token.
    public = hashlib.sha256(b"the name of sockets" + token).hexdigest()[:32]
    name = f"minipar-{public}-{agreed.hosts.index(agreed.hosts[agreed.rank])}-{count}"
    if sys.platform == "linux":
        path = f"\0{name}"  # (a name in the memory of Linux leaves nothing behind, however the process ends)
    else:
        path = os.path.join(_agree_on_folder(store, agreed.rank, agreed.hosts), name)
    host = _host(store, agreed.rank, agreed.hosts, agreed.addresses[agreed.rank], token, path)
    return World(store, agreed.rank, agreed.size, device, agreed.backend, host, agreed.hosts)


def _host(
    store: dist.Store,
    rank: int,
    hosts: tuple[str, ...],
    address: str,
    token: bytes,
    path: str,
) -> Transport:
    """What carries tensors on the CPU among ranks of these hosts, or some of them. The names of sockets begin with
    `path`."""
    far = frozenset(peer for peer, host in enumerate(hosts) if host != hosts[rank])
    without = f"ranks are on {len(set(hosts))} hosts" if far else ""
    sockets = Sockets(rank, path, Far(far, address, store, token) if far else None)
    return LocalTransport(store, rank, hosts, address, without, sockets)


def _agree_on_folder(store: dist.Store, rank: int, hosts: tuple[str, ...]) -> str:
    """A folder for temporary files, the same for all ranks of a host: that of the first one."""
    first = hosts.index(hosts[rank])
    if rank == first:
        folder = tempfile.gettempdir()
        short = len(os.fsencode(folder)) < _LONGEST_FOLDER
        store.set(f"folder {first}", folder if short else "/tmp")
    return str(store.get(f"folder {first}").decode())
