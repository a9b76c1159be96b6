"""The passes that make a program of a plan, in order: `Plan.compile` calls `program_of` and verifies what it gives.

schedule -> layers -> checkpoint -> slices -> ZeRO -> data parallel -> compress -> host layers -> offload -> transfers
-> fuse -> clip                    each is a file of `minipar.strategies`; a step is made for one replica, and copied
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from minipar.costs.measured import Profile
from minipar.costs.protocol import Costs
from minipar.costs.recomputation import LayerCosts
from minipar.errors import PlanError
from minipar.program import Action, Forward, Instruction, Local, Mesh, Program, Serving, Synchronous
from minipar.program.edges import wiring
from minipar.program.shape import Shape
from minipar.strategies import async_compile, exclusions, keys
from minipar.strategies.draft import Draft, apply_own
from minipar.strategies.layout import Layout
from minipar.strategies.passes import compress as compression
from minipar.strategies.passes import host_layers, offload, parameter_server, priority, segments, zero
from minipar.strategies.passes.bucket_size import best_size
from minipar.strategies.passes.checkpoint import recompute
from minipar.strategies.passes.clip import clip
from minipar.strategies.passes.data_parallel import all_reduce_gradients, kept_gradients
from minipar.strategies.passes.fuse import fuse
from minipar.strategies.passes.layers import expand, state_of, step_of
from minipar.strategies.passes.local_sgd import average
from minipar.strategies.passes.priority import Seconds, all_reduce_by_priority
from minipar.strategies.passes.transfers import beside, insert_transfers
from minipar.strategies.schedules.terapipe import add_carries

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan


def program_of(
    plan: Plan,
    shape: Shape,
    layout: Layout,
    steps: int,
    costs: LayerCosts | Profile | None = None,
    costs_of: Callable[[Program], Costs] | None = None,
) -> Program:
    """The program of `steps` training steps, not verified yet; the arguments are those of `Plan.compile`."""
    count = steps if plan.asynchronous else 1
    actions = [plan.actions(rank, count, len(mine)) for rank, mine in enumerate(layout.placement)]
    _check(plan, layout, actions)
    if plan.asynchronous:
        again = segments.schedules(plan.checkpoint, layout, actions, costs)
        program = async_compile.compile_run(layout, actions, again, steps, plan.schedule, plan.numbers, str(plan))
        return replace(program, selective=plan.checkpoint == "selective")
    times = _times(plan, shape, layout, costs, costs_of)
    bucket = plan.messages if plan.messages != "auto" else best_size(expand(actions, layout), layout, times)
    first = plan.overlap == "priority"
    again = segments.schedules(plan.checkpoint, layout, actions, costs)
    if plan.sync == "ps":
        serving, overlap = Serving(plan.servers, plan.mode), plan.overlap == "backward"
        return parameter_server.compile_program(
            layout, actions[0], again, steps, bucket, overlap, serving, str(plan), plan.checkpoint == "selective"
        )
    rule = zero.Zero(plan.zero, plan.reduce, plan.prefetch, bucket, plan.overlap == "backward")
    sharded = [zero.sharded_groups(layout, stage, rule) for stage in range(plan.pp)]
    away = [
        offload.Offload(
            tuple(plan.offload), plan.offload_to, mine, mine if plan.zero == 3 else frozenset(), plan.prefetch
        )
        for mine in sharded
    ]
    placed = host_layers.find(plan.host_layers, layout)
    on_host = host_layers.groups_of(placed, layout)
    alone = [frozenset(layout.trainable(s)) if plan.local_steps else sharded[s] | on_host for s in range(plan.pp)]
    keep = [kept_gradients(layout, stage, bucket, alone[stage]) for stage in range(plan.pp)]
    joined = wiring(shape.edges, shape.layers).alone if shape.edges else None
    ranks: list[list[Instruction]] = [[] for _ in range(plan.ranks)]
    chunks = [[(layout.trained(s), again[s]) for s in layout.placement[r]] for r in range(plan.pp)]
    due: list[list[Instruction]] = [[] for _ in range(plan.pp)]  # updates of the step before

    def sum_gradients(draft: Draft) -> Draft:
        if first:
            return draft.each(lambda r, row: all_reduce_by_priority(row, layout, r, draft.step, bucket, times[r]))
        overlaps = plan.overlap == "backward"
        return draft.each(lambda r, row: all_reduce_gradients(row, layout, r, draft.step, bucket, overlaps, alone[r]))

    def send_and_receive(draft: Draft) -> Draft:
        sent = insert_transfers(dict(enumerate(draft.ranks)), beside(actions, layout, draft.step))
        return draft.each(lambda r, row: sent[r])

    def fuse_and_update(draft: Draft) -> Draft:
        last = draft.step == steps - 1

        def finished(r: int, row: Sequence[Instruction]) -> list[Instruction]:
            update = zero.finish(step_of(layout, r, draft.step, keep[r]), layout, r, rule)
            update = host_layers.finish(update, on_host)
            update = offload.finish(update, away[r])
            if plan.local_steps:
                update = average(update, layout, r, draft.step, last, plan.local_steps, bucket)
            if not first:
                return fuse(row, joined) + (update if plan.clip is None else clip(update, layout))
            update, due[r] = due[r], priority.updates(update, row)
            return fuse(priority.update_late(row, update), joined) + (due[r] if last else [])

        return draft.each(finished)

    passes: list[tuple[str, Callable[[Draft], Draft]]] = [
        ("checkpoint", lambda draft: draft.each(lambda r, row: recompute(row, chunks[r]))),
        ("slices", lambda draft: draft.each(lambda r, row: add_carries(row, shape, plan.slice_count))),
        ("zero", lambda draft: draft.each(lambda r, row: zero.shard(row, layout, r, draft.step, rule))),
        ("data_parallel", sum_gradients),
        ("compress", lambda draft: draft.each(lambda r, row: compression.compress(row, shape, plan.compress))),
        ("host_layers", lambda draft: draft.each(lambda r, row: host_layers.place(row, placed, layout, r))),
        ("offload", lambda draft: draft.each(lambda r, row: offload.offload(row, away[r], draft.step, keep[r]))),
        ("transfers", send_and_receive),
        ("fuse", fuse_and_update),
    ]
    for step in range(steps):
        draft = Draft(plan, layout, step, tuple(map(tuple, expand(actions, layout, step))))
        draft = apply_own(draft, "layers")
        for place, change in passes:
            draft = apply_own(change(draft), place)
        stages = draft.ranks
        for replica in range(plan.dp):
            for stage in range(plan.pp):
                ranks[layout.rank(replica, stage)] += _moved(stages[stage], replica * plan.pp)
    held = [zero.state_of(state_of(layout, s, keep[s]), sharded[s], rule) for s in range(plan.pp)]
    held = [offload.state_of(host_layers.state_of(held[s], on_host), away[s]) for s in range(plan.pp)]
    if plan.compress != "none":
        held = [compression.state_of(held[s], ranks[s]) for s in range(plan.pp)]
    return Program(
        tuple(map(tuple, ranks)),
        shape.layers,
        layout.microbatches,
        shape.groups,
        Mesh(dp=plan.dp, pp=plan.pp),
        tuple(held) * plan.dp,
        steps,
        Local(plan.local_steps) if plan.local_steps else Synchronous(),
        name=str(plan),
        clip=plan.clip,
        precision=plan.precision,
        compress=plan.compress,
        algorithm="" if plan.algorithm == keys.ALGORITHM else plan.algorithm,
        folder=plan.offload_folder,
        room=plan.offload_limit,  # type: ignore[arg-type]
        selective=plan.checkpoint == "selective",
        slices=plan.cut,
        carries=shape.carries if plan.slice_count > 1 else (),
        edges=shape.edges,
    )


def _times(
    plan: Plan,
    shape: Shape,
    layout: Layout,
    costs: LayerCosts | Profile | None,
    costs_of: Callable[[Program], Costs] | None,
) -> list[Seconds]:
    """For each rank of the pipeline what its instructions take."""
    if costs_of is None or not (plan.bucket == "auto" or plan.overlap == "priority"):
        return [priority.guess(layout)] * plan.pp
    draft = replace(plan, bucket="none", overlap="backward")
    known = costs_of(program_of(draft, shape, layout, 1, costs, None))
    return [partial(priority.seconds, known, stage) for stage in range(plan.pp)]


def _check(plan: Plan, layout: Layout, actions: Sequence[Sequence[Action]]) -> None:
    """Refuse what the schedule's own actions make impossible."""
    exclusions.check(plan, late=True)
    copies = Counter(stage for mine in layout.placement for stage in mine)
    if max(copies.values()) > 1:
        for rank, mine in enumerate(layout.placement):
            used = {a.chunk for a in actions[rank] if isinstance(a, Forward)}
            for c, stage in enumerate(mine):
                if copies[stage] > 1 and c not in used:
                    raise PlanError(
                        f"schedule={plan.schedule}: no micro-batch goes through chunk {c} of rank {rank}, a copy of "
                        f"stage {stage}; possible are more than microbatches={plan.microbatches}"
                    )


def _moved(instructions: Sequence[Instruction], offset: int) -> Sequence[Instruction]:
    """The same instructions for another replica: peers are its own ranks (collectives already name all replicas)."""
    if offset == 0:
        return instructions
    return [
        ins._replace(peer=ins.peer + offset, stream=f"{ins.stream.split()[0]} {ins.peer + offset}")
        if ins.peer >= 0
        else ins
        for ins in instructions
    ]
