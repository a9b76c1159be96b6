"""gloo, over the network: the transport of ranks that may be on several machines.

A receive needs the size of the message, and is posted ahead; a thread on each side carries the message. gloo cannot say
whether a message is here for which no receive was posted, and it does not compare what ranks bring to a collective:
`agree` does, with small collectives of its own. Their group's next one begins when this one has started: so all members
start everything in one order, the collectives themselves included.

Process groups are made directly, without torch's global default group: so several clusters, generations and users' own
`init_process_group` can exist at the same time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Generator, Iterable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.cluster.agreement import TIMEOUT
from minipar.comm.transport import calls
from minipar.comm.transport.arena import Arena
from minipar.comm.transport.calls import Need, Steps
from minipar.comm.transport.interface import Messages, Transport, Work

_SLICE = timedelta(milliseconds=50)  # of a wait in native code: an interrupt can come this late
_NAP = 5e-4


class Gloo(Transport):
    """`size`: of all ranks. `address`: the IP address of this host at which ranks reach it.
    `without`: why there is no shared memory, in a few words."""

    name = "gloo"
    on_host = True

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, without: str) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.address, self.without = address, without
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}

    @cached_property
    def messages(self) -> Messages:
        return _Messages(self.process_group(tuple(range(self.size))))

    def process_group(self, members: tuple[int, ...]) -> Any:
        return self._group(self.name, members)

    def announcing(self, kind: str, members: tuple[int, ...]) -> Any:
        """Of gloo's own collectives the same process group, since all start them in one order."""
        return self._group(kind, members)

    def memory(self, kind: str, members: tuple[int, ...]) -> Arena | None:
        return None

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


def agree(group: Any, members: tuple[int, ...], call: bytes, row: Sequence[int] = ()) -> Steps:
    """The numbers that each member brings, of all of them, once it is known that all have called the same; each brings
    as many. `group`: their process group."""
    calls.compare(members, (yield from _gather(group, len(members), call)))
    if not row:
        return [[]] * len(members)
    return [
        array("q", found).tolist() for found in (yield from _gather(group, len(members), array("q", row).tobytes()))
    ]


def _gather(group: Any, count: int, mine: bytes) -> Generator[Need, None, list[bytes]]:
    room, size = bytearray(count * len(mine)), len(mine)
    whole, part = torch.frombuffer(room, dtype=torch.uint8), torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    work = group._allgather_base(whole, part)
    yield _Gathered(work)
    work.wait()  # (which raises what went wrong)
    return [bytes(room[start : start + size]) for start in range(0, count * size, size)]


class _Gathered(NamedTuple):
    work: Any

    def met(self) -> bool:
        return bool(self.work.is_completed())

    def sleep(self, short: bool) -> None:
        if short:
            time.sleep(_NAP)
            return
        try:
            self.work.wait(_SLICE)
        except RuntimeError:  # the time is over, which does nothing else to a collective; or the work has failed
            return


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

    def warm_up(self, peers: Iterable[int]) -> None:
        """All are connected when the group is made."""
