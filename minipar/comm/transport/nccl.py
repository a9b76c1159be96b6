"""NCCL: the transport of tensors on GPUs, where every rank has one of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm.transport.arena import Arena
from minipar.comm.transport.gloo import TIMEOUT
from minipar.comm.transport.interface import StreamWork, Transport, Work


class Nccl(Transport):
    """`size`: of all ranks. `host`: the transport of tensors on the CPU, by which NCCL's collectives are announced."""

    name = "nccl"
    on_host = False
    without = "tensors are on GPUs"

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, host: Transport) -> None:
        self.store, self.rank, self.device, self.host = store, rank, device, host
        self._groups: dict[tuple[int, ...], Any] = {}
        self._messages = _Messages(self, tuple(range(size)))

    @property
    def messages(self) -> _Messages:
        return self._messages

    def announcing(self, kind: str, members: tuple[int, ...]) -> Any:
        return self.host.announcing(kind, members)

    def memory(self, kind: str, members: tuple[int, ...]) -> Arena | None:
        return self.host.memory(kind, members)

    def lost(self, members: tuple[int, ...]) -> int | None:
        return self.host.lost(members)

    def process_group(self, members: tuple[int, ...]) -> Any:
        found = self._groups.get(members)
        if found is None:
            found = self._groups[members] = self.make(f"{self.name} {members}", members)
            # NCCL makes its communicator at the first use, which is here: so all ranks make them in the same order.
            found.allreduce([torch.zeros(1, device=self.device)]).wait()
            torch.cuda.current_stream(self.device).synchronize()  # (the device may have other work that is not over)
        return found

    def make(self, name: str, members: tuple[int, ...]) -> Any:
        """A new NCCL group; its communicators are made at the first use."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        options.global_ranks_in_group = list(members)
        store = dist.PrefixStore(name, self.store)
        return dist.ProcessGroupNCCL(store, members.index(self.rank), len(members), options)

    def close(self, under_way: bool) -> None:
        if not under_way:
            for one in (*self._groups.values(), self._messages.up, self._messages.down):
                one.shutdown()


class _Messages:
    """One group per direction: in a single group, a send and a receive of the same pair would wait for each other.

    NCCL connects two ranks at their first message, where each waits for the other: two that both send first would wait
    for ever. `warm_up` connects them before.
    """

    keeps_memory = False

    def __init__(self, transport: Nccl, everyone: tuple[int, ...]) -> None:
        self.rank, self.device = transport.rank, transport.device
        self.connected: set[int] = set()
        self.up = transport.make("up", everyone)
        self.down = transport.make("down", everyone)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return StreamWork((self.up if peer > self.rank else self.down).send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return StreamWork((self.up if peer < self.rank else self.down).recv([tensor], peer, tag))

    def warm_up(self, peers: Iterable[int]) -> None:
        """Send a number in both directions. All ranks take their pairs in one order, so no two wait for each other."""
        new = sorted(set(peers) - self.connected, key=lambda peer: (min(peer, self.rank), max(peer, self.rank)))
        for peer in new:
            number = torch.zeros(1, device=self.device)
            first, second = (self.send, self.receive) if self.rank < peer else (self.receive, self.send)
            first(number, peer, 0).wait()
            second(number, peer, 0).wait()
            self.connected.add(peer)
