"""Programs of asynchronous pipelines, all steps of a run in one; and what they do not go together with.

    actions over all micro-batches of the run -> layers -> checkpoint -> transfers -> fuse -> versions and STEPs

There is nothing between two steps: no flush, no barrier. A step is only a name for so many micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from minipar.costs.recomputation import Move
from minipar.errors import PlanError
from minipar.program import Action, Op, Program
from minipar.strategies.layout import Layout
from minipar.strategies.passes.checkpoint import recompute
from minipar.strategies.passes.fuse import fuse
from minipar.strategies.passes.layers import expand
from minipar.strategies.passes.transfers import insert_transfers
from minipar.strategies.passes.versions import by_step, state_of, with_versions
from minipar.strategies.schedules.registry import find


def compile_run(
    layout: Layout,
    actions: Sequence[Sequence[Action]],
    again: Sequence[Sequence[Move]],
    steps: int,
    schedule: str,
    keys: Mapping[str, int],
    name: str,
) -> Program:
    """The program of a run.

    actions   of each rank, micro-batches counted through all steps
    again     for each stage how a micro-batch goes through it (`segments.schedules`)
    keys      of the plan: microbatches, in_flight, update_every
    """
    rules = find(schedule).asynchronous
    assert rules is not None
    contract = rules.promise(layout.pp, keys)
    check_ties(schedule, layout)
    if rules.decides and not any(layout.trained(stage) for stage in layout.placement[0]):
        raise PlanError(
            f"schedule={schedule}: rank 0 has nothing to train, so it would not learn when a micro-batch is done; "
            "possible are another split=, or pipedream"
        )
    if not contract.stashed and any(move.op is Op.RECOMPUTE for moves in again for move in moves):
        raise PlanError(
            f"schedule={schedule}: keeps no weights, so that a layer that is recomputed would run with others; "
            "possible are checkpoint=none, or schedule=pipedream"
        )
    m = layout.microbatches
    ranks = expand(actions, replace(layout, microbatches=m * steps))
    for rank, mine in enumerate(layout.placement):
        chunks = [(layout.trained(stage), again[stage]) for stage in mine]
        ranks[rank] = by_step(recompute(ranks[rank], chunks), m)
    ranks = list(insert_transfers(dict(enumerate(ranks))).values())
    return Program(
        tuple(tuple(with_versions(fuse(row), layout, r, contract, rules.version)) for r, row in enumerate(ranks)),
        layout.shape.layers,
        m,
        layout.shape.groups,
        (("dp", 1), ("pp", layout.pp)),
        tuple(state_of(layout, rank) for rank in range(layout.pp)),
        steps,
        contract,
        name=name,
        in_flight=keys["in_flight"] if rules.decides else None,
    )


def check_ties(schedule: str, layout: Layout) -> None:
    """Refuse parameters that two stages share: each would update a copy of its own, at another time."""
    for g, group in enumerate(layout.shape.groups):
        ranks = [r for r in range(layout.pp) if g in layout.groups(r)]
        if group.trainable and len(ranks) > 1:
            raise PlanError(
                f"schedule={schedule}: layers {', '.join(map(str, group.layers))} share weights, but are on ranks "
                f"{', '.join(map(str, ranks))}, which update at different times, so that the copies would differ; "
                "possible are ties within one stage (split=), or a synchronous schedule such as 1f1b"
            )
