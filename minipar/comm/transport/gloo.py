"""gloo, over the network: the transport of ranks that may be on several machines.

A receive needs the size of the message, and is posted ahead; a thread on each side carries the message. gloo cannot say
whether a message is here for which no receive was posted, and it does not compare what ranks bring to a collective:
gloo_board.py does.

Process groups are made directly, without torch's global default group: so several clusters, generations and users' own
`init_process_group` can exist at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from minipar.cluster.agreement import TIMEOUT
from minipar.comm.transport.gloo_board import GlooBoard
from minipar.comm.transport.interface import Messages, OwnMessages, Transport, Work


class Gloo(Transport):
    """`everyone`: the ranks that messages go between. `address`: the IP address of this host at which ranks reach it.
    `without`: why there is no shared memory, in a few words."""

    name = "gloo"
    own_thread = True

    def __init__(self, store: dist.Store, rank: int, everyone: tuple[int, ...], address: str, without: str) -> None:
        self.store, self.rank, self.everyone = store, rank, everyone
        self.address, self.without = address, without
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}

    @cached_property
    def messages(self) -> Messages:
        return _Messages(self.process_group(self.everyone), self.everyone)

    def process_group(self, members: tuple[int, ...]) -> Any:
        return self._group(self.name, members)

    def board(self, kind: str, members: tuple[int, ...]) -> GlooBoard:
        """Of gloo's own collectives the board is in the same process group, since all start them in one order."""
        index = members.index(self.rank)
        return GlooBoard(members, index, self._group(kind, members) if len(members) > 1 else None)

    def line(self, members: tuple[int, ...]) -> OwnMessages:
        return _Messages(self._group("line", members), tuple(range(len(members))))  # (peers are numbers in the group)

    def _group(self, kind: str, members: tuple[int, ...]) -> Any:
        found = self._groups.get((kind, members))
        if found is None:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [self._network]
            options._timeout = TIMEOUT
            store = dist.PrefixStore(f"{kind} {members}", self.store)
            found = dist.ProcessGroupGloo(store, members.index(self.rank), len(members), options)
            self._groups[kind, members] = found
        return found

    @cached_property
    def _network(self) -> Any:
        """gloo's device, which serves all groups of a rank. It is made only when needed: its thread wakes every 10 ms,
        which can interrupt a computation on that core."""
        return dist.ProcessGroupGloo.create_device(hostname=self.address)

    @property
    def native(self) -> bool:
        return bool(self._groups)

    def close(self, under_way: bool) -> None:
        pass  # process groups, and with them their connections, end when nothing refers to them any more


class _Messages:
    keeps_memory = False

    def __init__(self, group: Any, members: tuple[int, ...]) -> None:
        self.group, self.place = group, {rank: k for k, rank in enumerate(members)}

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending; complete when the peer has received."""
        work: Work = self.group.send([tensor], self.place[peer], tag)
        return work

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work: Work = self.group.recv([tensor], self.place[peer], tag)
        return work

    def warm_up(self, peers: Iterable[int]) -> None:
        """All are connected when the group is made."""

    def close(self) -> None:
        """The connections end when nothing refers to the group any more."""
