"""gloo, over the network: the transport of ranks that may be on several machines.

A receive needs the size of the message, and is posted ahead; a thread on each side carries the message. gloo cannot say
whether a message is here for which no receive was posted, and it does not compare what ranks bring to a collective.

Process groups are made directly, without torch's global default group: so several clusters, generations and users' own
`init_process_group` can exist at the same time.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor

from minipar.comm.transport.interface import Messages, Transport, Work

# It is long, since gloo also uses it for connecting; and the driver notices by itself when a rank dies.
TIMEOUT = timedelta(minutes=30)


class Gloo(Transport):
    """`loopback`: whether all ranks are on this machine. `without`: why there is no shared memory, in a few words."""

    name = "gloo"
    own_thread = True
    at_once = True  # so overlapping groups connect in the same order on all ranks, that in which they are made

    def __init__(self, store: dist.Store, rank: int, size: int, loopback: bool, without: str) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.loopback, self.without = loopback, without
        self._groups: dict[tuple[int, ...], Any] = {}

    @cached_property
    def messages(self) -> Messages:
        return _Messages(self.process_group(tuple(range(self.size))))

    def process_group(self, members: tuple[int, ...]) -> Any:
        found = self._groups.get(members)
        if found is None:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [self._network]
            options._timeout = TIMEOUT
            store = dist.PrefixStore(f"{self.name} {members}", self.store)
            found = dist.ProcessGroupGloo(store, members.index(self.rank), len(members), options)
            self._groups[members] = found
        return found

    @cached_property
    def _network(self) -> Any:
        """gloo's device, which serves all groups of a rank. It is made only when needed: its thread wakes every 10 ms,
        which can interrupt a computation on that core."""
        if self.loopback:
            return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        if name:
            return dist.ProcessGroupGloo.create_device(interface=name)
        return dist.ProcessGroupGloo.create_default_device()

    def close(self, under_way: bool) -> None:
        pass  # process groups, and with them their connections, end when nothing refers to them any more


class _Messages:
    keeps_memory = False

    def __init__(self, group: Any) -> None:
        self.group = group

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending; complete when the peer has received."""
        work: Work = self.group.send([tensor], peer, tag)
        return work

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work: Work = self.group.recv([tensor], peer, tag)
        return work
