"""What is recorded of a model's layers, one at a time, for a prediction: tapes of allocations. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from minipar.program import Value

# Bytes, and what they are: "saved" for the backward, "output", "input" (only its free), "grad_output" (its free),
# "grad_input", "gradient" of a parameter, "temporary". Of a slice of sequences also what it carries on, "carry", the
# gradient of that, "grad_carried" (its free), and the one that it makes itself, "grad_carry"; "carried": what it got.
Tape = tuple[tuple[int, str], ...]
GraphPiece = tuple[int, ...]


class LayerTape(NamedTuple):
    """One layer, for one number of rows.

    plain      its forward without a graph
    forward    with one, and (last layer) the loss
    backward   the first of a step, which makes the gradients
    later      one that adds to them
    input_half, weight_half, weight_later   the same backwards in halves; "left" is what the first one makes for the
               second, besides what was saved
    """

    plain: Tape
    forward: Tape = ()
    backward: Tape = ()
    later: Tape = ()
    input_half: Tape = ()
    weight_half: Tape = ()
    weight_later: Tape = ()


def frees(tape: Tape, what: str) -> bool:
    """Whether something of this kind is let go."""
    return any(delta < 0 and kind == what for delta, kind in tape)


def keeps(tape: Tape, what: str) -> bool:
    """Whether the graph holds a layer's input, output or carry: then its backward frees it, but not at once."""
    for k, (delta, kind) in enumerate(tape):
        if delta < 0 and kind == what:
            return any(before > 0 or other not in ("input", "output", "carry") for before, other in tape[:k])
    return False


class Workspace(NamedTuple):
    """Most bytes that an optimizer step needs for itself: per parameter group, for pairs of groups that may follow one
    another in one step, and for all of them together.
    """

    groups: tuple[int, ...]
    pairs: dict[tuple[int, int], int]
    together: int

    def of(self, groups: Sequence[int]) -> int:
        """Of a step over some groups.

        An optimizer that goes from parameter to parameter still names what it made for the one before, so that two
        neighbours tell everything; one that takes all of them at once needs the sum.
        """
        mine = [self.groups[g] for g in groups]
        whole, largest = sum(self.groups), max((*self.groups, *self.pairs.values()), default=0)
        if self.together > largest:
            return round(self.together * sum(mine) / whole) if whole else 0
        return max((*mine, *(self.pairs.get(pair, 0) for pair in pairwise(groups))), default=0)


@dataclass(frozen=True)
class Tapes:
    """Of a whole model: by rows (of slices as in a profile), then layer; bytes of each layer's buffers (no parameters,
    but held); the optimizer."""

    layers: dict[int, tuple[LayerTape, ...]]
    buffers: tuple[int, ...]
    workspace: Workspace
    flat_workspace: Workspace  # the same with the parameters of each group laid end to end, as ZeRO's are


class Sizes(Protocol):
    """What must be known of a program's values; `ProfiledCosts` does."""

    def rows(self, rank: int, microbatch: int) -> int: ...
    def size(self, rank: int, value: Value) -> int: ...


@dataclass(eq=False)
class Storage:
    """Something that is free when all its holders have let go of it."""

    size: int
    layer: int
    kind: str = "activations"
    holders: set[str] = field(default_factory=set)
