"""Fusion: consecutive layers with no other instruction between them run as one instruction, which lists its parts.

    F 2 mb0 | F 3 mb0 | F 4 mb0         becomes   F 2:5 mb0   parts F2 F3 F4
    B 4 mb0 | AR 4 | B 3 mb0 | B 2 mb0  becomes   B 4 mb0 | AR 4 | B 2:4 mb0   parts B3 B2

A value that is written and freed inside the run (such as the gradient between two layers) does not appear in the lists
of the fused instruction, because it does not outlive it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from minipar.program import BACKWARDS, Instruction, Op, Part, version_of
from minipar.program.edges import wiring
from minipar.strategies.draft import Draft

FUSIBLE = frozenset((Op.FORWARD, Op.RECOMPUTE, *BACKWARDS))


def fuse_layers(draft: Draft) -> Draft:
    """Consecutive layers with nothing between them become one instruction, which lists its parts."""
    shape = draft.layout.shape
    chained = wiring(shape.edges, shape.layers).chained if shape.edges else None
    return draft.each(lambda rank, row: fuse(row, chained))


def fuse(instructions: Iterable[Instruction], chained: frozenset[int] | None = None) -> list[Instruction]:
    """One rank's instructions with runs of neighbouring layers merged.

    chained  for a model with branches: the layers that read only the layer before them (`Wiring.chained` in `edges.py`)
    """
    row = list(instructions)
    joined = {
        k
        for k, (a, b) in enumerate(pairwise(row), 1)
        if a.op is b.op and _continues(a, b) and (chained is None or max(a.layers[0], b.layers[0]) in chained)
    }
    if not joined:
        return row
    result: list[Instruction] = []
    first = 0
    for k in range(1, len(row) + 1):
        if k not in joined:
            result.append(_merge(row[first:k]) if k - first > 1 else row[first])
            first = k
    return result


def _continues(a: Instruction, b: Instruction) -> bool:
    if a.op not in FUSIBLE or a.microbatch != b.microbatch or a.step != b.step or a.stream != b.stream:
        return False
    return b.layers[-1] == a.layers[0] - 1 if a.op in BACKWARDS else b.layers[0] == a.layers[-1] + 1


def _merge(run: list[Instruction]) -> Instruction:
    written = {value for ins in run for value in ins.writes}
    freed = {value for ins in run for value in ins.frees}
    inner = written & freed
    reads = dict.fromkeys(value for ins in run for value in ins.reads if value not in written)
    writes = dict.fromkeys(value for ins in run for value in ins.writes if value not in inner)
    frees = dict.fromkeys(value for ins in run for value in ins.frees if value not in inner)
    if versions := sorted(value for value in frees if version_of(value) >= 0):
        frees = dict.fromkeys([*(value for value in frees if version_of(value) < 0), *versions])
    layers = tuple(sorted(layer for ins in run for layer in ins.layers))
    parts = tuple(Part(ins.op, layer) for ins in run for layer in ins.layers)
    return run[0]._replace(layers=layers, reads=tuple(reads), writes=tuple(writes), frees=tuple(frees), parts=parts)
