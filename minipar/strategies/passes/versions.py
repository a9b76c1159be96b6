"""Asynchronous pipelines: no flush between mini-batches, so that several versions of the parameters are alive.

    step by step, flushed     F0 F1 B0 B1 STEP | F0 F1 B0 B1 STEP        every F of a step uses the same parameters
    asynchronous              F0 F1 B0 STEP F2 B1 STEP F3 B2 STEP ...    F2 uses v1, while B1 still needs v0 of its F1

A strategy gives an order, as any schedule does, over the micro-batches of the whole run; `version`, which parameters a
forward uses; and `promise`, the contract: after how many micro-batches an update comes, how stale a gradient may be,
how many versions a rank holds. This pass does the rest: forwards and backwards read param(g) v, STEP writes v+1, and a
version is freed by the last instruction that needs it. Where that is the STEP itself it updates in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from minipar.program import (
    BACKWARDS,
    TRANSFERS,
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
)
from minipar.strategies.layout import Layout

Used = Callable[[int, int, int, int, int], int]
Place = tuple[bool, int, int]  # forward or not, micro-batch, step
Blocks = dict[Place, list[Instruction]]


@dataclass(frozen=True)
class Asynchronous:
    """What makes a schedule an asynchronous one.

    version   (rank, ranks, micro-batch of the run, micro-batches of a step, newest version) -> the one a forward uses
    promise   (ranks, keys of the plan) -> the contract; PlanError where the keys do not fit
    decides   the ranks decide as they run; the schedule's order is what they would do with equal times
    """

    version: Used
    promise: Callable[[int, Mapping[str, int]], Staleness]
    decides: bool = False


def newest(rank: int, ranks: int, microbatch: int, microbatches: int, newest: int) -> int:
    """The version rule of a rank that takes what it has."""
    return newest


def by_step(instructions: Sequence[Instruction], microbatches: int) -> list[Instruction]:
    """Micro-batches that were counted through the whole run, as micro-batches of steps."""
    if all(ins.microbatch < microbatches for ins in instructions):
        return list(instructions)  # a run of one step
    names: dict[Value, Value] = {}

    def named(value: Value) -> Value:
        if value.microbatch < 0:
            return value
        if value not in names:
            step, i = divmod(value.microbatch, microbatches)
            names[value] = value._replace(microbatch=i, step=step)
        return names[value]

    def rows(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(map(named, values))

    result = []
    for ins in instructions:
        step, i = divmod(ins.microbatch, microbatches)
        result.append(
            ins._replace(microbatch=i, step=step, reads=rows(ins.reads), writes=rows(ins.writes), frees=rows(ins.frees))
        )
    return result


def with_versions(
    instructions: Sequence[Instruction], layout: Layout, rank: int, contract: Staleness, version: Used
) -> list[Instruction]:
    """One rank's forwards and backwards with the versions they use, and its STEPs, each after what is sent.

    Which version is freed by what is decided anew, where the instructions have versions of another order.
    """
    groups = layout.trainable(rank)
    if not groups:
        return list(instructions)
    m = layout.microbatches
    every = contract.every or m
    FORWARD, SEND, RECV = Op.FORWARD, Op.SEND, Op.RECV
    total = len({(ins.microbatch, ins.step) for ins in instructions if ins.op is FORWARD})
    depth = sum(len(layout.trained(stage)) for stage in layout.placement[rank])
    used: dict[int, int] = {}
    left: dict[int, int] = {}
    named: dict[int, dict[int, Value]] = {}  # the parameters of each version
    last: dict[Value, int] = {}  # where each of them is read for the last time
    result: list[Instruction] = []
    states, grads = tuple(map(optimizer_state, groups)), tuple(map(grad, groups))
    done = updates = 0
    due = False
    new = tuple.__new__  # (takes half the time of Instruction itself)

    def params(version: int) -> dict[int, Value]:
        if version not in named:
            named[version] = {g: param(g, version) for g in groups}
        return named[version]

    def step() -> Instruction:
        old, new = (tuple(params(version).values()) for version in (updates, updates + 1))
        last.update(dict.fromkeys(old, len(result)))
        return Instruction(Op.STEP, groups, -1, updates, grads + old + states, new + states, grads)

    for ins in instructions:
        op = ins.op
        if due and op is not SEND:
            result.append(step())
            updates, due = updates + 1, False
        if op is SEND or op is RECV:
            result.append(ins)
            continue
        i = ins.step * m + ins.microbatch
        if op is FORWARD and i not in used:
            used[i] = version(rank, layout.pp, i, m, updates)
        given = params(used.get(i, updates) if op is FORWARD or contract.stashed else updates)
        reads = []
        for value in ins.reads:
            if value.kind == "param" and value.index in given:
                value = given[value.index]
                last[value] = len(result)
            reads.append(value)
        frees = tuple([value for value in ins.frees if value.kind != "param"])
        result.append(new(Instruction, (*ins[:4], tuple(reads), ins.writes, frees, *ins[7:])))
        if op in BACKWARDS:
            left[i] = left.get(i, depth) - len(ins.layers)
            if not left[i]:
                done += 1
                due = done % every == 0 or done == total
    if due:
        result.append(step())
        updates += 1
    for value, k in last.items():  # each version is freed by the last that reads it; the newest one stays
        if updates and value.step not in (-1, updates):
            ins = result[k]
            result[k] = new(Instruction, (*ins[:6], (*ins.frees, value), *ins[7:]))
    return result


def state_of(layout: Layout, rank: int) -> frozenset[Value]:
    """What a rank holds before a run, and after it with the last version."""
    trainable = layout.trainable(rank)
    groups = layout.groups(rank)
    return frozenset([param(g, 0 if g in trainable else -1) for g in groups] + [optimizer_state(g) for g in trainable])


def as_it_happened(
    program: Program,
    orders: Sequence[Sequence[Action]],
    version: Used = newest,
    known: Sequence[Blocks] | None = None,
) -> Program:
    """The program of ranks that decided: `program` with the forwards and backwards of each rank in another order.

    known   for each rank what `blocks_of` gives, if the caller has it
    """
    layout = layout_of(program)
    assert isinstance(program.contract, Staleness)
    ranks = []
    for rank, order in enumerate(orders):
        blocks = blocks_of(program, rank) if known is None else known[rank]
        m = program.microbatches
        places = [(isinstance(action, Forward), action.microbatch % m, action.microbatch // m) for action in order]
        plain = [ins for place in places for ins in blocks.get(place, ())]
        same = program.in_flight is not None and version is newest
        if same and plain == [ins for ins in program.ranks[rank] if ins.op is not Op.STEP]:
            ranks.append(program.ranks[rank])  # it happened as it was compiled
        else:
            ranks.append(tuple(with_versions(plain, layout, rank, program.contract, version)))
    return replace(program, ranks=tuple(ranks), in_flight=None)


def blocks_of(program: Program, rank: int) -> Blocks:
    """A rank's instructions by the forward or backward of a micro-batch that they belong to, messages included."""
    blocks: Blocks = {}
    STEP = Op.STEP
    for ins in program.ranks[rank]:
        if ins.op is not STEP:
            blocks.setdefault(place_of(ins), []).append(ins)
    return blocks


def place_of(ins: Instruction) -> Place:
    """Which forward or backward an instruction belongs to."""
    moved = (ins.reads or ins.writes)[0].kind if ins.op in TRANSFERS else ""
    return ins.op is Op.FORWARD or moved == "output", ins.microbatch, ins.step


def layout_of(program: Program) -> Layout:
    """Where the layers of a program of one pipeline are."""
    from minipar.program.shape import Shape

    split = tuple(len(layers) for layers in program.placement)
    return Layout(Shape(program.layers, program.groups), 1, len(program.ranks), split, program.microbatches)
