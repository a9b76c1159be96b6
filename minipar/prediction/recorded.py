"""Tapes of allocations, which are recorded for each layer of a model alone, for predictions of memory. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol

from minipar.program import Value

# Each entry has bytes (negative: freed) and what they are: "saved" for the backward, "output", "input" (only its free),
# "grad_output" (only its free), "grad_input", "gradient" of a parameter, "temporary". For a slice of sequences there
# are also its carry, "carry"; the gradient of that, "grad_carried" (only its free); the carry that it got, "carried";
# and the gradient of that one, which it makes, "grad_carry".
Tape = tuple[tuple[int, str], ...]
GraphPiece = tuple[int, ...]


class Lie(NamedTuple):
    """Where a tensor of a layer's output lies: in the storage of a tensor that the layer was given, by its number, or
    in one that the layer has made (-1, -2, ...), of so many bytes. `kept`: whether the graph holds that storage."""

    storage: int
    bytes: int
    kept: bool = False


class Back(NamedTuple):
    """Where the gradients of a layer's input lie: as `Lie`, where what the layer was given are the gradients of its
    output. `given`: how many these are; `freed`: their numbers, in the order in which the backward lets them go."""

    lies: tuple[Lie, ...]
    given: int
    freed: tuple[int, ...]


class LayerTape(NamedTuple):
    """The tapes of one layer, for one number of rows.

    plain      its forward without a graph
    forward    its forward with a graph; in the last layer also the loss
    backward   the first backward of a step, which makes the gradients
    later      a later backward, which adds to the gradients
    input_half, weight_half, weight_later   the same backwards in halves; "left" is what the input half makes for the
               weight half, in addition to what was saved
    lies       of each tensor of its output, where it lies; (): the output is one storage, which nobody gave it
    back       the same of the gradients of its input; None: it is one storage
    """

    plain: Tape
    forward: Tape = ()
    backward: Tape = ()
    later: Tape = ()
    input_half: Tape = ()
    weight_half: Tape = ()
    weight_later: Tape = ()
    lies: tuple[Lie, ...] = ()
    back: Back | None = None


def frees(tape: Tape, what: str) -> bool:
    """Whether something of this kind is freed on the tape."""
    return any(delta < 0 and kind == what for delta, kind in tape)


def keeps(tape: Tape, what: str) -> bool:
    """Whether the graph holds a layer's input, output or carry, or one of its tensors. Then its backward frees it, but
    not as the first thing."""
    begun = False
    for delta, kind in tape:
        begun = begun or delta > 0 or kind not in ("input", "output", "carry")
        if begun and delta < 0 and kind == what:
            return True
    return False


class Workspace(NamedTuple):
    """The largest temporary memory of an optimizer step, in bytes.

    groups      for each parameter group alone
    pairs       for pairs of groups that may follow each other in one step
    all_groups  for all groups in one step
    """

    groups: tuple[int, ...]
    pairs: dict[tuple[int, int], int]
    all_groups: int

    @property
    def together(self) -> bool:
        """Whether the optimizer takes all parameters together."""
        return self.all_groups > max((*self.groups, *self.pairs.values()), default=0)

    @property
    def left(self) -> float:
        """If it goes from one to the next, which part of a parameter's memory it still holds at the next one."""
        longer = [(g, h) for (g, h), both in self.pairs.items() if both > max(self.groups[g], self.groups[h])]
        return max(((self.pairs[g, h] - self.groups[h]) / self.groups[g] for g, h in longer), default=0.0)

    def of(self, groups: Sequence[int]) -> int:
        """Bytes for a step over some groups.

        An optimizer that goes from parameter to parameter still holds what it made for the parameter before, so pairs
        of neighbours are enough. An optimizer that takes all parameters together needs the sum.
        """
        mine, whole = [self.groups[g] for g in groups], sum(self.groups)
        if self.together:
            return round(self.all_groups * sum(mine) / whole) if whole else 0
        neighbours = pairwise(g for g in groups if self.groups[g])
        return max((*mine, *(self.pairs.get(pair, 0) for pair in neighbours)), default=0)


@dataclass(frozen=True)
class Tapes:
    """The tapes of a whole model.

    layers           number of rows (for slices the key of a profile) -> the tapes of each layer
    buffers          bytes of each layer's buffers, which are no parameters but are held all the time
    workspace        memory of an optimizer step
    flat_workspace   the same if the parameters of each group are concatenated, as with ZeRO
    """

    layers: dict[int, tuple[LayerTape, ...]]
    buffers: tuple[int, ...]
    workspace: Workspace
    flat_workspace: Workspace


class Sizes(Protocol):
    """What a prediction of memory must know about a program's values; `ProgramCosts` has it."""

    def rows(self, rank: int, microbatch: int) -> int: ...
    def size(self, rank: int, value: Value) -> int: ...


@dataclass(eq=False)
class Storage:
    """A piece of memory that is freed when it has no holder any more."""

    size: int
    layer: int
    kind: str = "activations"
    holders: set[str] = field(default_factory=set)
