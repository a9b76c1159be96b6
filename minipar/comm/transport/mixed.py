"""The transport of ranks on several hosts: each pair and each group goes the shortest way that all of it has.

ranks        0 1 | 2 3             two hosts
messages     0 - 1                 a socket of this machine, and a ring in shared memory
             1 - 2                 a TCP socket
collectives  0,1                   shared memory
             1,2 and 0,1,2,3       gloo, as a whole
"""

from __future__ import annotations

from typing import Any

from minipar.comm.transport.arena import Arena
from minipar.comm.transport.interface import Board, Meet, Messages, OwnMessages, Reader, Transport
from minipar.comm.transport.local import LocalTransport


class Mixed(Transport):
    """`local`: the transport of the ranks of this host, whose sockets also reach those of others. `hosts`: by rank."""

    name = "gloo"  # (so that its groups announce in the process groups that do their collectives)
    own_thread = True

    def __init__(self, local: LocalTransport, hosts: tuple[str, ...]) -> None:
        self.local, self.hosts = local, hosts
        self.without = f"ranks are on {len(set(hosts))} hosts"

    @property
    def messages(self) -> Messages:
        return self.local.messages

    @property
    def reader(self) -> Reader | None:
        return self.local.reader

    def _way(self, members: tuple[int, ...]) -> Transport:
        """What carries the collectives of these ranks."""
        return self.local if len({self.hosts[rank] for rank in members}) == 1 else self.local.gloo

    def process_group(self, members: tuple[int, ...]) -> Any:
        return self._way(members).process_group(members)

    def at_once(self, members: tuple[int, ...]) -> bool:
        return self._way(members).at_once(members)

    def board(self, kind: str, members: tuple[int, ...]) -> Board:
        self.messages.warm_up([self._next(members)])
        return self._way(members).board(kind, members)

    def _next(self, members: tuple[int, ...]) -> int:
        """The member after this rank, in a ring: each watches its connection with the next one."""
        return members[(members.index(self.local.rank) + 1) % len(members)]

    def line(self, members: tuple[int, ...]) -> OwnMessages:
        return self.local.line(members)

    def lost(self, members: tuple[int, ...]) -> int | None:
        sockets, after = self.local.sockets, self._next(members)
        return after if sockets is not None and sockets.lost(after) else None

    def memory(self, members: tuple[int, ...], meet: Meet) -> Arena | None:
        return self._way(members).memory(members, meet)

    def close(self, under_way: bool) -> None:
        self.local.close(under_way)
