r"""Branch placement: layers that do not depend on each other run on different ranks at the same time.

             1x1                 place=0,0,1,1,0     rank 0   F stem | F 1x1 |                    F join | ...
           /     \                                   rank 1            F 3x3 | F 5x5 | send both |
      stem - 3x3 - join
           \     /               place=branches      rank 0 has the layers that every path goes through. Between
             5x5                                     two of them, branch k is on rank k mod pp

Every rank walks its layers in their order, micro-batch by micro-batch, so no placement can deadlock. All ranks must
take the micro-batches in the same order. The order of gpipe is one such order, and that of 1f1b on a pipeline of one
rank is another. With schedule=looped-bfs all micro-batches go through one run of neighbouring layers before the next
run: then a rank that has finished its branch of one micro-batch continues with the next micro-batch.

A model with branches can be trained without `place`. Stages of neighbouring layers (`split`) work with any schedule
that flushes, and branches in different stages run at the same time there, too.

`passes/layers.py` says what layers with branches read, write and free.

Sources: Dean et al., "Large Scale Distributed Deep Networks", 2012 (model parallelism); Szegedy et al., "Going Deeper
with Convolutions", 2015 (Inception); Mirhoseini et al., 2017, who learn such placements (see `minipar.planner`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from minipar.errors import PlanError
from minipar.program import Action, Forward
from minipar.program import edges as graphs
from minipar.strategies import keys, segments
from minipar.wording import several

if TYPE_CHECKING:
    from minipar.program.shape import Shape
    from minipar.strategies.plan import Plan


def parse(value: object, ranks: int) -> str | tuple[int, ...] | None:
    """The rank of each layer, or "branches"; None: stages of neighbouring layers, as `split` says. Errors:
    PlanError."""
    if value in (None, "none", "branches"):
        return None if value in (None, "none") else "branches"
    found = keys.numbers("place", value, 0, "branches, or the rank of each layer, such as 0,0,1,1,0")
    text = ",".join(map(str, found))
    if max(found, default=ranks) >= ranks:
        raise PlanError(f"place={text}: ranks of a pipeline with pp={ranks} are 0 to {ranks - 1}")
    if set(found) != set(range(ranks)):
        idle = min(set(range(ranks)) - set(found))
        raise PlanError(
            f"place={text}: puts no layer on rank {idle}; possible is pp={len(set(found))}, or another place"
        )
    return found


def check_shape(plan: Plan, shape: Shape) -> None:
    """Refuse choices of a plan that do not go together with the edges of a model."""
    if plan.place is not None and plan.place != "branches" and len(plan.place) != shape.own_layers:
        raise PlanError(
            f"place={_written(plan)}: of {several(len(plan.place), 'layer')}, but the model has {shape.own_layers}"
        )
    if plan.place == "branches" and not any(len(found) > 1 for found in graphs.side_by_side(shape.edges, shape.layers)):
        raise PlanError(
            "place=branches: the model has none side by side; possible is the rank of each layer, or split="
        )
    if not shape.edges:
        return
    why = f"of a model with branches (edges between its {several(shape.own_layers, 'layer')})"
    if plan.sharing > 1:
        words = f"{plan.shared[0][0]}={plan.sharing}"
        raise PlanError(f"{words}: cuts the layers of chains into nodes, not {why}; possible is {plan.shared[0][0]}=1")
    if plan.asynchronous or plan.slice_count > 1:
        raise PlanError(
            f"schedule={plan.schedule}: is for chains, not {why}; possible is one of rows that flushes, such as 1f1b"
        )
    if segments.budget_of(plan.checkpoint) is not None:
        raise PlanError(
            f"checkpoint={plan.checkpoint}: a budget is for chains, not {why} (not built); possible are "
            "checkpoint=sqrt, K and layers such as 3,7,11"
        )


def _written(plan: Plan) -> str:
    return plan.place if isinstance(plan.place, str) else ",".join(map(str, plan.place or ()))


def ranks_of(place: str | tuple[int, ...], shape: Shape, ranks: int) -> tuple[int, ...]:
    """The rank of every layer; of layers that are cut into nodes, that of every node."""
    if isinstance(place, tuple):
        return tuple(place[shape.own_layer(node)] for node in range(shape.layers))
    blocks = graphs.side_by_side(shape.edges, shape.layers)
    widest = max(map(len, blocks))
    if ranks > widest:
        raise PlanError(
            f"pp={ranks} place=branches: at most {widest} branches are side by side; possible are 1 to {widest}"
        )
    found = [0] * shape.layers
    for parts in blocks:
        for k, part in enumerate(parts):
            for layer in part:
                found[layer] = k % ranks
    return tuple(found)


def stages(place: Sequence[int], ranks: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Runs of neighbouring layers on one rank are stages. Returns their lengths, and the stages of each rank."""
    runs = [(rank, len(list(run))) for rank, run in groupby(place)]
    held = tuple(tuple(s for s, (rank, _) in enumerate(runs) if rank == r) for r in range(ranks))
    return tuple(length for _, length in runs), held


def through(actions: Iterable[Action], chunks: int) -> list[Action]:
    """Each action on all chunks of a rank: a forward from the first chunk to the last, a backward in reverse order."""
    order = range(chunks)
    return [
        replace(action, chunk=c)
        for action in actions
        for c in (order if isinstance(action, Forward) else reversed(order))
    ]
