"""Ranks that repeat one pipeline: replicas run it on other rows, ranks that share layers on other shards.

    rows of one pipeline           rank 0   F 0 | SEND output(0) -> 1 | ... | ALL_REDUCE 0 over 0,2 | STEP 0
                                   rank 1   RECV output(0) <- 0 | F 1 | ... | ALL_REDUCE 1 over 1,3 | STEP 1
    repeated on a mesh of dp=2     rank 2   F 0 | SEND output(0) -> 3 | ... | ALL_REDUCE 0 over 0,2 | STEP 0
                                   rank 3   RECV output(0) <- 2 | F 1 | ... | ALL_REDUCE 1 over 1,3 | STEP 1

A program of 1,024 ranks has perhaps 8 different rows. `Repeated` keeps these, and makes the row of a rank when somebody
asks for it: the same instructions with other peers and groups. So to a reader it is a sequence of all rows.

A reader of whole programs may visit only the first rank of each stage, which stands for the others. This is sound
because every group is whole: if it has ranks of several replicas, it has the same ranks of all replicas, and if it has
ranks of several shards, it has those of all shards. (Replicas that train alone have groups inside of a replica.) So
whatever the first ranks can do, all ranks can do at the same moment, each with its own replica and shard in the place
of theirs; and a collective is joined by all of its ranks when the first ones have joined it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, overload

from minipar.program.instructions import Instruction, Op
from minipar.program.mesh import Mesh

Row = tuple[Instruction, ...]


class Repeated(Sequence[Row]):
    """The rows of all ranks of a mesh, which repeat those of one pipeline.

    rows   for each coordinate on the axis pp. Peers are such coordinates. Groups are those of the first replica: sums
           of gradients name the ranks of all replicas, or of the first one alone, and the first of ranks that share
           layers. Every group is whole, as minipar's own passes make them
    known  the rows that were asked for
    """

    def __init__(self, rows: Iterable[Iterable[Instruction]], mesh: Mesh) -> None:
        self.rows, self.mesh = tuple(map(tuple, rows)), mesh
        self.known: dict[int, Row] = {}

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """For each rank the first one of its stage."""
        return tuple(self.mesh.rank(pp=self.mesh.coordinates(rank)["pp"]) for rank in range(self.mesh.size))

    def __len__(self) -> int:
        return self.mesh.size

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...

    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(len(self))[index])
        rank = range(len(self))[index]
        if rank not in self.known:
            self.known[rank] = self._row(rank)
        return self.known[rank]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Repeated) and (self.rows, self.mesh) == (other.rows, other.mesh):
            return True
        return tuple(self) == tuple(other) if isinstance(other, (Repeated, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))  # (it equals this tuple)

    def __reduce__(self) -> tuple[Any, ...]:
        return Repeated, (self.rows, self.mesh)  # (`known` is not sent to other processes)

    def _row(self, rank: int) -> Row:
        """The row of a rank: peers are ranks of its own replica and shard.

        Sums of gradients name the ranks of all replicas already.
        """
        place, width = self.mesh.coordinates(rank), self._width
        row, first = self.rows[place["pp"]], self.mesh.rank(dp=place["dp"])
        shard = rank - self.mesh.rank(dp=place["dp"], pp=place["pp"])
        if width == 1 and first == 0:
            return row

        def moved(ins: Instruction) -> Instruction:
            if 0 <= ins.peer < len(self.rows):
                peer = first + ins.peer * width + shard
                return ins._replace(peer=peer, stream=f"{ins.stream.split()[0]} {peer}")
            if not ins.group:
                return ins
            # Sums over replicas are of equal shards, and a NORM is of all of them; what ranks of one replica do
            # together stays inside of it.
            further = 0 if ins.op is Op.NORM else shard
            if _inside(ins):  # along the axes on which the group's ranks differ, the rank's place is one of theirs
                further = self.mesh.rank(**{axis: place[axis] for axis in self._across(ins.group)})
            further += first if self._within(ins.group) else 0
            if not further:
                return ins
            group = tuple(member + further for member in ins.group)
            return ins._replace(group=group, stream=f"{ins.stream.split()[0]} {','.join(map(str, group))}")

        return tuple(map(moved, row))

    @cached_property
    def _width(self) -> int:
        """How many ranks share each layer."""
        return math.prod(self.mesh.length(axis) for axis in self.mesh.sharing)

    def _along(self, group: tuple[int, ...]) -> tuple[str, ...]:
        """Of the axes along which ranks share layers, those on which the ranks of a group differ."""
        places = [self.mesh.coordinates(rank) for rank in group]
        return tuple(axis for axis in self.mesh.sharing if len({place[axis] for place in places}) > 1)

    def _across(self, group: tuple[int, ...]) -> tuple[str, ...]:
        """The others of these axes."""
        along = self._along(group)
        return tuple(axis for axis in self.mesh.sharing if axis not in along)

    def _within(self, group: tuple[int, ...]) -> bool:
        """Whether a group has ranks of the first replica alone, where there are several."""
        return self.mesh.length("dp") > 1 and max(group) < self.mesh.size // self.mesh.length("dp")


def _inside(ins: Instruction) -> bool:
    """Whether a collective is one of the ranks that share a layer."""
    return ins.stream.split(" ")[0] == "tp"
