"""NCCL: the transport of tensors on GPUs, where every rank has one of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minipar.comm.transport.board import Board
from minipar.comm.transport.gloo import TIMEOUT
from minipar.comm.transport.interface import Messages, Transport, Work


class Nccl(Transport):
    """`host`: the transport of tensors on the CPU. If it has boards, NCCL's collectives are announced there, too."""

    name = "nccl"
    own_thread = False
    at_once = True
    without = "tensors are on GPUs"

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, host: Transport) -> None:
        self.store, self.rank, self.device, self.host = store, rank, device, host
        self._groups: dict[tuple[int, ...], Any] = {}
        self._messages = _Messages(self, tuple(range(size)))

    @property
    def messages(self) -> Messages:
        return self._messages

    def board(self, kind: str, members: tuple[int, ...]) -> Board | None:
        return self.host.board(kind, members)

    def process_group(self, members: tuple[int, ...]) -> Any:
        found = self._groups.get(members)
        if found is None:
            found = self._groups[members] = self.make(f"{self.name} {members}", members)
            # NCCL makes its communicator at the first use, which is here: so all ranks make them in the same order.
            found.allreduce([torch.zeros(1, device=self.device)]).wait()
            torch.cuda.synchronize(self.device)
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
    """One group per direction: in a single group, a send and a receive of the same pair would wait for each other."""

    keeps_memory = False

    def __init__(self, transport: Nccl, everyone: tuple[int, ...]) -> None:
        self.rank = transport.rank
        self.up = transport.make("up", everyone)
        self.down = transport.make("down", everyone)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work: Work = (self.up if peer > self.rank else self.down).send([tensor], peer, tag)
        return work

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work: Work = (self.up if peer < self.rank else self.down).recv([tensor], peer, tag)
        return work
