"""`create()` gives a rank its `Communicator`: sends, receives and sums among all ranks.

In a function given to cluster.run, or in a process that torchrun started:

    comm = minipar.communicator.create()
    comm.allreduce([1, 2, 3])               # the sum over all ranks, a list again
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from minipar.cluster import worker
from minipar.comm import groups, values
from minipar.comm.handles import Handle, StagedHandle
from minipar.comm.sockets import Sockets
from minipar.errors import RankError


class Communicator:
    """This rank's way to the others. Made by `create()`; every rank makes its calls in the same order.

    `rank`, `size`: ints. `device`: where this rank computes. `backend`: "nccl", or "gloo" (which carries tensors on
    a GPU through host memory).
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        backend: str,
        loopback: bool,
        path: str | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.backend = backend
        self.closed = False
        self._store = store
        self._everyone = tuple(range(size))
        self._network = groups.gloo_device(loopback)
        # Made before the first group, whose making waits for all ranks: from then on they can all be reached.
        self._messages: Sockets | groups.GlooMessages | _Closed
        if path is not None:
            self._messages = Sockets(rank, path)
        self._groups: dict[tuple[int, ...], Any] = {}  # gloo, by members
        self._nccl: dict[tuple[int, ...], Any] = {}
        self._pending: set[Handle] = set()
        self._world = self._gloo(self._everyone)
        if path is None:
            self._messages = groups.GlooMessages(self._world)
        self._up: Any = None
        self._down: Any = None
        if backend == "nccl" and size > 1:
            # One NCCL group per direction: in one alone, a send and a receive of the same pair would wait in line.
            self._up = groups.nccl_group(dist.PrefixStore("up", store), rank, size, self._everyone)
            self._down = groups.nccl_group(dist.PrefixStore("down", store), rank, size, self._everyone)

    # Point to point

    def isend(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Handle:
        """Start sending a contiguous tensor. It must not change before `wait` has returned.

        Messages between two ranks that are under way together need different tags (gloo matches by tag) and the
        same order on both sides (NCCL matches by order). A send completes only when the peer receives.
        """
        self._check(tensor, peer)
        if not tensor.is_cuda:
            return Handle(self._messages.send(tensor, peer, tag), tensor, self._pending)
        if self.backend == "nccl":
            group = self._up if peer > self.rank else self._down
            return Handle(group.send([tensor], peer, tag), tensor, self._pending)
        host = _to_host(tensor)
        return StagedHandle(self._messages.send(host, peer, tag), host, None, self._pending)

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Handle:
        """Start receiving into a contiguous tensor of the sent shape and dtype; its contents count after `wait`."""
        self._check(tensor, peer)
        if not tensor.is_cuda:
            return Handle(self._messages.receive(tensor, peer, tag), tensor, self._pending)
        if self.backend == "nccl":
            group = self._up if peer < self.rank else self._down
            return Handle(group.recv([tensor], peer, tag), tensor, self._pending)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return StagedHandle(self._messages.receive(host, peer, tag), host, tensor, self._pending)

    def _check(self, tensor: torch.Tensor, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.size:
            raise RankError(f"rank {self.rank} cannot send to or receive from rank {peer}: {self.size} ranks are here")
        if not tensor.is_contiguous():
            raise RankError(f"a tensor of strides {tensor.stride()} cannot be sent or received; use .contiguous()")

    # Collectives

    def prepare(self, members: Iterable[tuple[int, ...]]) -> None:
        """Make the groups that `iallreduce` will use, so that it need not. Every rank calls this with the same
        groups; each makes those that it is in, all in one order, so that no two wait for each other."""
        for group in sorted({tuple(sorted(one)) for one in members}):
            if self.rank in group and len(group) > 1:
                if self.backend == "nccl":
                    self._nccl_among(group)
                else:
                    self._gloo(group)

    def iallreduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Handle:
        """Start summing a contiguous tensor in place over `ranks` (sorted, this rank among them)."""
        if len(ranks) == 1 and ranks[0] == self.rank:
            return Handle(None, None, self._pending)
        if not tensor.is_contiguous():
            raise RankError(f"a tensor of strides {tensor.stride()} cannot be summed in place; use .contiguous()")
        if not tensor.is_cuda:
            return Handle(self._gloo(ranks).allreduce([tensor]), tensor, self._pending)
        if self.backend == "nccl":
            return Handle(self._nccl_among(ranks).allreduce([tensor]), tensor, self._pending)
        host = _to_host(tensor)
        return StagedHandle(self._gloo(ranks).allreduce([host]), host, tensor, self._pending)

    def allreduce(self, x: Any, op: Any = sum) -> Any:
        """Combine `x` over all ranks, element by element; a new object of the same type, `x` unchanged.

        `x`: a number, a list of numbers (nested or not), a NumPy array or a tensor, of one shape on all ranks.
        `op`: `sum`, `max`, `min`, or their names, or "avg". RankError for anything else, and where ranks differ.
        """
        name = values.operation(op)
        kind, tensor = values.to_tensor(x, name)
        kind, tensor = values.agree(kind, tensor, name, self._gather)
        if self.size > 1 and tensor.numel():
            self._reduce(tensor, name)
        if name == "avg":
            tensor = values.divide(tensor, self.size)
        return values.from_tensor(kind, tensor)

    def _reduce(self, tensor: torch.Tensor, name: str) -> None:
        reduction = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(name, dist.ReduceOp.SUM)
        if not tensor.is_cuda:
            self._world.allreduce([tensor], reduction).wait()
        elif self.backend == "nccl":
            self._nccl_among(self._everyone).allreduce([tensor], reduction).wait()
        else:
            host = _to_host(tensor)
            self._world.allreduce([host], reduction).wait()
            tensor.copy_(host)

    def _gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [row]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        self._world.allgather([rows], [row]).wait()
        return rows

    def barrier(self) -> None:
        """Return when every rank has called this."""
        if self.size > 1:
            self._world.barrier().wait()

    # Groups

    def _gloo(self, members: tuple[int, ...]) -> Any:
        group = self._groups.get(members)
        if group is None:
            index = self._index(members)
            store = dist.PrefixStore(f"gloo {members}", self._store)
            group = self._groups[members] = groups.gloo_group(store, index, len(members), self._network)
        return group

    def _nccl_among(self, members: tuple[int, ...]) -> Any:
        group = self._nccl.get(members)
        if group is None:
            index = self._index(members)
            store = dist.PrefixStore(f"nccl {members}", self._store)
            group = self._nccl[members] = groups.nccl_group(store, index, len(members), members)
            groups.warm_up(group, self.device)
        return group

    def _index(self, members: tuple[int, ...]) -> int:
        if self.closed:
            raise RankError("this Communicator is closed; communicator.create() makes a new one")
        if list(members) != sorted(set(members) & set(self._everyone)) or self.rank not in members:
            raise RankError(
                f"group {members}: must be sorted ranks of 0 to {self.size - 1}, this rank {self.rank} among them"
            )
        return members.index(self.rank)

    def close(self) -> None:
        """Give up all groups; every rank does it. Later calls raise RankError; `create()` makes a new one."""
        if self.closed:
            return
        self.closed = True
        if self._pending:
            # Ending a group waits for what is under way in it, which may be for ever once a peer has failed.
            _abandoned.append(self._take())
            return
        for group in (*self._nccl.values(), self._up, self._down):
            if group is not None:
                group.shutdown()
        self._take()

    def _take(self) -> tuple[Any, ...]:
        taken = (self._groups, self._nccl, self._up, self._down, self._pending)
        self._groups, self._nccl, self._pending = {}, {}, set()
        if isinstance(self._messages, Sockets):
            self._messages.close()
        self._world = self._up = self._down = self._messages = _Closed()
        return taken


class _Closed:
    """Stands where the groups were."""

    def __getattr__(self, name: str) -> Any:
        raise RankError("this Communicator is closed; communicator.create() makes a new one")


_abandoned: list[tuple[Any, ...]] = []
_current: Communicator | None = None
_made_in = -1  # the generation of _current
_count = 0  # communicators made in it, the same on all ranks


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def create() -> Communicator:
    """This rank's Communicator, made at the first call (together with all other ranks) and then kept.

    Works in functions given to `cluster.run`, and in processes that torchrun started. RankError elsewhere.
    """
    global _current, _made_in, _count
    if worker.in_rank():
        context = worker.context()
        if _made_in != context.generation:
            if _current is not None:
                _current.close()
            _current, _made_in, _count = None, context.generation, 0
        if _current is None or _current.closed:
            if len(context.active) < context.size:
                raise RankError(
                    "communicator.create() is made by all ranks together: "
                    "call it once under cluster.run before cluster.run_on"
                )
            _count += 1
            store = dist.PrefixStore(str(_count), dist.FileStore(context.store, context.size))
            device = torch.device(context.device)
            path = f"{context.store}-{_count}"
            _current = Communicator(store, context.rank, context.size, device, context.backend, True, path)
    elif _current is None or _current.closed:
        _count += 1
        _current = _under_torchrun(_count)
    return _current


def _under_torchrun(count: int) -> Communicator:
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
    return Communicator(store, rank, size, device, "nccl" if cuda else "gloo", loopback=local_size == size)
