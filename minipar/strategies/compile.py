"""From a plan to a program: the passes of a plan, in order, and the program that they make.

    print(*plan.passes(), sep="\\n")

The passes make a step of one replica, one pass after another. Then all replicas repeat it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minipar.costs.measured import Profile
from minipar.costs.protocol import Costs
from minipar.costs.recomputation import LayerCosts, Move
from minipar.errors import PlanError
from minipar.program import (
    Action,
    Contract,
    Forward,
    Instruction,
    Local,
    Op,
    Program,
    Serving,
    Staleness,
    Synchronous,
)  # fmt: skip
from minipar.program.repeated import Repeated
from minipar.program.server_rule import Mode
from minipar.program.shape import Shape
from minipar.strategies import exclusions, keys, segments
from minipar.strategies.draft import Draft, Pass, Seconds, registered
from minipar.strategies.layout import Layout
from minipar.strategies.passes import (
    checkpoint,
    clip,
    compress,
    copies,
    data_parallel,
    forms,
    fuse,
    host_layers,
    layers,
    local_sgd,
    offload,
    parameter_server,
    priority,
    slices,
    transfers,
    update,
    versions,
    zero,
)
from minipar.strategies.schedules.registry import find

if TYPE_CHECKING:
    from minipar.strategies.plan import Plan


def passes_of(plan: Plan) -> tuple[Pass, ...]:
    """The passes that a plan needs, in order."""
    trains, served, by_priority = not plan.inference, plan.sync == "ps", plan.overlap == "priority"
    updates = trains and not served  # a rank updates what it holds
    flushed = updates and not plan.asynchronous  # and does so once a step
    several = plan.dp * (1 if plan.asynchronous else plan.pp) > 1  # (tied layers may be on two ranks)
    pieces = by_priority and several  # go by priority
    table = (
        ("layers", layers.expand_layers, True),
        ("bucket", data_parallel.choose_size, trains and plan.messages == "auto" and not pieces),
        ("checkpoint", checkpoint.recompute_segments, trains and plan.checkpoint not in ("none", "selective")),
        ("slices", slices.add_carries, plan.slice_count > 1),
        ("versions", versions.keep_versions, plan.asynchronous),
        ("zero", zero.shard, updates and plan.zero > 0 and (plan.dp > 1 or (plan.pp > 1 and plan.copies))),
        ("priority", priority.sum_by_priority, flushed and several and by_priority),
        ("data_parallel", data_parallel.sum_gradients, updates and several and not (by_priority or plan.local_steps)),
        ("compress", compress.compress, updates and plan.compress != "none"),
        ("forms", forms.change_forms, plan.sharing > 1),
        ("parts", forms.sum_parts, updates and plan.sharing > 1),
        ("copies", copies.side_by_side, plan.batch_copies > 1),
        ("local_steps", local_sgd.average, updates and plan.local_steps > 0),
        ("host_layers", host_layers.place, bool(plan.host_layers)),
        ("offload", offload.offload, bool(plan.offload)),
        ("clip", clip.clip, flushed and plan.clip is not None),
        ("parameter_server", parameter_server.push_and_pull, served),
        ("transfers", transfers.send_and_receive, plan.pp > 1),
        ("update", priority.update_before_use if by_priority else update.update_at_the_end, flushed),
        ("fuse", fuse.fuse_layers, True),
    )
    found: list[Pass] = []
    for name, rewrite, applies in table:
        found += [Pass(name, rewrite)] if applies else []
        found += [own for own in map(registered, plan.extra_passes) if own.after == name]
    return tuple(found)


def program_of(
    plan: Plan,
    shape: Shape,
    layout: Layout,
    steps: int,
    costs: LayerCosts | Profile | None = None,
    costs_of: Callable[[Program], Costs] | None = None,
) -> Program:
    """The program of `steps` training steps, which is not verified yet. The arguments are those of `Plan.compile`."""
    steps_at_once = steps if plan.asynchronous else 1  # steps in one draft
    actions = [plan.actions(rank, steps_at_once, len(mine)) for rank, mine in enumerate(layout.placement)]
    _check(plan, layout, actions)
    timed = plan.bucket == "auto" or plan.overlap == "priority"  # (a pass needs the times of instructions)
    seconds = _seconds(plan, shape, layout, costs, costs_of) if timed else ()
    moves: list[tuple[Move, ...]] = [()] * len(layout.split)
    if plan.checkpoint not in ("none", "selective"):
        moves = segments.schedules(plan.checkpoint, layout, actions, costs, slices=plan.slice_count)
    passes = passes_of(plan)
    bucket = plan.messages
    if isinstance(bucket, tuple) and shape.nodes:  # a layer's gradient is complete with that of its first node
        bucket = tuple(shape.firsts[layer] for layer in bucket)
    draft = Draft(plan, layout, -1, (), steps=steps, actions=actions, moves=moves, bucket=bucket, seconds=seconds)
    rows: list[list[Instruction]] = [[] for _ in range(plan.ranks - layout.mesh.size + plan.pp)]
    for _ in range(0, steps, steps_at_once):
        draft = draft.following()
        for each in passes:
            draft = each(draft)
        for mine, more in zip(rows, draft.ranks, strict=True):
            mine += more
    ranks: Sequence[tuple[Instruction, ...]] = Repeated(rows[: plan.pp], layout.mesh)
    if plan.sync == "ps" or plan.extra_passes or layout.mesh.size == plan.pp:
        # (messages to servers leave a pipeline, and groups of a pass of your own may have any ranks)
        ranks = (*ranks, *map(tuple, rows[plan.pp :]))
    return Program(
        ranks,
        shape.layers,
        layout.microbatches,
        shape.groups,
        layout.mesh,
        tuple(draft.state[layout.mesh.coordinates(rank)["pp"]] for rank in range(layout.mesh.size))
        + draft.state[plan.pp :],
        steps,
        _contract(plan),
        name=str(plan),
        clip=plan.clip,
        precision=plan.precision,
        compress=plan.compress,
        algorithm="" if plan.algorithm == keys.ALGORITHM else plan.algorithm,
        folder=plan.offload_folder,
        room=plan.offload_limit,  # type: ignore[arg-type]
        selective=plan.checkpoint == "selective",
        serving=Serving(plan.servers, plan.mode) if plan.sync == "ps" else None,
        in_flight=plan.numbers["in_flight"] if plan.deciding else None,
        slices=plan.cut,
        carries=shape.carries if plan.slice_count > 1 else (),
        edges=shape.edges,
        forms=shape.forms,
        inputs=shape.inputs,
        names=shape.names if shape.forms else (),
    )


def _contract(plan: Plan) -> Contract:
    """The contract: how old the parameters may be from which a gradient is computed."""
    asynchronous = find(plan.schedule).asynchronous
    if asynchronous:
        return asynchronous.promise(plan.pp, plan.numbers)
    if plan.local_steps:
        return Local(plan.local_steps)
    if plan.sync != "ps":
        return Synchronous()
    mode = Mode.parse(plan.mode, plan.dp)
    return Synchronous() if mode.kind == "sync" else Staleness(mode.staleness(plan.dp))


def _seconds(
    plan: Plan,
    shape: Shape,
    layout: Layout,
    costs: LayerCosts | Profile | None,
    costs_of: Callable[[Program], Costs] | None,
) -> list[Seconds]:
    """For each rank of the pipeline, the times of its instructions."""
    if costs_of is None:
        return [_guess(layout)] * plan.pp
    known = costs_of(program_of(replace(plan, bucket="none", overlap="backward"), shape, layout, 1, costs))

    def of(rank: int) -> Seconds:
        def seconds(ins: Instruction) -> float:
            if ins.op is Op.PUSH or ins.op is Op.PULL:
                return known.transfer(rank, ins)[0]
            return known.collective(ins) if ins.group else known.compute(rank, ins)

        return seconds

    return [of(rank) for rank in range(plan.pp)]


def _guess(layout: Layout) -> Seconds:
    """Times if no costs are known. A layer's forward takes 1 and its backward 2. The messages of all gradients together
    take as long as all forwards and backwards of one micro-batch."""
    whole = sum(sum(group.tensors) for group in layout.shape.groups) or 1

    def seconds(ins: Instruction) -> float:
        if ins.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.PUSH):
            return 3.0 * layout.shape.layers * sum(part.bytes for part in ins.parts) / whole
        return {Op.FORWARD: 1.0, Op.RECOMPUTE: 1.0, Op.BACKWARD: 2.0}.get(ins.op, 0.0) * len(ins.layers)

    return seconds


def _check(plan: Plan, layout: Layout, actions: Sequence[Sequence[Action]]) -> None:
    """Refuse choices that do not go together with the actions of the schedule."""
    exclusions.check(plan, compiled=True)
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
