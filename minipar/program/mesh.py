"""Mesh: the ranks of a run as a grid with named axes. Imports nothing of minipar but errors.

    Mesh(dp=2, pp=3)        pp 0  1  2
                     dp 0    | 0  1  2         rank 4: coordinates dp=1 pp=1
                     dp 1    | 3  4  5                 group along "pp": ranks 3 4 5; along "dp": ranks 1 4

The last axis counts fastest, so the ranks of one pipeline are neighbours. Plans have their axes in the order of `AXES`:
where ranks are numbered host by host, those that share layers and exchange most are on one host first (tp, then cp,
then ep), then those of a pipeline (pp), and replicas (dp) are what goes between hosts. No other code in minipar
computes a rank from coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from minipar.errors import PlanError

SHARING = ("ep", "cp", "tp")  # axes whose ranks share layers: experts, the tokens of a sequence, operators
AXES = ("dp", "pp", *SHARING)  # the axes that plans have


class Mesh(tuple[tuple[str, int], ...]):
    """Named axes and their sizes, the slowest first: Mesh(dp=2, pp=3), or Mesh([("dp", 2), ("pp", 3)]).

    It is a tuple of pairs (name, size), and equals such a tuple.
    """

    __slots__ = ()

    def __new__(cls, axes: Mapping[str, int] | Iterable[tuple[str, int]] = (), /, **sizes: int) -> Mesh:
        given = axes.items() if isinstance(axes, Mapping) else axes
        return super().__new__(cls, (*((str(name), size) for name, size in given), *sizes.items()))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self)

    def length(self, axis: str) -> int:
        """The size of an axis; 1 if the mesh does not have it."""
        return dict(self).get(axis, 1)

    @property
    def sharing(self) -> tuple[str, ...]:
        """The axes of this mesh whose ranks share layers."""
        return tuple(name for name, size in self if name in SHARING and size > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's coordinate on each axis. Errors: PlanError for a rank that the mesh does not have."""
        if not 0 <= rank < self.size:
            raise PlanError(f"rank={rank}: must be from 0 to {self.size - 1}")
        found = {}
        for name, size in reversed(self):
            rank, found[name] = divmod(rank, size)
        return dict(reversed(found.items()))

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; an axis that is not named counts as 0.

        Errors: PlanError for an unknown axis, or a coordinate that is not on it.
        """
        found = 0
        for name, size in self:
            place = coordinates.pop(name, 0)
            if not 0 <= place < size:
                raise PlanError(f"{name}={place}: must be from 0 to {size - 1}")
            found = found * size + place
        if coordinates:
            raise PlanError(f"{next(iter(coordinates))}: no axis of the mesh; possible are {self._names}")
        return found

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks whose coordinates differ from this rank's only on these axes, ascending, including this rank.

        Errors: PlanError for an unknown axis or rank.
        """
        for axis in axes:
            if axis not in dict(self):
                raise PlanError(f"{axis}: no axis of the mesh; possible are {self._names}")
        own = self.coordinates(rank)
        places = product(*(range(size) if name in axes else (own[name],) for name, size in self))
        names = [name for name, _ in self]
        return tuple(self.rank(**dict(zip(names, place, strict=True))) for place in places)

    def spanning(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """The axes along which ranks of several hosts work together. `hosts`: the name of each rank's host; ranks
        beyond the mesh, such as servers, do not count. Errors: PlanError if a rank has no host."""
        if len(hosts) < self.size:
            raise PlanError(f"{len(hosts)} hosts of ranks: the mesh has {self.size} ranks")
        many = (name for name, size in self if size > 1)
        return tuple(
            name for name in many if any(hosts[rank] != hosts[self.group(rank, name)[0]] for rank in range(self.size))
        )

    @property
    def _names(self) -> str:
        return ", ".join(name for name, _ in self)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self)})"
