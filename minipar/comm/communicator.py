"""`create()` gives a rank its `Communicator`: sends, receives and sums among all ranks.

In a function given to cluster.run, or in a process that torchrun started:

    comm = minipar.communicator.create()
    comm.allreduce([1, 2, 3])               # the sum over all ranks, a list again
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from minipar.cluster import worker
from minipar.comm import groups, values
from minipar.comm.board import SMALL, Board, fingerprint
from minipar.comm.handles import Handle, StagedHandle, SumHandle
from minipar.comm.matching import Collective, Matcher, Starter
from minipar.comm.sockets import DONE, Sockets
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
        boards: str | None = None,
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
        self._boards = boards or path  # how the files of the boards begin; None on several machines
        self._matchers: dict[tuple[str, tuple[int, ...]], Matcher] = {}
        self._starter = Starter()
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

        Messages of two ranks that are under way together need different tags, and the same order on both sides.
        """
        self._check(tensor, peer)
        if not tensor.is_cuda:
            work = self._messages.send(tensor, peer, tag)
            if work is DONE:
                return Handle(None, None, self._pending)
            # A socket keeps what it has not written yet, and no longer: the memory is free when the send is done.
            kept = None if isinstance(self._messages, Sockets) else tensor
            return Handle(work, kept, self._pending, ("send to rank", peer, tag))
        if self.backend == "nccl":
            group = self._up if peer > self.rank else self._down
            return Handle(group.send([tensor], peer, tag), tensor, self._pending)
        host = groups.to_host(tensor)
        what = ("send to rank", peer, tag)
        return StagedHandle(self._messages.send(host, peer, tag), host, None, self._pending, what)

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Handle:
        """Start receiving into a contiguous tensor of the sent shape and dtype; its contents count after `wait`."""
        self._check(tensor, peer)
        if not tensor.is_cuda:
            what = ("recv from rank", peer, tag)
            return Handle(self._messages.receive(tensor, peer, tag), tensor, self._pending, what)
        if self.backend == "nccl":
            group = self._up if peer < self.rank else self._down
            return Handle(group.recv([tensor], peer, tag), tensor, self._pending)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        what = ("recv from rank", peer, tag)
        return StagedHandle(self._messages.receive(host, peer, tag), host, tensor, self._pending, what)

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

    def iallreduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], name: str = "") -> Handle:
        """Start summing a contiguous tensor in place over `ranks` (sorted, this rank among them).

        `name`: of what is summed, such as a bucket. Ranks that differ in it, or in shape or dtype, get a RankError
        from `wait`: two sums of the same form in another order are told apart by their names only.
        """
        if len(ranks) == 1 and ranks[0] == self.rank:
            return Handle(None, None, self._pending)
        if not tensor.is_contiguous():
            raise RankError(f"a tensor of strides {tensor.stride()} cannot be summed in place; use .contiguous()")
        what = f"iallreduce of {values.form(tensor)}" + (f" ({name})" if name else "")
        staged = tensor.is_cuda and self.backend != "nccl"
        given = groups.to_host(tensor) if staged else tensor
        if given.is_cuda or given.numel() * given.element_size() > SMALL:
            work = self._collective(ranks, given, what, lambda group: group.allreduce([given]))
        else:
            group, out = self._gloo(ranks), given.detach()
            small = (out, lambda parts, _: values.combine(parts, "sum", out))
            work = self._matchers["gloo", ranks].submit(what, lambda _: group.allreduce([given]), small=small)
        if staged:
            return StagedHandle(work, given, tensor, self._pending)
        return Handle(work, tensor, self._pending)

    def _collective(
        self, ranks: tuple[int, ...], tensor: torch.Tensor, what: str, start: Callable[[Any], Any]
    ) -> Collective:
        """Start a collective among `ranks` once all have come to the same one; `what` is all that has to agree."""
        nccl = tensor.is_cuda
        group = self._nccl_among(ranks) if nccl else self._gloo(ranks)
        return self._matchers["nccl" if nccl else "gloo", ranks].submit(what, lambda _: start(group))

    def ireduce_scatter(
        self, tensor: torch.Tensor, into: torch.Tensor, ranks: tuple[int, ...], add: bool = False
    ) -> Handle:
        """Start summing a contiguous tensor over `ranks` (sorted, this rank among them), each keeping its own part.

        The tensor is len(ranks) parts of the size of `into`; `into` becomes the sum of the parts at this rank's place,
        or is added to (`add`), when `wait` returns. gloo's own reduce-scatter is an all-reduce of which a slice is
        kept, twice the bytes; so here the parts change hands, and every rank sums its own.
        """
        if len(ranks) == 1 and ranks[0] == self.rank:
            (into.add_ if add else into.copy_)(tensor)
            return Handle(None, None, self._pending)
        if not tensor.is_contiguous() or tensor.numel() != into.numel() * len(ranks):
            raise RankError(f"{tensor.numel()} elements cannot be cut into {len(ranks)} parts of {into.numel()}")
        what = f"reduce_scatter of {values.form(tensor)}"
        if tensor.is_cuda and self.backend == "nccl":
            part = torch.empty_like(tensor[: into.numel()])
            work = self._collective(ranks, tensor, what, lambda group: group._reduce_scatter_base(part, tensor))
            return SumHandle(work, tensor, part.view(1, -1), into, add, self._pending)
        given = groups.to_host(tensor) if tensor.is_cuda else tensor
        parts = torch.empty_like(given)
        work = self._collective(ranks, given, what, lambda group: group.alltoall_base(parts, given, [], []))
        return SumHandle(work, given, parts.view(len(ranks), -1), into, add, self._pending)

    def iall_gather(self, part: torch.Tensor, into: torch.Tensor, ranks: tuple[int, ...]) -> list[Handle]:
        """Start collecting the parts of `ranks` (sorted, this rank among them) end to end in a contiguous tensor.

        `part` may be the place in `into` where it goes. gloo's own all-gather goes through a copy of the whole; so
        here every rank broadcasts its part: as many bytes, no copy, and less than half the time.
        """
        size = part.numel()
        if not into.is_contiguous() or into.numel() != size * len(ranks):
            raise RankError(f"{len(ranks)} parts of {size} elements do not fill a tensor of {into.numel()}")
        mine = into[ranks.index(self.rank) * size :][:size]
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part)
        if len(ranks) == 1:
            return []
        if into.is_cuda and self.backend == "nccl":
            what = f"all_gather of {values.form(into)}"
            work = self._collective(ranks, into, what, lambda group: group._allgather_base(into, mine))
            return [Handle(work, into, self._pending)]
        handles = []
        for k, target in enumerate(into.split(size)):
            host = groups.to_host(target) if into.is_cuda else target
            what = f"all_gather, part {k} of {values.form(into)}"
            work = self._collective(ranks, host, what, partial(groups.broadcast, host, k))
            staged = into.is_cuda and ranks[k] != self.rank
            handles.append(
                StagedHandle(work, host, target, self._pending) if staged else Handle(work, host, self._pending)
            )
        return handles

    def allreduce(self, x: Any, op: Any = sum) -> Any:
        """Combine `x` over all ranks, element by element; a new object of the same type, `x` unchanged.

        `x`: a number, a list of numbers (nested or not), a NumPy array or a tensor, of one shape on all ranks.
        `op`: `sum`, `max`, `min`, or their names, or "avg". RankError for anything else, and where ranks differ.
        """
        name = values.operation(op)
        kind, tensor = values.to_tensor(x, name)
        if self._boards is None:
            kind, tensor = values.agree(kind, tensor, name, self._gather)
        tensor = self._reduce(kind, tensor, name)
        if name == "avg":
            tensor = values.divide(tensor, self.size)
        return values.from_tensor(kind, tensor)

    def _reduce(self, kind: str, tensor: torch.Tensor, name: str) -> torch.Tensor:
        reduction = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(name, dist.ReduceOp.SUM)
        text, key = values.describe(kind, tensor, name)
        if self.size == 1:
            return tensor
        plain = kind in ("number", "list")
        nccl = tensor.is_cuda and self.backend == "nccl"
        group = self._nccl_among(self._everyone) if nccl else self._gloo(self._everyone)
        given = groups.to_host(tensor) if tensor.is_cuda and not nccl else tensor
        real = plain and given.dtype == torch.float64

        def start(reals: list[bool]) -> Any:
            nonlocal given
            if any(reals):  # a real number on one rank makes the result real on all
                given = given.to(torch.float64)
            return group.allreduce([given], reduction) if given.numel() else None

        def reduce(parts: list[torch.Tensor], reals: list[bool]) -> None:
            nonlocal given
            if any(reals):
                dtypes = [torch.float64 if one else torch.int64 for one in reals]
                parts = [part.view(dtype).double() for part, dtype in zip(parts, dtypes, strict=True)]
                given = given.double()
            values.combine(parts, name, given)

        on_board = not given.is_cuda and given.numel() * given.element_size() <= SMALL
        small = (given, reduce) if on_board else None
        matcher = self._matchers["nccl" if nccl else "gloo", self._everyone]
        work = matcher.submit(text, start, key, real, small)
        Handle(work, given, self._pending).wait()
        return given.to(tensor.device)

    def _gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [row]
        rows = [torch.empty_like(row) for _ in range(self.size)]
        work = self._collective(self._everyone, row, "gather", lambda group: group.allgather([rows], [row]))
        Handle(work, row, self._pending).wait()
        return rows

    def barrier(self) -> None:
        """Return when every rank has called this."""
        if self.size > 1:
            self._gloo(self._everyone)  # RankError when closed
            work = self._matchers["gloo", self._everyone].submit("barrier", lambda _: self._across_machines())
            Handle(work, None, self._pending).wait()

    def _across_machines(self) -> Any:
        """What a barrier needs beyond the announcement."""
        return self._world.barrier() if self._boards is None else None

    # Groups

    def _gloo(self, members: tuple[int, ...]) -> Any:
        group = self._groups.get(members)
        if group is None:
            index = self._index(members)
            self._meet("gloo", members, index)
            store = dist.PrefixStore(f"gloo {members}", self._store)
            group = self._groups[members] = groups.gloo_group(store, index, len(members), self._network)
        return group

    def _nccl_among(self, members: tuple[int, ...]) -> Any:
        group = self._nccl.get(members)
        if group is None:
            index = self._index(members)
            self._meet("nccl", members, index)
            store = dist.PrefixStore(f"nccl {members}", self._store)
            group = self._nccl[members] = groups.nccl_group(store, index, len(members), members)
            groups.warm_up(group, self.device)
        return group

    def _meet(self, backend: str, members: tuple[int, ...], index: int) -> None:
        """Wait for the members of a group before it is made, which nothing can interrupt."""
        board = None
        if self._boards is not None:
            board = Board(f"{self._boards}-{backend}-{fingerprint(str(members)):x}", members, index)
        matcher = self._matchers[backend, members] = Matcher(members, board, backend == "gloo", self._starter)
        Handle(matcher.submit("the making of a group", lambda _: None), None, self._pending).wait()
        if board is not None:
            board.unlink()

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
        self._starter.close()
        if self._pending:
            # Ending a group waits for what is under way in it, which may be for ever once a peer has failed.
            _abandoned.append(self._take())
            return
        for group in (*self._nccl.values(), self._up, self._down):
            if group is not None:
                group.shutdown()
        self._take()

    def _take(self) -> tuple[Any, ...]:
        taken = (self._groups, self._nccl, self._matchers, self._up, self._down, self._pending)
        self._groups, self._nccl, self._matchers, self._pending = {}, {}, {}, set()
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
            worker.when_outdated(_current.close)
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
    loopback = local_size == size
    boards = groups.agree_on_boards(store, rank) if loopback else None
    return Communicator(store, rank, size, device, "nccl" if cuda else "gloo", loopback, boards=boards)
