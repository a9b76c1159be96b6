"""Where the stages of a pipeline are: which rank holds which layers.

A rank holds one stage or several; they are its *chunks*. `placement(rank, ranks, chunks)` gives the stage of each
chunk.

    looped, 2 chunks      rank 0  stages 0 3     a micro-batch goes through the ranks twice: 0 1 2 0 1 2
                          rank 1  stages 1 4
                          rank 2  stages 2 5
    wave, 2 chunks        rank 0  stages 0 5     down the ranks and up again, a V: 0 1 2 2 1 0; no message from stage 2
                          rank 1  stages 1 4     to 3, which are on the same rank
                          rank 2  stages 2 3

    both ways             rank 0  stages 0 3     two copies of every stage: half of the micro-batches go down 0 1 2 3,
                          rank 1  stages 1 2     the others up
                          rank 2  stages 2 1
                          rank 3  stages 3 0

A stage may be on several ranks. Then it has copies, whose gradients are summed. The schedule says through which copy a
micro-batch goes: it yields Forward(i, chunk) on one of these ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from minipar.errors import PlanError
from minipar.program.mesh import Mesh
from minipar.program.shape import Shape
from minipar.wording import several

Placement = Callable[[int, int, int], Sequence[int]]  # rank, ranks, chunks -> the stage of each chunk


def looped(rank: int, ranks: int, chunks: int) -> Sequence[int]:
    """Stage s is on rank s mod p. With one chunk, stage s is on rank s."""
    return [c * ranks + rank for c in range(chunks)]


def wave(rank: int, ranks: int, chunks: int) -> Sequence[int]:
    """Stages go down the ranks and up again. Where the direction changes, two neighbouring stages are on the same
    rank."""
    return [c * ranks + (ranks - 1 - rank if c % 2 else rank) for c in range(chunks)]


def both_ways(rank: int, ranks: int, chunks: int) -> Sequence[int]:
    """Two copies of every stage: one pipeline goes down the ranks, another one up."""
    return rank, ranks - 1 - rank


def place(placement: Placement, ranks: int, chunks: int, name: str = "") -> tuple[tuple[int, ...], ...]:
    """The stages of every rank, by chunk. Errors: PlanError if a stage from 0 on is on no rank."""
    found = tuple(tuple(placement(rank, ranks, chunks)) for rank in range(ranks))
    stages = {stage for mine in found for stage in mine}
    for rank, mine in enumerate(found):
        if len(mine) != chunks:
            raise PlanError(
                f"schedule={name}: its placement gives rank {rank} {several(len(mine), 'stage')}, not chunks={chunks}"
            )
    if stages != set(range(len(stages))):
        missing = min(set(range(max(stages, default=0) + 1)) - stages, default=0)
        raise PlanError(f"schedule={name}: its placement puts stage {missing} on no rank; stages count from 0")
    return found


def check_stages(placement: Sequence[Sequence[int]], layers: int) -> int:
    """The number of stages. Errors: PlanError for more of them than a model has layers."""
    pp, stages = len(placement), 1 + max(map(max, placement))
    if pp > layers:
        raise PlanError(f"pp={pp}: more stages than layers ({layers}); possible are 1 to {layers}")
    if stages > layers:
        raise PlanError(
            f"pp={pp} chunks={len(placement[0])}: {stages} stages, more than layers ({layers}); "
            f"possible are chunks=1 to {layers // pp} where the schedule takes them, or fewer ranks"
        )
    return stages


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers in each stage as can be; the first ones may have one more."""
    even, more = divmod(layers, stages)
    return tuple(even + (s < more) for s in range(stages))


def check_split(split: Sequence[int], layers: int) -> None:
    """Errors: PlanError for stages that do not have the model's layers together."""
    if sum(split) != layers:
        words, even = (",".join(map(str, one)) for one in (split, even_split(layers, len(split))))
        raise PlanError(
            f"split={words}: sums to {sum(split)}, but the model has {layers} layers; possible is split={even}"
        )


@dataclass(frozen=True)
class Layout:
    """Which rank holds which layers: `dp` replicas of a pipeline of `pp` ranks; `split[s]` layers in stage s.

    placement   for each rank of a pipeline, its stages, by chunk; default: stage r on rank r
    host        the layers that their rank computes on the host, and not on its device

    shared      the axes of the mesh whose ranks share layers, with their sizes; layers are then nodes (`Shape.forms`)

    In the methods, `rank` counts within one pipeline. The ranks that they give are ranks of the program (`Mesh`); of
    ranks that share layers they give the first one.
    """

    shape: Shape
    dp: int
    pp: int
    split: tuple[int, ...]
    microbatches: int
    placement: tuple[tuple[int, ...], ...] = field(default=())
    host: frozenset[int] = frozenset()
    shared: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", tuple((rank,) for rank in range(self.pp)))

    def rank(self, replica: int, rank: int) -> int:
        """The rank of the program for a rank of one replica's pipeline."""
        return self.mesh.rank(dp=replica, pp=rank)

    @cached_property
    def mesh(self) -> Mesh:
        """The grid of all ranks that hold layers."""
        return Mesh((("dp", self.dp), ("pp", self.pp), *self.shared))

    def sharers(self, rank: int, axes: Sequence[str] | None = None) -> tuple[int, ...]:
        """The ranks of the program that share the layers of a rank of the first replica's pipeline; those along some
        axes alone."""
        return self.mesh.group(self.rank(0, rank), *(self.mesh.sharing if axes is None else axes))

    @property
    def width(self) -> int:
        """How many ranks share each layer."""
        return math.prod(size for _, size in self.shared)

    def layers(self, stage: int) -> range:
        """The layers of a stage."""
        start = sum(self.split[:stage])
        return range(start, start + self.split[stage])

    def trained(self, stage: int) -> range:
        """The layers of a stage that have a backward."""
        layers = self.layers(stage)
        return range(min(max(layers.start, self.first_trainable), layers.stop), layers.stop)

    def chunks(self, rank: int) -> list[range]:
        """The layers of a rank, by chunk."""
        return [self.layers(stage) for stage in self.placement[rank]]

    @cached_property
    def first_trainable(self) -> int:
        """The first layer with a trainable parameter. Layers before it need no backward."""
        return min((min(g.layers) for g in self.shape.groups if g.trainable), default=self.shape.layers)

    @cached_property
    def _groups(self) -> list[list[int]]:
        ranks_of: list[set[int]] = [set() for _ in range(self.shape.layers)]
        for rank in range(self.pp):
            for layers in self.chunks(rank):
                for layer in layers:
                    ranks_of[layer].add(rank)
        found: list[list[int]] = [[] for _ in range(self.pp)]
        for k, group in enumerate(self.shape.groups):
            for rank in sorted(set().union(*(ranks_of[layer] for layer in group.layers))):
                found[rank].append(k)
        return found

    def groups(self, rank: int) -> tuple[int, ...]:
        """Indices of the parameter groups with a layer on this rank."""
        return tuple(self._groups[rank])

    def trainable(self, rank: int) -> tuple[int, ...]:
        return tuple(k for k in self._groups[rank] if self.shape.groups[k].trainable)

    def on_host(self, group: int) -> bool:
        """Whether all layers of a group are computed on the host, so that its parameters stay there."""
        return self.host.issuperset(self.shape.groups[group].layers)

    def holders(self, group: int) -> tuple[int, ...]:
        """All ranks of the program that hold the parameters of this group; its gradients are summed over them."""
        ranks = [r for r in range(self.pp) if group in self._groups[r]]
        return tuple(sorted(self.rank(replica, r) for replica in range(self.dp) for r in ranks))

    def stage_of(self, group: int) -> int:
        """The stage that completes a micro-batch's gradient of a group: the stage of the group's first layer."""
        first = min(self.shape.groups[group].layers)
        return next(stage for stage in range(len(self.split)) if first in self.layers(stage))

    def copied(self, group: int) -> bool:
        """Whether several ranks of a pipeline hold this group, each of them with all of its layers."""
        layers = set(self.shape.groups[group].layers)
        held = [set().union(*self.chunks(r)) for r in range(self.pp) if group in self._groups[r]]
        return len(held) > 1 and all(layers <= mine for mine in held)
