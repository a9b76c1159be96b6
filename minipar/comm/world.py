"""The communication of one rank with all others: its transports, and the groups that it is in.

World    the transports, and the groups made so far
Group    some ranks: a Matcher (announcements), an Arena (shared memory, if they have it), a gloo or NCCL group
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minipar.cluster import agreement, notes
from minipar.cluster.worker import Context
from minipar.comm.handles import Handle
from minipar.comm.matching import Collective, Matcher, Starter
from minipar.comm.playing import Lane
from minipar.comm.transport.arena import Arena, Exchange, Steps
from minipar.comm.transport.gloo import Gloo
from minipar.comm.transport.interface import Messages, Transport
from minipar.comm.transport.local import LocalTransport, Mixed
from minipar.comm.transport.nccl import Nccl
from minipar.comm.transport.sockets import Far, Sockets
from minipar.errors import RankError

_LONGEST_FOLDER = 40  # bytes: the name of a socket in it has at most about a hundred
CLOSED = "this Communicator is closed; communicator.create() makes a new one"


class Way(NamedTuple):
    """The three implementations of one collective: in shared.py and backend.py of transport/, and in playing.py."""

    shared: Callable[..., Steps]
    backend: Callable[..., Any]
    played: Callable[..., None]


@dataclass(eq=False)
class World:
    """One rank's part of the communication among `everyone`, all ranks or some.

    host    what carries tensors on the CPU
    hosts   by rank, the name of its host
    gpus    what carries tensors on GPUs; None: they go through host memory
    lanes   of groups that play collectives while they compute
    """

    store: dist.Store
    rank: int
    size: int
    device: torch.device
    backend: str
    host: Transport
    hosts: tuple[str, ...]
    everyone: tuple[int, ...]
    gpus: Transport | None = None
    closed: bool = False
    pending: set[Handle] = field(default_factory=set)
    starter: Starter = field(default_factory=lambda: Starter("starts collectives"))
    groups: dict[tuple[Transport, tuple[int, ...]], RankGroup] = field(default_factory=dict)
    lanes: dict[tuple[int, ...], Lane] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group(self.everyone, self.host)
        self.messages: Messages = self.host.messages
        self.reader: Sockets | None = self.host.reader
        if self.backend == "nccl" and self.size > 1:
            self.gpus = Nccl(self.store, self.rank, self.everyone, self.device, self.host)

    def group(self, members: tuple[int, ...], transport: Transport) -> RankGroup:
        """Those ranks, made at the first use, which waits for all of them."""
        found = self.groups.get((transport, members))
        if found is None:
            if self.closed:
                raise RankError(CLOSED)
            if list(members) != sorted(set(members) & set(self.everyone)) or self.rank not in members:
                raise RankError(
                    f"group {members}: must be sorted ranks of 0 to {self.size - 1}, this rank {self.rank} among them"
                )
            found = self.groups[transport, members] = RankGroup(self, transport, members)
        return found

    def make_lane(self, members: tuple[int, ...]) -> None:
        """Let these ranks play collectives while they compute. All of them call this together."""
        if members not in self.lanes:
            label = f"a collective over {','.join(map(str, members))}"
            group = self.group(members, self.host)
            with _connecting(members):
                line = self.host.line(members)
            self.lanes[members] = Lane(line, members.index(self.rank), label)
            group.meet()  # (nobody sends anything before all have theirs)

    def close(self) -> None:
        """Close all groups. Later use raises RankError."""
        if self.closed:
            return
        self.closed = True
        self.starter.close()
        for lane in self.lanes.values():
            lane.close()
        transports = [one for one in (self.host, self.gpus) if one is not None]
        for one in transports:
            one.close(bool(self.pending))
        if self.pending and any(one.native for one in transports):
            _abandoned.append((self.groups, transports, self.pending))
        self.groups, self.lanes, self.pending = {}, {}, set()
        closed: Any = _Closed()
        self.host = self.gpus = self.messages = self.reader = closed


class RankGroup:
    """Some ranks of a world, this one among them: made by all of them together."""

    def __init__(self, world: World, transport: Transport, members: tuple[int, ...]) -> None:
        self.world, self.transport, self.members = world, transport, members
        self.index = members.index(world.rank)
        self._backend: Any = None  # its process group
        self.arena: Arena | None = None
        with _connecting(members):
            board = transport.board(transport.name, members)
        self.matcher = Matcher(members, board, transport.own_thread, world.starter, lambda: transport.lost(members))
        self.meet()
        board.unlink()
        if len(members) > 1:
            self.arena = self.matcher.arena = transport.memory(members, self.meet)
        if transport.at_once(members):
            with _connecting(members):
                self._backend = transport.process_group(members)

    @property
    def backend(self) -> Any:
        """Its gloo or NCCL group; the first use waits for all members, and this wait cannot be interrupted."""
        if self._backend is None:
            self.meet()
            with _connecting(self.members):
                self._backend = self.transport.process_group(self.members)
        return self._backend

    def sums(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is so small that its collectives need no more than the announcement."""
        return not tensor.is_cuda and tensor.numel() * tensor.element_size() <= self.matcher.board.most

    def start(self, way: Way, shared: bool, *args: Any) -> Any:
        """Start a collective that all have agreed on, in shared memory or as the backend's own."""
        if shared and self.arena is not None:
            exchange = Exchange(self.arena, way.shared(self.arena, *args))
            self.arena.line_up(exchange)
            return exchange
        return way.backend(self.backend, self.index, *args)

    def submit(
        self,
        text: str,
        way: Way,
        shared: bool,
        *args: Any,
        small: Any = None,
        key: str | None = None,
        unattended: bool = True,
    ) -> Collective:
        """Announce a collective whose arguments do not depend on the others'."""
        exchange = None
        if small is None and shared and self.arena is not None:
            exchange = Exchange(self.arena, way.shared(self.arena, *args))
        elif small is None and not shared:
            self.backend  # noqa: B018  (this makes it while all ranks are here)
        return self.matcher.submit(
            text, lambda _: way.backend(self.backend, self.index, *args), key, False, small, unattended, exchange
        )

    def meet(self, row: list[int] | None = None) -> list[list[int]]:
        """Wait until all members are here; returns the numbers that each has brought."""
        found: list[list[int]] = []
        mine = torch.tensor(row or [], dtype=torch.int64)
        small = (mine, lambda rows, _: found.extend(one.tolist() for one in rows))
        self.wait(self.matcher.submit("the making of a group", lambda _: None, small=small, unattended=False))
        return found

    def wait(self, work: Collective) -> None:
        """Return when a collective of this group is complete. Meanwhile the driver can see what this rank waits for,
        and the wait can be interrupted."""
        Handle(work, None, self.world.pending).wait()


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
    everyone = tuple(range(size))
    os.close(os.open(context.store, os.O_CREAT | os.O_RDWR, 0o600))  # (the store itself would let others read it)
    store = dist.PrefixStore(str(count), dist.FileStore(context.store, size))
    path = f"{context.store}-{count}"
    device = torch.device(context.device)
    if context.transport == "gloo":
        gloo = Gloo(store, rank, everyone, agreement.LOOPBACK, "transport='gloo'")
        return World(store, rank, size, device, context.backend, gloo, ("",) * size, everyone)
    hosts = agreement.hosts_of(size)
    if rank == 0 and len(set(hosts)) > 1:
        store.set("token", secrets.token_hex(32))
    token = bytes.fromhex(store.get("token").decode()) if len(set(hosts)) > 1 else b""
    host = _host(store, rank, everyone, hosts, agreement.LOOPBACK, token, path, path)
    return World(store, rank, size, device, context.backend, host, hosts, everyone)


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
    name = f"minipar-{agreed.token[:32]}-{agreed.hosts.index(agreed.hosts[agreed.rank])}-{count}"
    path = os.path.join(_agree_on_folder(store, agreed.rank, agreed.hosts), name)
    # A name in the memory of Linux leaves nothing behind, however the process ends.
    sockets = f"\0{name}" if sys.platform == "linux" else path
    token = bytes.fromhex(agreed.token)
    address, everyone = agreed.addresses[agreed.rank], tuple(range(agreed.size))
    host = _host(store, agreed.rank, everyone, agreed.hosts, address, token, path, sockets)
    return World(store, agreed.rank, agreed.size, device, agreed.backend, host, agreed.hosts, everyone)


def _host(
    store: dist.Store,
    rank: int,
    everyone: tuple[int, ...],
    hosts: tuple[str, ...],
    address: str,
    token: bytes,
    path: str,
    sockets: str,
) -> Transport:
    """What carries tensors on the CPU among ranks of these hosts, or some of them. The files of boards begin with
    `path`, the names of sockets with `sockets`."""
    far = frozenset(peer for peer, host in enumerate(hosts) if host != hosts[rank])
    gloo = Gloo(store, rank, everyone, address, f"ranks are on {len(set(hosts))} hosts" if far else "")
    if far:
        return Mixed(path, gloo, Sockets(rank, sockets, Far(far, address, store, token)), hosts)
    return LocalTransport(path, gloo, Sockets(rank, sockets))


def _agree_on_folder(store: dist.Store, rank: int, hosts: tuple[str, ...]) -> str:
    """A folder for temporary files, the same for all ranks of a host: that of the first one."""
    first = hosts.index(hosts[rank])
    if rank == first:
        folder = tempfile.gettempdir()
        short = len(os.fsencode(folder)) < _LONGEST_FOLDER
        store.set(f"folder {first}", folder if short else "/tmp")
    return str(store.get(f"folder {first}").decode())
