"""The moves of which an algorithm is made, and `lay_out`, which makes a Program from them.

An algorithm is a generator of moves for each rank, in the order in which the rank makes them:

    Send(chunks, to)          start sending the rank's own chunks, as they are now
    Reduce(chunks, source)    wait for another rank's chunks, and add them to the rank's own chunks
    Copy(chunks, source)      start receiving chunks that replace the rank's own; the first move that needs them waits

A rank has one port, through which it sends one message after another. A move without chunks is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from minipar.program import PORT, Instruction, Op, Part, Program, Value, chunk, incoming


class Send(NamedTuple):
    """Send chunks to a rank."""

    chunks: Sequence[int]
    to: int


class Reduce(NamedTuple):
    """Receive chunks of another rank, and add them to this rank's own."""

    chunks: Sequence[int]
    source: int


class Copy(NamedTuple):
    """Receive chunks of another rank, which replace this rank's own."""

    chunks: Sequence[int]
    source: int


Move = Send | Reduce | Copy


class Setting(NamedTuple):
    """Where a collective runs.

    ranks    number of ranks
    root     the rank that a broadcast begins with, or a reduce ends with
    nodes    number of nodes; neighbouring ranks are on the same node
    pieces   in how many pieces a tensor travels where an algorithm pipelines
    """

    ranks: int
    root: int = 0
    nodes: int = 1
    pieces: int = 1


Moves = Callable[[Setting, int], Iterator[Move]]  # of one rank


class Rates(NamedTuple):
    """Seconds that a message takes. It occupies its rank's port for `overhead` and for `beta` for each byte, and
    arrives `alpha` later. Adding a byte takes `gamma`."""

    alpha: float
    beta: float
    gamma: float = 0.0
    overhead: float = 0.0

    def port(self, size: float) -> float:
        """Seconds for which a message of `size` bytes occupies its rank's port."""
        return self.overhead + size * self.beta

    def hop(self, size: float) -> float:
        """Seconds until a message of `size` bytes has arrived."""
        return self.alpha + self.port(size)


class Algorithm(NamedTuple):
    """An algorithm, as its file defines it.

    moves       for each collective, the generator of a rank's moves
    cost        seconds of a collective in closed form; None: there is no closed form
    chunks      the number of chunks that the tensor is cut into
    pipelined   the collectives that send a tensor in pieces; each of `parts` equal parts has `Setting.pieces` pieces
    """

    moves: Mapping[str, Moves]
    cost: Callable[[str, Setting, float, Rates], float] | None
    chunks: Callable[[str, Setting], int]
    pipelined: tuple[str, ...] = ()
    parts: int = 1


def in_turn(first: Moves, second: Moves) -> Moves:
    """The moves of a collective that consists of two: an allreduce is a reduce-scatter, then an all-gather of the sums;
    or a reduce, then a broadcast of the sum."""

    def moves(setting: Setting, rank: int) -> Iterator[Move]:
        yield from first(setting, rank)
        yield from second(setting, rank)

    return moves


def usual(collective: str, setting: Setting) -> int:
    """The number of chunks, if there is one for each rank; in an all_to_all for each pair of ranks; in a broadcast or a
    reduce one."""
    return {"broadcast": 1, "reduce": 1, "all_to_all": setting.ranks**2}.get(collective, setting.ranks)


def bounds(size: int, count: int, index: int) -> tuple[int, int]:
    """Where chunk `index` of `count` begins and ends in a tensor of `size` elements. Lengths of chunks differ by at
    most one element."""
    return size * index // count, size * (index + 1) // count


def sizes_of(collective: str, setting: Setting, by: Algorithm, nbytes: int, item: int = 1) -> tuple[int, ...]:
    """The sizes in bytes of the chunks of a tensor, whose elements have `item` bytes."""
    count = by.chunks(collective, setting)
    each = count // setting.ranks if collective == "all_to_all" else count  # (there each rank cuts its tensor)
    cuts = [bounds(nbytes // item, each, c % each) for c in range(count)]
    return tuple((last - first) * item for first, last in cuts)


def held(collective: str, setting: Setting, rank: int, count: int, at_end: bool) -> range:
    """Which of `count` chunks a rank holds at the beginning of a collective, or must hold at its end."""
    everything, nothing = range(count), range(0)
    share = count // setting.ranks
    own = range(rank * share, (rank + 1) * share)
    if collective == "reduce_scatter":
        return own if at_end else everything
    if collective == "all_gather":
        return everything if at_end else own
    if collective == "broadcast":
        return everything if at_end or rank == setting.root else nothing
    if collective == "reduce":
        return everything if not at_end or rank == setting.root else nothing
    if collective == "all_to_all":  # chunk r * ranks + j goes from rank r to rank j
        return range(rank, count, setting.ranks) if at_end else own
    return everything


def lay_out(name: str, collective: str, setting: Setting, moves: Moves, sizes: tuple[int, ...]) -> Program:
    """The program of a collective, made from each rank's moves. `sizes` are the sizes of its chunks in bytes.

    If a rank need not keep a chunk, the last instruction that works on the chunk frees it.
    """
    rows, state, final = [], [], []
    for rank in range(setting.ranks):
        before, after = (held(collective, setting, rank, len(sizes), at_end) for at_end in (False, True))
        row = [ins for move in moves(setting, rank) if move.chunks for ins in _instructions(move, sizes)]
        rows.append(tuple(_with_frees(row, set(map(chunk, after)))))
        state.append(frozenset(map(chunk, before)))
        final.append(frozenset(map(chunk, after)))
    return Program(
        tuple(rows), 0, 1, (), (("rank", setting.ranks),), tuple(state), name=name, chunks=sizes, final=tuple(final)
    )


def _instructions(move: Move, sizes: tuple[int, ...]) -> Iterator[Instruction]:
    chunks = tuple(move.chunks)
    own = tuple(map(chunk, chunks))
    if isinstance(move, Send):
        yield Instruction(Op.SEND, chunks, -1, -1, reads=own, stream=PORT, peer=move.to)
        return
    stream = f"recv {move.source}"
    if isinstance(move, Copy):
        yield Instruction(Op.RECV, chunks, -1, -1, writes=own, stream=stream, peer=move.source)
        return
    came = tuple(incoming(c, move.source) for c in chunks)
    parts = tuple(Part(Op.REDUCE, c, sizes[c]) for c in chunks)
    yield Instruction(Op.RECV, chunks, -1, -1, writes=came, stream=stream, peer=move.source)
    yield Instruction(Op.REDUCE, chunks, -1, -1, came + own, own, came, parts=parts)


def _with_frees(row: Sequence[Instruction], kept: set[Value]) -> Iterable[Instruction]:
    last = {value: k for k, ins in enumerate(row) for value in ins.reads + ins.writes if value.kind == "chunk"}
    for k, ins in enumerate(row):
        done = tuple(value for value in last if last[value] == k and value not in kept)
        yield ins._replace(frees=ins.frees + done) if done else ins
