"""One rank's place among all: the groups that it is in, each with its board, its shared memory and its backend.

World    the store and the network of all ranks, and the groups made so far
Group    some ranks: Matcher (what is announced), Arena (shared memory), gloo or NCCL group made at the first use
"""

from __future__ import annotations

import os
import select
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minipar.comm import groups
from minipar.comm.handles import Handle
from minipar.comm.matching import Collective, Matcher, Starter
from minipar.comm.transport import arena, shared_memory
from minipar.comm.transport.arena import Arena, Exchange, Steps
from minipar.comm.transport.board import Board, fingerprint
from minipar.comm.transport.sockets import Sockets
from minipar.errors import RankError

CLOSED = "this Communicator is closed; communicator.create() makes a new one"


class Way(NamedTuple):
    """One collective in its three ways: shared.py, backend.py, played.py."""

    shared: Callable[..., Steps]
    backend: Callable[..., Any]
    played: Callable[..., None]


class World:
    """What one rank has of the communication among all. `boards` is how the files of its boards begin; None where the
    ranks may be on several machines."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        backend: str,
        loopback: bool,
        path: str | None,
        boards: str | None,
    ) -> None:
        self.rank, self.size = rank, size
        self.device, self.backend = device, backend
        self.store, self.boards = store, boards or path
        self.everyone = tuple(range(size))
        self.closed = False
        self.pending: set[Handle] = set()
        self.starter = Starter("starts collectives")
        self.loopback = loopback
        self.groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self.watched: dict[int, int] = {}  # a descriptor for each process of another rank that we know
        self.without = ""  # why there is no shared memory
        # Made before the first group, whose making waits for all ranks: from then on they can all be reached.
        self.messages: Any = Sockets(rank, path) if path is not None else None
        everyone = self.group(self.everyone)
        if path is None:
            self.messages = groups.GlooMessages(everyone.backend)
        self.up: Any = None
        self.down: Any = None
        if backend == "nccl" and size > 1:
            # One NCCL group per direction: in one alone, a send and a receive of the same pair would wait in line.
            self.up = groups.nccl_group(dist.PrefixStore("up", store), rank, size, self.everyone)
            self.down = groups.nccl_group(dist.PrefixStore("down", store), rank, size, self.everyone)

    @cached_property
    def network(self) -> Any:
        """gloo's device, made where it is needed: its thread wakes every 10 ms, and whoever computes on that core may
        then lose its turn."""
        return groups.gloo_device(self.loopback)

    def group(self, members: tuple[int, ...], kind: str = "host") -> Group:
        """Those ranks, made at the first use, which waits for all of them. `kind`: "host" or "nccl"."""
        found = self.groups.get((kind, members))
        if found is None:
            if self.closed:
                raise RankError(CLOSED)
            if list(members) != sorted(set(members) & set(self.everyone)) or self.rank not in members:
                raise RankError(
                    f"group {members}: must be sorted ranks of 0 to {self.size - 1}, this rank {self.rank} among them"
                )
            found = self.groups[kind, members] = Group(self, kind, members)
        return found

    def know(self, rank: int, pid: int) -> None:
        """Notice from now on when another rank's process ends. OSError where the system cannot tell."""
        if rank != self.rank and rank not in self.watched:
            self.watched[rank] = os.pidfd_open(pid)

    def gone(self, members: tuple[int, ...]) -> int | None:
        """One of these ranks whose process has ended."""
        poll = select.poll()
        ranks = {self.watched[rank]: rank for rank in members if rank in self.watched}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        return next((ranks[descriptor] for descriptor, _ in poll.poll(0)), None)

    def explain(self, reason: str) -> None:
        """Say, once, why the fast way is not taken."""
        if not self.without:
            self.without = reason
            warnings.warn(f"no shared memory between ranks ({reason}): {self.backend} is used", stacklevel=2)

    def close(self) -> None:
        """Give up all groups. Later use raises RankError."""
        if self.closed:
            return
        self.closed = True
        self.starter.close()
        if isinstance(self.messages, Sockets):
            self.messages.close()
        for descriptor in self.watched.values():
            os.close(descriptor)
        self.watched.clear()
        if self.pending:
            # Ending a group waits for what is under way in it, which may be for ever once a peer has failed.
            _abandoned.append((self.groups, self.up, self.down, self.pending, self.messages))
        else:
            backends = [group.made for (kind, _), group in self.groups.items() if kind == "nccl"]
            for one in (*backends, self.up, self.down):
                if one is not None:
                    one.shutdown()
        self.groups, self.pending = {}, set()
        self.up = self.down = self.messages = _Closed()


class Group:
    """Some ranks of a world, this one among them: made by all of them together."""

    def __init__(self, world: World, kind: str, members: tuple[int, ...]) -> None:
        self.world, self.kind, self.members = world, kind, members
        self.index = members.index(world.rank)
        self.made: Any = None  # the backend's group
        self.arena: Arena | None = None
        board = None
        if world.boards is not None:
            board = Board(f"{world.boards}-{kind}-{fingerprint(str(members)):x}", members, self.index)
        self.matcher = Matcher(members, board, kind == "host", world.starter)
        self._meet()
        if board is not None:
            board.unlink()
            if kind == "host" and len(members) > 1:
                self.arena = self.matcher.arena = self._share()
        if kind == "nccl":
            self.made = self.backend
            groups.warm_up(self.made, world.device)

    @property
    def backend(self) -> Any:
        """Its gloo or NCCL group; the first use waits for all members, which nothing can interrupt."""
        if self.made is None:
            world = self.world
            store = dist.PrefixStore(f"{self.kind} {self.members}", world.store)
            if self.kind == "nccl":
                self.made = groups.nccl_group(store, self.index, len(self.members), self.members)
            else:
                self._meet()
                self.made = groups.gloo_group(store, self.index, len(self.members), world.network)
        return self.made

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
        alone: bool = True,
    ) -> Collective:
        """Announce a collective whose arguments do not depend on the others'."""
        exchange = None
        if small is None and shared and self.arena is not None:
            exchange = Exchange(self.arena, way.shared(self.arena, *args))
        elif small is None and not shared:
            self.backend  # noqa: B018  (made while all are here)
        return self.matcher.submit(
            text, lambda _: way.backend(self.backend, self.index, *args), key, False, small, alone, exchange
        )

    def _meet(self, row: list[int] | None = None) -> list[list[int]]:
        """Wait until all are here; the numbers that each has brought."""
        found: list[list[int]] = []
        mine = torch.tensor(row or [], dtype=torch.int64)
        small = (mine, lambda rows, _: found.extend(one.tolist() for one in rows))
        self._wait(self.matcher.submit("the making of a group", lambda _: None, small=small, alone=False))
        return found

    def _wait(self, work: Any) -> None:
        Handle(work, None, self.world.pending).wait()

    def _share(self) -> Arena | None:
        """Memory that all members have mapped; None, on all of them, where one cannot have it."""
        world, size = self.world, arena.size(len(self.members))
        descriptor, memory, reason = -1, None, ""
        try:
            if self.index == 0:
                descriptor = shared_memory.make(size)
        except OSError as error:
            reason = str(error)
        rows = self._meet([os.getpid(), descriptor])
        try:
            pid, number = rows[0]
            if number >= 0:
                memory = shared_memory.open_from(pid, number, size)
            for rank, (process, _) in zip(self.members, rows, strict=True):
                world.know(rank, process)
        except OSError as error:
            memory, reason = None, str(error)
        found = self._meet([memory is not None])
        if descriptor >= 0:
            os.close(descriptor)
        if memory is None or [0] in found:
            lacking = [rank for rank, row in zip(self.members, found, strict=True) if row == [0]]
            world.explain(reason or f"rank {lacking[0]} has none")
            return None
        return Arena(memory, len(self.members), self.index, lambda: world.gone(self.members))


class _Closed:
    """Stands where messages and groups were."""

    def __getattr__(self, name: str) -> Any:
        raise RankError(CLOSED)


_abandoned: list[tuple[Any, ...]] = []


def under_torchrun(count: int) -> World:
    """This process's World, if torchrun started it. RankError otherwise."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RankError(
            "communicator.create() works inside a rank: call it in a function given to cluster.run "
            f"(or under torchrun; {', '.join(missing)} not set)"
        )
    store, rank, size = next(dist.rendezvous("env://", timeout=groups.TIMEOUT))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    cuda = torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = dist.PrefixStore(f"minipar {count}", store)
    loopback = local_size == size
    boards = groups.agree_on_boards(store, rank) if loopback else None
    return World(store, rank, size, device, "nccl" if cuda else "gloo", loopback, None, boards)
