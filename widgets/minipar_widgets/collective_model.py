"""A collective's program, executed with numbers: what each rank holds when, what each link carries, the lower bounds.

The program, its times and its cost come from `minipar.program.collectives` and `simulate`; this module only adds
numbers. Chunk c of rank r begins as 10 (r + 1) + c, so that a sum shows which ranks' parts are in it.

Source of the bounds: Chan et al., "Collective communication: theory, practice, and experience", 2007, table 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from minipar.costs.alpha_beta import AlphaBeta
from minipar.errors import PlanError
from minipar.prediction.simulator import simulate
from minipar.program import Op, Program, Value, collectives, order
from minipar.program.collectives.moves import Setting, held
from minipar.trace import Trace
from minipar.wording import several

MOST_RANKS, MOST_CHUNKS = 16, 64
Cell = tuple[int, int]  # the value, and a mask: bit r is set if rank r's part is in it


@dataclass(frozen=True)
class Links:
    """Seconds: `alpha` of latency, `beta` per byte sent, `gamma` per byte added; `far`: alpha, beta between nodes."""

    alpha: float = 5e-6
    beta: float = 1e-9
    gamma: float = 0.0
    far: tuple[float, float] | None = None


@dataclass(frozen=True)
class Message:
    """Chunks on their way from one rank to another, with their numbers."""

    source: int
    target: int
    start: float
    end: float
    bytes: int
    chunks: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """From `time` on a rank holds `cell` as its chunk, or nothing (None)."""

    time: float
    rank: int
    chunk: int
    cell: Cell | None


@dataclass(frozen=True)
class Play:
    """One collective from beginning to end."""

    collective: str
    algorithm: str
    setting: Setting
    nbytes: int
    links: Links
    trace: Trace
    first: tuple[tuple[Cell | None, ...], ...]
    messages: tuple[Message, ...]
    changes: tuple[Change, ...]

    @property
    def program(self) -> Program:
        return self.trace.program

    @property
    def ranks(self) -> int:
        return self.setting.ranks

    @cached_property
    def last(self) -> tuple[tuple[Cell | None, ...], ...]:
        """What every rank holds at the end."""
        rows = [list(row) for row in self.first]
        for change in self.changes:
            rows[change.rank][change.chunk] = change.cell
        return tuple(tuple(row) for row in rows)

    @cached_property
    def by_link(self) -> dict[tuple[int, int], int]:
        """Bytes by (source, destination)."""
        found: dict[tuple[int, int], int] = {}
        for message in self.messages:
            key = message.source, message.target
            found[key] = found.get(key, 0) + message.bytes
        return found

    def sent(self, rank: int) -> int:
        return sum(size for (source, _), size in self.by_link.items() if source == rank)

    @property
    def time(self) -> float:
        return self.trace.time

    @property
    def closed_form(self) -> float | None:
        """Seconds by the algorithm's own formula, which assumes one kind of link. None if there is no formula."""
        one, setting = self.links, self.setting
        if collectives.registered(self.algorithm) is not None:
            return None
        return collectives.cost(
            self.collective, self.algorithm, self.ranks, self.nbytes, one.alpha, one.beta, one.gamma,
            root=setting.root, nodes=setting.nodes,
        )  # fmt: skip

    @property
    def least_bytes(self) -> float:
        """Lower bound, for every algorithm, of the bytes that the busiest rank sends."""
        share = (self.ranks - 1) / self.ranks
        factor = {"allreduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}.get(self.collective, share)
        return factor * self.nbytes if self.ranks > 1 else 0.0

    @property
    def least_time(self) -> float:
        """Lower bound, in seconds, for all algorithms with one port per rank: the largest of three bounds, those of
        latency, of bytes and of additions."""
        if self.ranks == 1:
            return 0.0
        adds = self.collective in ("allreduce", "reduce", "reduce_scatter")
        add = adds * (self.ranks - 1) / self.ranks * self.nbytes * self.links.gamma
        alpha, beta = min((self.links.alpha, self.links.beta), self.links.far or (math.inf, math.inf))
        return max(math.ceil(math.log2(self.ranks)) * alpha, self.least_bytes * beta, add)


def play(
    collective: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    *,
    root: int = 0,
    nodes: int = 1,
    links: Links | None = None,
) -> Play:
    """Execute a collective with numbers. PlanError if it is impossible, or too large to be shown."""
    links = links or Links()
    if ranks > MOST_RANKS:
        raise PlanError(f"ranks={ranks}: too many to look at; possible are 1 to {MOST_RANKS}")
    program = collectives.program(collective, algorithm, ranks, nbytes, root=root, nodes=nodes)
    if len(program.chunks) > MOST_CHUNKS:
        raise PlanError(
            f"{collective} by {algorithm} cuts {nbytes} bytes into "
            f"{several(len(program.chunks), 'chunk')}, too many to look at; "
            f"possible are {MOST_CHUNKS}: fewer ranks, or fewer bytes"
        )
    costs = AlphaBeta(program, links.alpha, links.beta, links.gamma, nodes=nodes, far=links.far)
    trace = simulate(program, costs)
    setting = Setting(ranks, root, nodes)
    first = tuple(
        tuple(
            (number(rank, chunk, ranks), 1 << rank) if chunk in mine else None for chunk in range(len(program.chunks))
        )
        for rank in range(ranks)
        for mine in [held(collective, setting, rank, len(program.chunks), False)]
    )
    messages, changes = _walk(trace, first)
    return Play(collective, algorithm, setting, nbytes, links, trace, first, messages, changes)


def number(rank: int, chunk: int, ranks: int) -> int:
    """The first value of a rank's chunk."""
    return 10 * (rank + 1) + chunk % ranks


def _walk(trace: Trace, first: tuple[tuple[Cell | None, ...], ...]) -> tuple[tuple[Message, ...], tuple[Change, ...]]:
    """Execute the program in its order, with numbers: the messages, and the changes of what the ranks hold."""
    program = trace.program
    rows = [list(row) for row in first]
    came: list[dict[Value, Cell]] = [{} for _ in program.ranks]
    sent: dict[tuple[int, int], dict[int, Cell]] = {}
    messages: list[Message] = []
    changes: list[Change] = []

    def change(time: float, rank: int, chunk: int, cell: Cell | None) -> None:
        rows[rank][chunk] = cell
        changes.append(Change(time, rank, chunk, cell))

    for rank, k, ins, waited, _ in order(program):
        for value, writer, source in waited:
            if value.kind == "chunk":
                change(trace.ends[rank][writer], rank, value.index, sent[source][value.index])
            else:
                came[rank][value] = sent[source][value.index]
        for writer, (there, place) in {wait.writer: wait.source for wait in waited}.items():
            given, start, end = program.ranks[there][place], trace.starts[there][place], trace.ends[rank][writer]
            size = sum(program.chunks[c] for c in given.layers)
            values = tuple(number for number, _ in sent[there, place].values())
            messages.append(Message(there, rank, start, end, size, given.layers, values))
        if ins is None:
            continue
        if ins.op is Op.SEND:
            sent[rank, k] = {c: cell for c in ins.layers if (cell := rows[rank][c]) is not None}
        for value in ins.reads:
            if value.kind == "incoming":
                own, new = rows[rank][value.index], came[rank].pop(value)
                assert own is not None
                change(trace.ends[rank][k], rank, value.index, (own[0] + new[0], own[1] | new[1]))
        for value in ins.frees:
            if value.kind == "chunk":
                change(trace.ends[rank][k], rank, value.index, None)
    changes.sort(key=lambda change: change.time)  # (stable: changes of one moment keep their order)
    return tuple(sorted(messages, key=lambda m: (m.start, m.source))), tuple(changes)
