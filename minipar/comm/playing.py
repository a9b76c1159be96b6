"""Collectives by a program of `program/collectives`: play(program, comm, tensor, ranks, op) runs this rank's part.

    SEND      sends the chunks, one message for each stretch of memory of at most PIECE bytes
    RECV      receives into the place of the chunks; what will be added, into a small buffer, piece by piece
    REDUCE    adds a piece while the next one arrives: it is still in the cache, and no large buffer is needed

It is the same program that is verified, simulated and drawn. Only its number of chunks counts here, not the bytes that
it was made for: chunk c of C begins at element n c // C, and stretches without elements are not sent.

A sum by a program runs in the `wait` of its handle: it is this rank's own work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minipar.comm.transport.shared import PAIRWISE
from minipar.comm.values import DTYPES
from minipar.errors import RankError
from minipar.models.tensors import dtype_name
from minipar.program import Instruction, Op, Program, Value
from minipar.program.collectives import OPERATIONS
from minipar.program.collectives.moves import bounds

if TYPE_CHECKING:
    from minipar.comm.communicator import Communicator
    from minipar.comm.handles import Handle
    from minipar.trace import Trace

PIECE = 1 << 20  # bytes of a message, at most
_BUFFERS = 2  # one is added while the next piece comes into the other
_TAGS, _NUMBERS = 1 << 19, 1 << 10  # messages to one rank in one collective, and collectives under way at once
_FIRST_TAG = 1 << 30  # beyond those of pipelines (comm/links.py); gloo's tags have 31 bits


@dataclass(frozen=True)
class Timed:
    """When each instruction of one rank began and ended, by `time.perf_counter`."""

    starts: list[float]
    ends: list[float]


def play(
    program: Program, comm: Communicator, tensor: Tensor, ranks: tuple[int, ...], op: str = "sum", *, number: int = 0
) -> Tensor:
    """Run this rank's instructions of a collective's program on a contiguous tensor. Every rank of `ranks` does it.

    ranks    rank k of the program is ranks[k]
    op       what REDUCE does: "sum", "max", "min", or "avg", a sum that is divided at the end
    number   collectives that are under way at the same time between the same ranks need different ones

    It works in the tensor's own memory, as a flat tensor, whatever its shape is. It returns
      allreduce, broadcast    the tensor                   all_gather    the tensor; before, it had this rank's chunk
      reduce_scatter          this rank's chunk of it; the rest has intermediate values
      reduce                  the tensor; on ranks other than the root it has intermediate values
      all_to_all              a new flat tensor: what all ranks had for this one, in the order of ranks
    Errors: RankError for an impossible dtype or op, or ranks that do not fit; RuntimeError when a peer is gone.
    """
    return _Player(program, comm, tensor, ranks, op, number).run(None)


def record(
    program: Program, comm: Communicator, tensor: Tensor, ranks: tuple[int, ...], op: str = "sum", *, number: int = 0
) -> tuple[Tensor, Timed]:
    """Like `play`, but also return when each instruction ran. `measured` makes a Trace of the records of all ranks."""
    size = len(program.ranks[ranks.index(comm.rank)])
    times = Timed([0.0] * size, [0.0] * size)
    return _Player(program, comm, tensor, ranks, op, number).run(times), times


def measured(program: Program, records: Sequence[Timed]) -> Trace:
    """The measured trace of a program from the records of all ranks, which must share a clock, as on one machine."""
    from minipar.trace import Trace  # which a rank does not need

    first = min((start for one in records for start in one.starts), default=0.0)
    starts = [[time - first for time in one.starts] for one in records]
    ends = [[time - first for time in one.ends] for one in records]
    return Trace(program, starts, ends, lambda rank, value: program.chunks[value.index], "measured")


# on a rank ------------------------------------------------------------------------------------------------------------


def _pool(comm: Communicator) -> list[Tensor]:
    """Receive buffers of a communicator that are free now: to make new ones would take longer than the receive."""
    return _pools.setdefault(comm, [])


def make_room(comm: Communicator, device: torch.device) -> None:
    """Make the receive buffers now: they belong to the way messages go, and not to what a program holds."""
    pool = _pool(comm)
    while sum(buffer.device == device for buffer in pool) < _BUFFERS:
        pool.append(torch.empty(PIECE, dtype=torch.uint8, device=device))


_pools: WeakKeyDictionary[Communicator, list[Tensor]] = WeakKeyDictionary()
_ADD = PAIRWISE | {"avg": torch.add}


class _Player:
    """One run of one rank through a program."""

    def __init__(
        self, program: Program, comm: Communicator, tensor: Tensor, ranks: tuple[int, ...], op: str, number: int
    ) -> None:
        self._check(program, comm, tensor, ranks, op)
        self.program, self.comm, self.ranks, self.op = program, comm, ranks, op
        self.me = ranks.index(comm.rank)
        self.flat = tensor.detach().view(-1)
        self.tag = _FIRST_TAG + number % _NUMBERS * _TAGS
        self.sent: dict[int, int] = {}  # messages so far, by rank
        self.received: dict[int, int] = {}
        self.sending: dict[int, list[Handle]] = {}  # by chunk
        self.arriving: dict[Value, tuple[int, list[Handle]]] = {}  # index of the RECV
        self.expected: dict[Value, tuple[int, list[int]]] = {}  # the same for chunks that will be added: their tags
        self.places = self._places()

    def _check(self, program: Program, comm: Communicator, tensor: Tensor, ranks: tuple[int, ...], op: str) -> None:
        if len(ranks) != len(program.ranks) or comm.rank not in ranks or len(set(ranks)) != len(ranks):
            raise RankError(
                f"ranks {ranks}: {program.name} needs {len(program.ranks)} different ranks, {comm.rank} among them"
            )
        if not tensor.is_contiguous():
            raise RankError(f"a tensor of strides {tensor.stride()} cannot be worked on in place; use .contiguous()")
        if op not in OPERATIONS:
            raise RankError(f"op={op!r} is not known; possible are {', '.join(OPERATIONS)}")
        adds = any(ins.op is Op.REDUCE for row in program.ranks for ins in row)
        dtype = dtype_name(tensor.dtype)
        if adds and tensor.dtype not in DTYPES:
            possible = ", ".join(map(dtype_name, DTYPES))
            raise RankError(f"{program.name}: dtype {dtype} cannot be reduced; possible are {possible}")
        if adds and op == "avg" and not tensor.dtype.is_floating_point:
            raise RankError(f"{program.name}: an average is no {dtype}; use a floating-point dtype for op='avg'")

    def _places(self) -> dict[int, Tensor]:
        """The memory of each chunk. In an all_to_all the chunks from other ranks are put in a new tensor."""
        program, flat, me = self.program, self.flat, self.me
        count = len(program.chunks)
        mine, wanted = (sorted(value.index for value in held[me]) for held in (program.state, program.final))
        if count in (len(mine), len(wanted)):
            self.result = flat
            return {c: flat[slice(*bounds(flat.numel(), count, c))] for c in range(count)}
        parts = {c: flat[slice(*bounds(flat.numel(), len(mine), k))] for k, c in enumerate(mine)}
        own = parts[next(iter(set(mine) & set(wanted)))]
        size = own.numel()
        self.result = torch.empty(size * len(wanted), dtype=flat.dtype, device=flat.device)
        for k, c in enumerate(wanted):
            place = self.result[k * size : (k + 1) * size]
            if c in parts:
                place.copy_(own)
            parts[c] = place
        return parts

    def run(self, times: Timed | None) -> Tensor:
        clock = time.perf_counter
        for index, ins in enumerate(self.program.ranks[self.me]):
            if times is not None and ins.op is Op.RECV:
                times.starts[index] = times.ends[index] = clock()
            for value in ins.reads:
                if value in self.arriving:
                    self._arrive(value, times)
            start = clock()
            if ins.op is Op.SEND:
                self._send(ins)
            elif ins.op is Op.RECV:
                self._receive(index, ins)
            else:
                start = self._reduce(ins, times)
            if times is not None and ins.op is not Op.RECV:
                times.starts[index], times.ends[index] = start, clock()
        while self.arriving:
            self._arrive(next(iter(self.arriving)), times)
        for handles in self.sending.values():
            for handle in handles:
                handle.wait()
        return self._finish()

    def _finish(self) -> Tensor:
        final = sorted(value.index for value in self.program.final[self.me])
        if self.op == "avg" and any(ins.op is Op.REDUCE for row in self.program.ranks for ins in row):
            for stretch in self._stretches(final):
                stretch.div_(len(self.ranks))
        own = len(final) == 1 < len(self.program.chunks)
        return self.places[final[0]] if own else self.result

    # messages --------------------------------------------------------------------------------------------------------

    def _stretches(self, chunks: Sequence[int]) -> Iterator[Tensor]:
        """The memory of chunks, in pieces of one message each; sender and receiver cut them in the same way."""
        step = max(1, PIECE // self.flat.element_size())
        whole: Tensor | None = None
        for k, c in enumerate(chunks):
            place = self.places[c]
            whole = place if whole is None else self._joined(whole, place)
            if k + 1 == len(chunks) or chunks[k + 1] != c + 1:
                yield from (piece for piece in whole.split(step) if piece.numel())
                whole = None

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Two neighbours in memory as one."""
        return first.as_strided((first.numel() + second.numel(),), (1,))

    def _tag(self, counts: dict[int, int], peer: int) -> int:
        counts[peer] = k = counts.get(peer, -1) + 1
        return self.tag + k

    def _send(self, ins: Instruction) -> None:
        peer = self.ranks[ins.peer]
        handles = [self.comm.isend(piece, peer, self._tag(self.sent, peer)) for piece in self._stretches(ins.layers)]
        for c in ins.layers:
            self.sending.setdefault(c, []).extend(handles)

    def _receive(self, index: int, ins: Instruction) -> None:
        peer = self.ranks[ins.peer]
        tags = [self._tag(self.received, peer) for _ in self._stretches(ins.layers)]
        if ins.writes[0].kind == "incoming":
            self.expected[ins.writes[0]] = (index, tags)
            return
        # (A chunk that is still being sent is not overwritten: what replaces it was computed from what was sent.)
        handles = [
            self.comm.irecv(piece, peer, tag) for piece, tag in zip(self._stretches(ins.layers), tags, strict=True)
        ]
        self.arriving.update(dict.fromkeys(ins.writes, (index, handles)))

    def _arrive(self, value: Value, times: Timed | None) -> None:
        index, handles = self.arriving[value]
        for handle in handles:
            handle.wait()
        if times is not None:
            times.ends[index] = time.perf_counter()
        for other in self.program.ranks[self.me][index].writes:
            self.arriving.pop(other, None)

    def _reduce(self, ins: Instruction, times: Timed | None) -> float:
        """Add the received pieces; returns when the first one had arrived."""
        index, tags = self.expected.pop(ins.reads[0])
        peer = self.ranks[self.program.ranks[self.me][index].peer]
        for c in ins.layers:
            for handle in self.sending.pop(c, ()):
                handle.wait()
        add, pieces, pool = _ADD[self.op], list(self._stretches(ins.layers)), _pool(self.comm)
        buffers = [self._buffer(pool) for _ in range(min(_BUFFERS, len(pieces)))]
        begin = 0.0

        def post(k: int) -> tuple[Tensor, Handle]:
            into = buffers[k % _BUFFERS].view(self.flat.dtype)[: pieces[k].numel()]
            return into, self.comm.irecv(into, peer, tags[k])

        following = post(0) if pieces else None
        for k, piece in enumerate(pieces):
            assert following is not None
            came, handle = following
            following = post(k + 1) if k + 1 < len(pieces) else None
            handle.wait()
            begin = begin or time.perf_counter()
            if times is not None:
                times.ends[index] = time.perf_counter()
            add(piece, came, out=piece)
        pool.extend(buffers)
        return begin or time.perf_counter()

    def _buffer(self, pool: list[Tensor]) -> Tensor:
        for k, buffer in enumerate(pool):
            if buffer.device == self.flat.device:
                return pool.pop(k)
        return torch.empty(PIECE, dtype=torch.uint8, device=self.flat.device)


class Played:
    """A program that runs in `wait`, after those in `turns` that were begun before it: ranks of several groups may wait
    for them in different orders. It takes the place of a backend's work."""

    def __init__(self, run: Callable[[], object], turns: deque[Played]) -> None:
        self._run, self._turns = run, turns
        self._error: BaseException | None = None
        self._begun = False
        self._turns.append(self)

    def wait(self) -> None:
        """Run it, at the first call."""
        while not self._begun:
            self._turns.popleft()._play()
        if self._error is not None:
            raise self._error

    def _play(self) -> None:
        self._begun = True
        try:
            self._run()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise

    def is_completed(self) -> bool:
        """Whether it has run."""
        return self._begun
