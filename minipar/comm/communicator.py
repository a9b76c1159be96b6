"""`create()` gives a rank its `Communicator`: sends, receives, sums and exchanges among all ranks.

In a function given to cluster.run, or in a process that torchrun started:

    comm = minipar.communicator.create()
    comm.allreduce([1, 2, 3])               # the sum over all ranks, a list again
    comm.all_gather(comm.rank)              # [0, 1, 2, ...]
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from minipar.cluster import worker
from minipar.comm import operations, playing, values
from minipar.comm.handles import Handle, to_host
from minipar.comm.missing import real
from minipar.comm.operations import ALL_GATHER, ALL_TO_ALL, ALLREDUCE, REDUCE_SCATTER
from minipar.comm.transport.interface import DONE, Transport
from minipar.comm.world import CLOSED, RankGroup, World, of_rank, under_torchrun
from minipar.costs.rates import Calibration
from minipar.errors import RankError
from minipar.program import collectives
from minipar.wording import several

_TAG = 0x60000000  # of what `send` sends, beyond those of playing.py


class Communicator:
    """How this rank communicates with the others. `create()` makes it; all ranks make their calls in the same order.

    `rank`, `size`: ints. `hosts`: by rank, a name that is the same for ranks of one host. `device`: where this rank
    computes.
    `backend`: "nccl", or "gloo" (which carries tensors on a GPU through host memory).

    x in the methods below is a number, a list of numbers (nested or not), a NumPy array or a tensor, and is not
    changed; the result is of the same type. `algorithm` of a sum: "shared" (memory of one machine), "backend" (gloo's
    or NCCL's own), or None for the faster of those that are possible; a name of collectives.names("allreduce"), such
    as "ring", plays that program, as does a generator that @minipar.collective decorated; "auto" takes what is fastest
    by `rates` (of minipar.calibrate).
    RankError for impossible calls; CollectiveMismatch, on every rank, where ranks call different things, or give values
    of different forms.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self.hosts = world.hosts
        self.device, self.backend, self.gpus = world.device, world.backend, world.gpus
        self._world, self.pending = world, world.pending
        self._played: Counter[tuple[int, ...]] = Counter()  # by the ranks that took part
        self.turns: deque[playing.Played] = deque()  # programs that are begun and have not run
        self.rates: Calibration | None = None  # by which "auto" chooses; the same on all ranks

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._world.closed

    @property
    def transport(self) -> str:
        """What carries tensors on the CPU between these ranks: "shared memory", or the backend, and why."""
        if self.size == 1 or self.group().shares:
            return "shared memory"
        return f"gloo ({self._world.host.without})"

    # Collectives

    def allreduce(self, x: Any, op: Any = sum, *, algorithm: Any = None) -> Any:
        """Combine `x` over all ranks, element by element. `op`: `sum`, `max`, `min`, or their names, or "avg"."""
        return operations.allreduce(self, x, op, collectives.known(algorithm))

    def reduce(self, x: Any, root: int = 0, op: Any = sum) -> Any:
        """`allreduce`, but the result is on rank `root` only; the others get None."""
        return operations.reduce(self, x, root, op)

    def reduce_scatter(self, x: Any, op: Any = sum) -> Any:
        """`allreduce`, but each rank gets only its share of the rows (the first dimension) of the result.

        n rows of p ranks are divided as evenly as can be, the first n mod p ranks having one more.
        """
        return operations.reduce_scatter(self, x, op)

    def all_gather(self, x: Any) -> Any:
        """The rows of all ranks, in their order, on all of them; a rank may have more rows than another, or none.

        Of numbers: a list with one of each rank. all_gather(reduce_scatter(x)) is allreduce(x).
        """
        return operations.all_gather(self, x)

    def broadcast(self, x: Any = None, root: int = 0) -> Any:
        """`x` of rank `root`, on all ranks. The others bring something of the same form, or None."""
        return operations.broadcast(self, x, root)

    def all_to_all(self, x: Any) -> Any:
        """Piece k goes to rank k; a rank gets the pieces that all ranks have for it, in their order.

        `x`: a list of one piece for each rank (numbers, lists, arrays, tensors, of any sizes); the result is a list.
        Or an array or a tensor, whose rows are divided as in `reduce_scatter`; the received rows are put together.
        """
        return operations.all_to_all(self, x)

    def barrier(self) -> None:
        """Return when every rank has called this."""
        if self.size > 1:
            self.group().meet()

    # Point to point

    def send(self, x: Any, peer: int) -> None:
        """Send `x` to a rank, whose `recv` returns it; that rank need not know its form. Returns when `x` is on its
        way; for a large `x` that may be when it was received."""
        self._check(peer)
        kind, tensor = values.to_tensor(x, call="send")
        header = torch.tensor(values.encode_form(kind, tensor))
        data = values.as_bytes(to_host(tensor) if tensor.is_cuda else tensor)
        for part in (header, data):
            if part.numel():
                self.isend(part, peer, _TAG).wait()

    def recv(self, peer: int) -> Any:
        """What a rank sends next by `send`; a tensor is placed on this rank's device."""
        self._check(peer)
        header = torch.empty(values.FORM, dtype=torch.int64)
        self.irecv(header, peer, _TAG).wait()
        kind, dtype, shape = values.decode_form(header.tolist())
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            self.irecv(values.as_bytes(tensor), peer, _TAG).wait()
        return values.from_tensor(kind, tensor.to(self.device) if kind == "tensor" else tensor)

    def isend(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Handle:
        """Start sending a contiguous tensor. It must not change before `wait` has returned.

        Messages of two ranks that are under way together need different tags, and the same order on both sides.
        """
        worker.check_whole()
        if not tensor.is_contiguous() or peer == self.rank or not 0 <= peer < self.size:
            self._check(peer, tensor)
        world = self._world
        if not tensor.is_cuda:
            work = world.messages.send(tensor, peer, tag)
            if work is DONE:
                return Handle(None, None, self.pending)
            kept = None if world.messages.keeps_memory else tensor
            return Handle(work, kept, self.pending, ("send to rank", peer, tag))
        if world.gpus is not None:
            return Handle(world.gpus.messages.send(tensor, peer, tag), tensor, self.pending)
        host = to_host(tensor)
        what = ("send to rank", peer, tag)
        return Handle(world.messages.send(host, peer, tag), host, self.pending, what)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0, unless: int | None = None) -> bool:
        """`irecv`, and wait for it. Returns whether it arrived: False if a message of the tag `unless` arrived first;
        that one is then still to be received. This is possible only where waiting reads messages (not `posts`)."""
        worker.check_whole()
        reader = self._world.reader
        if reader is None:
            self.irecv(tensor, peer, tag).wait()
            return True
        work = reader.receive(tensor, peer, tag, unless)
        Handle(work, tensor, self.pending, ("recv from rank", peer, tag)).wait()
        return work.done

    @property
    def posts(self) -> bool:
        """Whether a message arrives sooner if `irecv` is called sooner. If not, `wait` reads the message."""
        return self.device.type != "cpu" or self._world.reader is None

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Handle:
        """Start receiving into a contiguous tensor of the sent shape and dtype; it is filled when `wait` returns."""
        worker.check_whole()
        self._check(peer, tensor)
        world = self._world
        if not tensor.is_cuda:
            what = ("recv from rank", peer, tag)
            return Handle(world.messages.receive(tensor, peer, tag), tensor, self.pending, what)
        if world.gpus is not None:
            return Handle(world.gpus.messages.receive(tensor, peer, tag), tensor, self.pending)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        what = ("recv from rank", peer, tag)
        work = world.messages.receive(host, peer, tag)
        return Handle(work, host, self.pending, what, partial(tensor.copy_, host, non_blocking=True))

    def readable(self, peers: Sequence[int], seconds: float) -> bool:
        """Whether one of these ranks has sent a message that is not received yet; waits up to so many seconds for one.
        RankError where receives have to be posted, since that is not known there."""
        worker.check_whole()
        reader = self._world.reader
        if reader is None:
            raise RankError("ranks that decide as they run look for messages; possible are ranks on one machine")
        return reader.readable(peers, seconds)

    def _check(self, peer: int, tensor: torch.Tensor | None = None) -> None:
        if peer == self.rank or not 0 <= peer < self.size:
            raise RankError(
                f"rank {self.rank} cannot send to or receive from rank {peer}: {several(self.size, 'rank')} are here"
            )
        if tensor is not None and not tensor.is_contiguous():
            raise RankError(f"a tensor of strides {tensor.stride()} cannot be sent or received; use .contiguous()")

    # What programs use: on tensors in place, among any ranks of this communicator

    def prepare(
        self, members: Iterable[tuple[int, ...]], peers: Iterable[int] = (), algorithm: str | None = None
    ) -> None:
        """Make the groups that the methods below will use, and connect with the ranks that this one exchanges messages
        with, so that they need not: each waits for all that take part, and ranks that begin collectives or messages in
        different orders, as they may, would wait for each other.

        Every rank calls this with the same groups; each makes those that it is in, all in one order. `algorithm`: by
        which they will be used.
        """
        for group in sorted({tuple(sorted(one)) for one in members if self.rank in one}):
            if len(group) > 1:
                found = self.group(group, self.gpus)
                if not self.shares(found, algorithm if algorithm == "backend" else None):
                    found.backend  # noqa: B018  (this makes it)
        if algorithm in collectives.names("allreduce"):
            playing.make_room(self, self.device)
        world = self._world
        carrier = world.messages if self.gpus is None else self.gpus.messages
        carrier.warm_up(sorted(set(peers)))

    def iallreduce(
        self, tensor: torch.Tensor, ranks: tuple[int, ...], name: str = "", algorithm: str | None = None
    ) -> Handle:
        """Start summing a contiguous tensor in place over `ranks` (sorted, this rank among them).

        `name`: what the sum is called, such as a bucket. Ranks that differ in it, or in shape or dtype, get a RankError
        from `wait`: only the names show that two sums of the same form are in another order. `algorithm`: "shared",
        "backend", or one of collectives.names("allreduce"), whose program runs in `wait`: what ranks sum is then not
        compared.
        """
        if len(ranks) == 1 and ranks[0] == self.rank:
            return Handle(None, None, self.pending)
        if not tensor.is_contiguous():
            raise RankError(f"a tensor of strides {tensor.stride()} cannot be summed in place; use .contiguous()")
        tensor = real(tensor)
        if algorithm is not None and algorithm in collectives.names("allreduce"):
            return Handle(operations.played_sum(self, tensor, ranks, str(algorithm)), tensor, self.pending)
        what = f"iallreduce of {values.form(tensor)}" + (f" ({name})" if name else "")
        group, given = self._for(tensor, ranks)
        work = group.submit(what, ALLREDUCE, lambda _: (given,), self.shares(group, algorithm))
        return self._handle(work, given, tensor, given)

    def ireduce_scatter(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor,
        ranks: tuple[int, ...],
        add: bool = False,
    ) -> Handle:
        """Start summing a contiguous tensor over `ranks` (sorted, this rank among them), each keeping its own part.

        The tensor is len(ranks) parts of the size of `into`; `into` becomes the sum of the parts at this rank's place,
        or is added to (`add`), until `wait` returns.
        """
        tensor, into = real(tensor), real(into)
        if len(ranks) == 1 and ranks[0] == self.rank:
            (into.add_ if add else into.copy_)(tensor)
            return Handle(None, None, self.pending)
        if not tensor.is_contiguous() or tensor.numel() != into.numel() * len(ranks):
            raise RankError(f"{tensor.numel()} elements cannot be cut into {len(ranks)} parts of {into.numel()}")
        what = f"reduce_scatter of {values.form(tensor)}"
        group, given = self._for(tensor, ranks)
        arguments = given, into, [into.numel()] * len(ranks), "sum", add
        work = group.submit(what, REDUCE_SCATTER, lambda _: arguments, self.shares(group) and not tensor.is_cuda)
        return Handle(work, given, self.pending)

    def iall_gather(self, part: torch.Tensor, into: torch.Tensor, ranks: tuple[int, ...]) -> list[Handle]:
        """Start collecting the parts of `ranks` (sorted, this rank among them) end to end in a contiguous tensor.

        `part` may already be this rank's place in `into`.
        """
        size = part.numel()
        if not into.is_contiguous() or into.numel() != size * len(ranks):
            raise RankError(f"{len(ranks)} parts of {size} elements do not fill a tensor of {into.numel()}")
        mine = into[ranks.index(self.rank) * size :][:size]
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part)
        if len(ranks) == 1:
            return []
        what = f"all_gather of {values.form(into)}"
        group, given = self._for(into, ranks)
        work = group.submit(what, ALL_GATHER, lambda _: (given, [size] * len(ranks)), self.shares(group))
        return [self._handle(work, given, into, given)]

    def iall_to_all(
        self,
        tensor: torch.Tensor,
        into: torch.Tensor,
        ranks: tuple[int, ...],
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> Handle:
        """Start exchanging parts among `ranks` (sorted, this rank among them).

        The contiguous tensor is len(ranks) parts, the k-th for the k-th of the ranks; `into` gets what they have for
        this one, in their order. `sizes`: elements of the part that the k-th has for the j-th, [k][j], which all ranks
        give alike; default: all parts are equal.
        """
        if len(ranks) == 1:
            into.copy_(tensor)
            return Handle(None, None, self.pending)
        count, index = len(ranks), ranks.index(self.rank)
        size, what = tensor.numel() // count, f"all_to_all of {values.form(tensor)}"
        if sizes is None:
            sent = got = size * count
        else:
            sent, got = sum(sizes[index]), sum(row[index] for row in sizes)
            what = f"all_to_all of unequal parts {sizes} of {values.form(tensor[:0])}"
        if not tensor.is_contiguous() or (tensor.numel(), into.numel()) != (sent, got):
            raise RankError(
                f"{tensor.numel()} elements cannot be exchanged by {several(count, 'rank')} into {into.numel()}"
            )
        group, given = self._for(tensor, ranks)
        target = into if given is tensor else torch.empty(into.shape, dtype=into.dtype, pin_memory=True)
        arguments = given.detach().view(-1), target.detach().view(-1), sizes or [[size] * count] * count
        work = group.submit(what, ALL_TO_ALL, lambda _: arguments, self.shares(group) and not tensor.is_cuda)
        return self._handle(work, target, into, tensor)

    def _handle(self, work: Any, host: torch.Tensor, into: torch.Tensor, kept: torch.Tensor) -> Handle:
        """Of a work whose result is `into`; or `host`, if that is another tensor, which is copied then: on the current
        stream, like a kernel, since pinned memory is not reused before that is done."""
        after = None if host is into else partial(into.copy_, host, non_blocking=True)
        return Handle(work, kept, self.pending, after=after)

    def _for(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> tuple[RankGroup, torch.Tensor]:
        """The group for a tensor, and the tensor itself or its copy on the host."""
        if not tensor.is_cuda:
            return self.group(ranks), tensor
        if self.gpus is None:
            return self.group(ranks), to_host(tensor)
        return self.group(ranks, self.gpus), tensor

    # Groups

    def group(self, ranks: tuple[int, ...] | None = None, transport: Transport | None = None) -> RankGroup:
        """All ranks of this communicator, or some, over that of tensors on the CPU, or another transport. RankError
        when closed."""
        world = self._world
        if world.closed:
            raise RankError(CLOSED)
        carrier = world.host if transport is None else transport
        return world.group(tuple(range(self.size)) if ranks is None else ranks, carrier)

    def shares(self, group: RankGroup, algorithm: str | None = None) -> bool:
        """Whether an algorithm uses the shared memory of a group. RankError where it cannot, or is not known."""
        if algorithm not in (None, "shared", "backend"):
            possible = ", ".join(("shared", "backend", "auto", *collectives.names("allreduce")))
            raise RankError(
                f"algorithm={algorithm!r} is not known on this rank; possible are {possible}, or the generator itself "
                "that @minipar.collective decorated"
            )
        if algorithm == "shared" and not group.shares:
            raise RankError(f"algorithm='shared' is not possible: {self.transport}")
        return algorithm != "backend" and group.shares

    def count_played(self, ranks: Sequence[int]) -> int:
        """A number for a program that some ranks play; the same on all of these, whatever else each has played."""
        members = tuple(ranks)
        self._played[members] += 1
        return self._played[members] + zlib.crc32(repr(members).encode())

    def close(self) -> None:
        """Close all groups; every rank does it. Later calls raise RankError; `create()` makes a new one."""
        self._world.close()


def _forget_if_closed() -> None:
    """What an interrupt may have cut short is closed with it. (One that is cut short in the making may be whole on
    other ranks, so that there is no other before the next run.)"""
    global _current
    if _current is not None and _current.closed:
        _current = None
        worker.groups_renewed()


def _end(old: Communicator, store: str) -> None:
    """Close a communicator of an earlier generation. Its store's file goes first: torch writes to it once more while it
    is there, and ends the process where the disk is full."""
    if store:
        with contextlib.suppress(OSError):
            os.unlink(store)
    old.close()


_current: Communicator | None = None
_generation = -1  # the generation of _current
_count = 0  # communicators made in it, the same on all ranks


def create() -> Communicator:
    """This rank's Communicator, made at the first call (together with all other ranks) and then kept.

    Works in functions given to `cluster.run`, and in processes that torchrun started. RankError elsewhere.
    """
    global _current, _generation, _count
    if worker.in_rank():
        context = worker.context()
        if _generation != context.generation:
            if _current is not None:
                _current.close()
            _current, _generation, _count = None, context.generation, 0
        _forget_if_closed()
        if _current is None:
            if len(context.active) < context.size:
                raise RankError(
                    "communicator.create() is made by all ranks together: "
                    "call it once under cluster.run before cluster.run_on"
                )
            _count += 1
            local = bool(context.store)  # (else torchrun started this process)
            world = of_rank(context, _count) if local else under_torchrun(f"{context.generation}.{_count}")
            _current = Communicator(world)
            worker.when_outdated(partial(_end, _current, context.store))
        return _current
    _forget_if_closed()
    if _current is None:
        worker.note_interrupts()
        _count += 1
        _current = Communicator(under_torchrun(_count))
    return _current
