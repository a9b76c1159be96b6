"""What a rank's bars are shaded by: the chunks of its layers, or the directions of a bidirectional pipeline.

    interleaved, 2 chunks    rank 0 has layers 0 and 4: chunks 0 and 1        a micro-batch passes all ranks twice
    ZB-V                     rank 3 has layers 3 and 4: it turns between chunk 0 and chunk 1
    Chimera, DualPipe        rank 0 has layers 0 and 3: micro-batches go down from rank 0, or up from rank 3

Both follow from the program: in which order a micro-batch comes to the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby

from minipar.program import BACKWARDS, Instruction, Op, Program

SHADED = (Op.FORWARD, *BACKWARDS, Op.RECOMPUTE)
MOST = 4  # shades that differ; the chunks after these repeat the last two


class Shades:
    """The shade of every instruction of a program: 0, unless ranks have several chunks or there are two directions.

    names   of the shades, for a legend: `chunk 0`, `chunk 1`, ... or `down`, `up`; empty if all is of one shade
    of      the shade of an instruction of a rank
    """

    def __init__(self, program: Program) -> None:
        self.names: tuple[str, ...] = ()
        self.of: Callable[[int, Instruction], int] = lambda rank, ins: 0
        if program.edges or program.chunks or not program.layers:
            return
        entries = _entries(program) if program.share != program.placement else {}
        if len(set(entries.values())) > 1:
            starts = sorted(set(entries.values()))
            directions = {key: starts.index(start) for key, start in entries.items()}
            self.names = ("down", "up") if len(starts) == 2 else tuple(f"pipeline {k}" for k in range(len(starts)))
            self.of = lambda rank, ins: (
                repeated(directions.get((program.replica(rank), ins.microbatch), 0)) if ins.op in SHADED else 0
            )
            return
        chunks = _chunks(program)
        if max(chunks, default=0):
            self.names = tuple(f"chunk {k}" for k in range(max(chunks) + 1))
            self.of = lambda rank, ins: repeated(chunks[ins.layers[0]]) if ins.op in SHADED and ins.layers else 0


def repeated(shade: int) -> int:
    """A chunk's number as one of the shades that differ."""
    return shade if shade < MOST else MOST - 2 + shade % 2


def _entries(program: Program) -> dict[tuple[int, int], int]:
    """For each replica and micro-batch, the place in its replica of the first rank that runs layer 0 on it."""
    found: dict[tuple[int, int], int] = {}
    first: dict[int, int] = {}
    for rank in range(program.workers):
        replica = program.replica(rank)
        first.setdefault(replica, rank)
        if 0 in program.placement[rank]:
            for op, ins in zip(program.ops[rank], program.ranks[rank], strict=True):
                if op is Op.FORWARD and ins.layers and ins.layers[0] == 0:
                    found.setdefault((replica, ins.microbatch), rank - first[replica])
    return found


def _chunks(program: Program) -> list[int]:
    """For each layer, in which chunk of its rank it is: how often a micro-batch was on that rank before.

    At the end of a V the last rank runs two chunks one after the other. They are told apart by its backwards."""
    holders: list[tuple[int, ...]] = [()] * program.layers
    for rank, held in enumerate(program.placement):
        for layer in held:
            holders[layer] += (rank,)
    path = [(ranks, list(run)) for ranks, run in groupby(range(program.layers), holders.__getitem__)]
    visits = Counter(ranks for ranks, _ in path)
    if len(path) == len(visits):
        return [0] * program.layers
    pieces: list[tuple[tuple[int, ...], list[int]]] = []
    for k, (ranks, layers) in enumerate(path):
        turns = 0 < k < len(path) - 1 and path[k - 1][0] == path[k + 1][0] and len(set(visits.values())) > 1
        begun = (
            {ins.layers[0] for ins in program.ranks[ranks[0]] if ins.op in SHADED and ins.layers} if turns else set()
        )
        middle = min(
            begun & set(layers[1:]), key=lambda layer: abs(layer - layers[len(layers) // 2]), default=layers[0]
        )
        cut = layers.index(middle)
        pieces += [(ranks, part) for part in (layers[:cut], layers[cut:]) if part]
    seen: dict[tuple[int, ...], int] = {}
    found = [0] * program.layers
    for ranks, part in pieces:
        for layer in part:
            found[layer] = seen.get(ranks, 0)
        seen[ranks] = seen.get(ranks, 0) + 1
    return found
