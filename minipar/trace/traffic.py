"""Counts the bytes that a program sends: for each link, and for each kind of value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minipar.program import COLLECTIVES, Instruction, Op, collectives, home
from minipar.trace.lifetimes import KINDS

if TYPE_CHECKING:
    from minipar.trace import Trace

Target = int | tuple[int, ...]  # a rank, or the group of a collective whose way the backend chooses
_NAMES = {
    Op.ALL_REDUCE: "allreduce",
    Op.REDUCE_SCATTER: "reduce_scatter",
    Op.ALL_GATHER: "all_gather",
    Op.ALL_TO_ALL: "all_to_all",
    Op.NORM: "allreduce",
}


def by_link(trace: Trace, algorithm: str = "backend") -> dict[tuple[int, Target], int]:
    """Bytes sent for each (source, target). See `Trace.bytes_by_link`."""
    links: dict[tuple[int, Target], int] = {}
    for rank, row in enumerate(trace.program.ranks):
        for ins in row:
            if ins.op is Op.SEND:
                found: dict[Target, int] = {ins.peer: trace.sent(rank, ins)}
            elif ins.op not in COLLECTIVES:
                continue
            elif algorithm == "backend":
                found = {ins.group: trace.sent(rank, ins)}
            else:
                found = _by_algorithm(trace, rank, ins, algorithm)
            for target, size in found.items():
                if size:
                    links[rank, target] = links.get((rank, target), 0) + size
    return links


def _by_algorithm(trace: Trace, rank: int, ins: Instruction, algorithm: str) -> dict[Target, int]:
    """Bytes that a rank sends to each other rank in a collective by an algorithm."""
    program = collectives.program(_NAMES[ins.op], algorithm, len(ins.group), trace.whole(rank, ins))
    sent: dict[Target, int] = {}
    for move in program.ranks[ins.group.index(rank)]:
        if move.op is Op.SEND:
            target = ins.group[move.peer]
            sent[target] = sent.get(target, 0) + sum(program.chunks[c] for c in move.layers)
    return sent


def by_kind(trace: Trace) -> dict[str, int]:
    """Bytes sent by all ranks for each kind of value. See `Trace.bytes_by_kind`."""
    kinds: dict[str, int] = {}
    for rank, row in enumerate(trace.program.ranks):
        for ins in row:
            size = trace.sent(rank, ins)
            if size:
                value = ins.writes[0] if ins.op is Op.NORM else ins.reads[0]
                kind = KINDS[home(value).kind]
                kinds[kind] = kinds.get(kind, 0) + size
    return dict(sorted(kinds.items()))


def in_words(links: dict[tuple[int, Target], int]) -> dict[str, int]:
    """The result of `by_link` with text as keys: `0 -> 1`, or `0 -> 0,1,2,3` for what rank 0 sends in that group."""

    def text(target: Target) -> str:
        return str(target) if isinstance(target, int) else ",".join(map(str, target))

    return {f"{source} -> {text(target)}": size for (source, target), size in links.items()}
