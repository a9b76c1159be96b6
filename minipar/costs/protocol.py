"""The costs that a simulation needs: how long an instruction takes, and how large a value is."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Protocol, runtime_checkable

from minipar.program import Instruction, Value


class Costs(Protocol):
    """What a simulation must know about devices and model: seconds (or another unit of time) and bytes."""

    def compute(self, rank: int, ins: Instruction) -> float:
        """How long a compute instruction takes."""

    def transfer(self, rank: int, ins: Instruction) -> tuple[float, float]:
        """How long a SEND or a copy occupies its link, and how much later it arrives."""

    def collective(self, ins: Instruction) -> float:
        """How long a collective takes after its last rank has joined."""

    def size(self, rank: int, value: Value) -> float:
        """How much memory a value takes on a rank."""


@runtime_checkable
class EvenCosts(Costs, Protocol):
    """Costs that know on which ranks everything costs the same. `simulate` then walks one of the ranks that do the same
    on other rows or shards."""

    def even(self, rank: int, other: int) -> bool:
        """Whether what two such ranks do costs the same: compute, messages, collectives, and the memory of values."""


@runtime_checkable
class SharingCosts(Costs, Protocol):
    """Costs that know what messages of different ranks share: the cable between two hosts."""

    @property
    def shares(self) -> bool:
        """Whether there is any such cable."""

    def cables(self, rank: int, ins: Instruction) -> tuple[Collection[Hashable], float]:
        """The directions of cables that a SEND or a collective goes through, and for how long it occupies each of them:
        no longer than it takes."""


def even(costs: Costs, rank: int, other: int) -> bool:
    """Whether these costs say that what two ranks do costs the same."""
    return isinstance(costs, EvenCosts) and costs.even(rank, other)
