"""Asynchronous pipelines: there is no flush between mini-batches, so several versions of the parameters are alive.

    step by step, flushed     F0 F1 B0 B1 STEP | F0 F1 B0 B1 STEP        every F of a step uses the same parameters
    asynchronous              F0 F1 B0 STEP F2 B1 STEP F3 B2 STEP ...    F2 uses v1, while B1 still needs v0 of its F1

A schedule gives three things (`schedules.registry.Asynchronous`). Its order goes over the micro-batches of the whole
run. `version` says which parameters a forward uses. `promise` is the contract: after how many micro-batches an update
comes, how stale a gradient may be, and how many versions a rank holds. This pass does the rest: forwards and backwards
read param(g) v, STEP writes v+1, and the last instruction that needs a version frees it. If that is the STEP itself, it
updates in place.

No flush and no barrier separates two steps. A step is only a name for so many micro-batches, and the draft has all
steps. With dp > 1 an update uses the gradients of all replicas, each of which has done the same micro-batches; the
passes after this one find a STEP for each update in the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from minipar.errors import PlanError
from minipar.program import (
    BACKWARDS,
    Action,
    Forward,
    Instruction,
    Op,
    Program,
    Staleness,
    Value,
    grad,
    optimizer_state,
    param,
    version_of,
)
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import ActionKey, actions_of, free_at_last_read, renamed
from minipar.strategies.schedules.registry import Used, find, newest

Blocks = dict[ActionKey, list[Instruction]]


def keep_versions(draft: Draft) -> Draft:
    """Ranks update without a flush; each forward and backward says which version of the parameters it uses."""
    layout, rules = draft.layout, find(draft.plan.schedule).asynchronous
    assert rules is not None
    contract = rules.promise(layout.pp, draft.plan.numbers)
    _check_ties(draft.plan.schedule, layout)
    if draft.plan.deciding and not any(layout.trained(stage) for stage in layout.placement[0]):
        raise PlanError(
            f"schedule={draft.plan.schedule}: rank 0 has nothing to train, so it would not learn when a micro-batch is "
            "done; possible are another split=, or pipedream"
        )
    again = [move.op for moves in draft.moves for move in moves] + [ins.op for row in draft.ranks for ins in row]
    if not contract.stashed and Op.RECOMPUTE in again:
        raise PlanError(
            f"schedule={draft.plan.schedule}: keeps no weights, so that a layer that is recomputed would run with "
            "others; possible are checkpoint=none, or schedule=pipedream"
        )
    trained = [frozenset(map(param, layout.trainable(rank))) for rank in range(layout.pp)]
    draft = draft.each(lambda rank, row: with_versions(row, layout, rank, contract, rules.version))
    return draft.each_state(lambda rank, held: [param(v.index, 0) if v in trained[rank] else v for v in held])


def _check_ties(schedule: str, layout: Layout) -> None:
    """Refuse parameters that two stages share: each would update a copy of its own, at another time."""
    for g, group in enumerate(layout.shape.groups):
        ranks = [r for r in range(layout.pp) if g in layout.groups(r)]
        if group.trainable and len(ranks) > 1:
            layers = ", ".join(str(layer) for layer in dict.fromkeys(map(layout.shape.own_layer, group.layers)))
            raise PlanError(
                f"schedule={schedule}: layers {layers} share weights, but are on ranks "
                f"{', '.join(map(str, ranks))}, which update at different times, so that the copies would differ; "
                "possible are ties within one stage (split=), or a synchronous schedule such as 1f1b"
            )


def with_versions(
    instructions: Sequence[Instruction], layout: Layout, rank: int, contract: Staleness, version: Used
) -> list[Instruction]:
    """One rank's forwards and backwards with the versions that they use, and its STEPs. A STEP comes after the SENDs of
    the backward before it.

    If the instructions have versions already, from another order, these are replaced and their frees are found again.
    """
    groups = layout.trainable(rank)
    if not groups:
        return list(instructions)
    m = layout.microbatches
    every = contract.every or m
    total = len({(ins.microbatch, ins.step) for ins in instructions if ins.op is Op.FORWARD})
    depth = sum(len(layout.trained(stage)) for stage in layout.placement[rank])
    used: dict[int, int] = {}
    left: dict[int, int] = {}
    params = cache(lambda version: {param(g): param(g, version) for g in groups})
    states, grads = tuple(map(optimizer_state, groups)), tuple(map(grad, groups))
    result: list[Instruction] = []
    done = updates = 0
    due = False

    def step() -> Instruction:
        old, new = (tuple(params(version).values()) for version in (updates, updates + 1))
        return Instruction(Op.STEP, groups, -1, updates, grads + old + states, new + states, grads)

    for ins in instructions:
        if due and ins.op is not Op.SEND:
            result.append(step())
            updates, due = updates + 1, False
        if ins.op is Op.SEND or ins.op is Op.RECV:
            result.append(ins)
            continue
        i = ins.step * m + ins.microbatch
        if ins.op is Op.FORWARD and i not in used:
            used[i] = version(rank, layout.pp, i, m, updates)
        given = params(used.get(i, updates) if ins.op is Op.FORWARD or contract.stashed else updates)
        reads = tuple([given.get(plain(value), value) for value in ins.reads])
        result.append(ins._replace(reads=reads, frees=tuple([v for v in ins.frees if v.kind != "param"])))
        if ins.op in BACKWARDS:
            left[i] = left.get(i, depth) - len(ins.layers)
            if not left[i]:
                done += 1
                due = done % every == 0 or done == total
    if due:
        result.append(step())
        updates += 1
    # The last instruction that reads a version frees it. The newest version stays.
    return free_at_last_read(result, lambda v: 0 <= version_of(v) < updates)


def as_it_happened(
    program: Program,
    orders: Sequence[Sequence[Action]],
    version: Used = newest,
    known: Sequence[Blocks] | None = None,
) -> Program:
    """The program of ranks that decided as they ran: `program` with each rank's forwards and backwards in the given
    order.

    known   the result of `blocks_of` for each rank, if the caller has it
    """
    layout = layout_of(program)
    assert isinstance(program.contract, Staleness)
    ranks = []
    for rank, order in enumerate(orders):
        blocks = blocks_of(program, rank) if known is None else known[rank]
        m = program.microbatches
        places = [(isinstance(action, Forward), action.microbatch % m, action.microbatch // m) for action in order]
        plain = [ins for place in places for ins in blocks.get(place, ()) if ins.op is not Op.STEP]
        ranks.append(tuple(with_versions(plain, layout, rank, program.contract, version)))
    return replace(program, ranks=tuple(ranks), in_flight=None)


def plain(value: Value) -> Value:
    """The value; parameters without the number of their version."""
    return value._replace(step=-1) if version_of(value) >= 0 else value


def without_versions(program: Program) -> Program:
    """The program as a rank that decides as it runs has it: with one version of its parameters, whose number is known
    afterwards."""

    def of(ins: Instruction) -> Instruction:
        renumbered = renamed(ins, plain)
        gone = [v for v in ins.frees if version_of(v) < 0 or (v.kind == "param" and plain(v) not in renumbered.writes)]
        return renumbered._replace(frees=tuple(map(plain, gone)))

    ranks = tuple(tuple(map(of, row)) for row in program.ranks)
    return replace(program, ranks=ranks, state=tuple(frozenset(map(plain, held)) for held in program.state))


def blocks_of(program: Program, rank: int) -> Blocks:
    """A rank's instructions, messages and updates included, by the forward or backward that they belong to."""
    blocks: Blocks = {}
    for place, ins in zip(actions_of(program, rank), program.ranks[rank], strict=True):
        blocks.setdefault(place, []).append(ins)
    return blocks


def layout_of(program: Program) -> Layout:
    """The layout of a program that has one pipeline."""
    from minipar.program.shape import Shape

    split = tuple(len(layers) for layers in program.placement)
    return Layout(Shape(program.layers, program.groups), 1, len(program.ranks), split, program.microbatches)
