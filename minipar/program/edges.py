r"""Models with branches: which layer reads the output of which. Imports nothing of minipar but errors.

        1 - 2             edges (0, 1) (0, 3) (1, 2) (2, 4) (3, 4)        layer 4 is given (output of 2, output of 3)
      /       \
    0           4         A layer has a higher number than every layer that it reads. Only layer 0 reads the rows, and
      \       /           only the last layer goes into the loss.
          3

A chain needs no edges: `()` means a chain everywhere. Edge l is the first edge out of layer l, as in a chain. The other
edges of all layers have higher numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

from minipar.errors import PlanError

Edges = tuple[tuple[int, int], ...]


def numbered(edges: Iterable[tuple[int, int]], layers: int) -> Edges:
    """The edges (from, to) of a model of so many layers, each once, in the order of their numbers; () for a chain.

    Errors: PlanError for layers that do not exist, edges that go backward or in a circle, an edge that is given twice,
    a layer (other than the first one) that reads nothing, and a layer (other than the last one) that no layer reads.
    """
    found = [_pair(edge, layers) for edge in edges]
    if len(set(found)) < len(found):
        a, b = next(edge for k, edge in enumerate(found) if edge in found[:k])
        raise PlanError(f"edge {a} -> {b}: given twice; a layer is given each output once")
    _check_order(found)
    reads, read = {b for _, b in found}, {a for a, _ in found}
    for layer in range(1, layers):
        if layer not in reads:
            raise PlanError(f"edges: layer {layer} reads nothing; possible is an edge to it (layer 0 reads the rows)")
    for layer in range(layers - 1):
        if layer not in read:
            raise PlanError(
                f"edges: nobody reads the output of layer {layer}; possible is an edge from it (the loss reads that of "
                f"layer {layers - 1})"
            )
    found.sort()
    first = [min(b for a, b in found if a == layer) for layer in range(layers - 1)]
    ordered = [*enumerate(first), *((a, b) for a, b in found if b != first[a])]
    return () if ordered == list(pairwise(range(layers))) else tuple(ordered)


def _pair(edge: object, layers: int) -> tuple[int, int]:
    try:
        a, b = cast(tuple[Any, Any], edge)
        pair = operator.index(a), operator.index(b)
    except (TypeError, ValueError):
        raise PlanError(f"edge {edge!r}: must be a pair of layer numbers (from, to)") from None
    for layer in pair:
        if not 0 <= layer < layers:
            raise PlanError(f"edge {pair[0]} -> {pair[1]}: no layer {layer}; possible are 0 to {layers - 1}")
    return pair


def _check_order(edges: Sequence[tuple[int, int]]) -> None:
    """Every edge goes to a later layer. The error for an edge that does not says whether another order of the layers
    would help."""
    back = next(((a, b) for a, b in edges if a >= b), None)
    if back is None:
        return
    a, b = back
    way = {b: [b]}  # from b to each layer that it reaches
    waiting = [b]
    while waiting:
        layer = waiting.pop(0)
        for source, target in edges:
            if source == layer and target not in way:
                way[target] = [*way[layer], target]
                waiting.append(target)
    if a in way:
        circle = " -> ".join(map(str, [a, *way[a]]))
        raise PlanError(f"edge {a} -> {b}: closes a circle, {circle}; possible are edges without one")
    raise PlanError(f"edge {a} -> {b}: goes backward; list the layers so that each stands behind those that it reads")


class Wiring(NamedTuple):
    """The edges of a model, by layer.

    inputs   for each layer, the layers whose outputs it reads, ascending
    into     for each layer, the edges from its inputs
    out      for each layer, the edges to the layers that read it; each of these edges has a grad_output
    chained  the layers that read only the layer before them, which no other layer reads: one instruction can run both
    """

    inputs: tuple[tuple[int, ...], ...]
    into: tuple[tuple[int, ...], ...]
    out: tuple[tuple[int, ...], ...]
    chained: frozenset[int]


def wiring(edges: Edges, layers: int) -> Wiring:
    """The `Wiring` of a model of so many layers."""
    into: list[list[int]] = [[] for _ in range(layers)]
    out: list[list[int]] = [[] for _ in range(layers)]
    pairs = edges or tuple(pairwise(range(layers)))
    for e, (a, b) in enumerate(pairs):
        into[b].append(e)
        out[a].append(e)
    for found in into:
        found.sort(key=lambda e: pairs[e])
    chained = frozenset(b for a, b in pairs if b == a + 1 and len(out[a]) == len(into[b]) == 1)
    inputs = tuple(tuple(pairs[e][0] for e in found) for found in into)
    return Wiring(inputs, tuple(map(tuple, into)), tuple(map(tuple, out)), chained)


def side_by_side(edges: Edges, layers: int) -> list[list[list[int]]]:
    """For each pair of neighbouring layers that every path goes through, the branches between them. A branch is a list
    of connected layers."""
    if not edges:
        return []
    trunk = [l for l in range(layers) if not any(a < l < b for a, b in edges)]
    found = []
    for start, end in pairwise(trunk):
        parts: list[set[int]] = [{l} for l in range(start + 1, end)]
        for a, b in edges:
            joined = [part for part in parts if a in part or b in part]
            if start < a and b < end and len(joined) > 1:
                parts = [part for part in parts if part not in joined] + [set().union(*joined)]
        if parts:
            found.append(sorted(map(sorted, parts)))
    return found
