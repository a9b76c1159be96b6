"""gloo with two shorter ways: messages through sockets, and collectives in shared memory where a group is on one host.

    ranks        0 1 | 2 3             two hosts
    messages     0 - 1                 a socket of this machine
                 1 - 2                 a TCP socket
    collectives  0,1                   shared memory
                 1,2 and 0,1,2,3       gloo, as a whole

gloo also does the collectives that `algorithm="backend"` asks for, and all of them where ranks cannot share memory.
"""

from __future__ import annotations

import os
import sys
import time
import warnings

import torch.distributed as dist

from minipar.cluster.processes import readable
from minipar.comm.transport import arena, shared_memory
from minipar.comm.transport.arena import Arena
from minipar.comm.transport.gloo import Gloo
from minipar.comm.transport.sockets import Sockets

_NAP = 1e-3  # seconds between two looks into the store


class LocalTransport(Gloo):
    """`hosts`: by rank, the name of its host. The other arguments are those of `Gloo`."""

    def __init__(
        self, store: dist.Store, rank: int, hosts: tuple[str, ...], address: str, without: str, sockets: Sockets
    ) -> None:
        super().__init__(store, rank, len(hosts), address, without)
        self.hosts, self.sockets = hosts, sockets
        self.watched: dict[int, int] = {}  # rank -> a descriptor of its process

    @property
    def messages(self) -> Sockets:
        return self.sockets

    @property
    def reader(self) -> Sockets:
        return self.sockets

    def _next(self, members: tuple[int, ...]) -> int:
        """The member after this rank, in a ring: each watches its connection with the next one."""
        return members[(members.index(self.rank) + 1) % len(members)]

    def lost(self, members: tuple[int, ...]) -> int | None:
        after = self._next(members)
        return after if self.sockets.lost(after) else None

    def memory(self, kind: str, members: tuple[int, ...]) -> Arena | None:
        """An arena that all members have mapped. If one of them cannot map it, or is on another host, all get None."""
        self.sockets.warm_up([self._next(members)])
        if len({self.hosts[rank] for rank in members}) > 1:
            return None
        size, index = arena.size(len(members)), members.index(self.rank)
        descriptor, memory, reason = -1, None, ""
        try:
            if index == 0:
                descriptor = shared_memory.make(size)
        except OSError as error:
            reason = str(error)
        found = self._meet(f"memory {kind}", members, [os.getpid(), descriptor])
        try:
            pid, number = found[0]
            if number >= 0:
                memory = shared_memory.open_from(pid, number, size)
                for rank, (process, _) in zip(members, found, strict=True):
                    self._watch(rank, process)
        except OSError as error:
            memory, reason = None, str(error)
        lacking = [
            rank
            for rank, row in zip(members, self._meet(f"mapped {kind}", members, [memory is not None]), strict=True)
            if row == [0]
        ]
        if descriptor >= 0:
            os.close(descriptor)
        if memory is None or lacking:
            self._explain(reason or f"rank {lacking[0]} has none")
            return None
        return Arena(memory, members, index, lambda k: self._gone(members[k]))

    def _meet(self, name: str, members: tuple[int, ...], row: list[int]) -> list[list[int]]:
        """Wait until all members have brought some numbers; those of each. An interrupt can come."""
        store = dist.PrefixStore(f"{name} {members}", self.store)
        store.set(str(self.rank), " ".join(str(int(number)) for number in row))
        keys = list(map(str, members))
        while not store.check(keys):
            time.sleep(_NAP)
        return [list(map(int, store.get(key).decode().split())) for key in keys]

    def _watch(self, rank: int, pid: int) -> None:
        """Open a descriptor by which the end of another rank's process is noticed. OSError if the system has none."""
        if rank == self.rank or rank in self.watched:
            return
        if not hasattr(os, "pidfd_open"):
            raise OSError(f"no descriptors of processes on {sys.platform}")
        self.watched[rank] = os.pidfd_open(pid)

    def _gone(self, rank: int) -> int | None:
        """This rank, if its process has ended."""
        if rank not in self.watched:
            return None
        return rank if readable([self.watched[rank]], 0) else None

    def _explain(self, reason: str) -> None:
        """Note why shared memory is not used; where the system could have it, also warn, once."""
        known, self.without = bool(self.without), self.without or reason
        if not known and sys.platform == "linux":
            warnings.warn(f"no shared memory between ranks ({reason}): gloo is used", stacklevel=2)

    def close(self, under_way: bool) -> None:
        self.sockets.close()
        for descriptor in self.watched.values():
            os.close(descriptor)
        self.watched.clear()
