"""Layers on the host: wide and cheap ones, such as an embedding, are computed where there is room for them.

    host_layers=0     F 0 on the host | FETCH output(0) | F 1 | F 2 | B 2 | B 1 | OFFLOAD grad_output(0) |
                      B 0 on the host | STEP 1:3 | STEP 0 on the host

Their parameters, gradients and optimizer states never leave the host, nor does what they save. Only outputs cross, and
their gradients: this pass follows where each of them is, and puts a copy where it is needed elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.errors import PlanError
from minipar.program import COMPUTE, Instruction, Op, Value, home, host, tier
from minipar.strategies.layout import Layout
from minipar.strategies.passes.data_parallel import all_reduce_gradients
from minipar.strategies.passes.offload import copy_of
from minipar.strategies.passes.transfers import MOVES


def find(chosen: Sequence[str], layout: Layout) -> frozenset[int]:
    """The layers that were chosen, by name or number."""
    shape = layout.shape
    names = {name: k for k, name in reversed(list(enumerate(shape.names)))}
    numbers = {str(k): k for k in range(shape.layers)}
    for word in chosen:
        if word not in names and word not in numbers:
            known = ", ".join(shape.names[:8]) if shape.names else f"0 to {shape.layers - 1}"
            raise PlanError(f"host_layers={word}: the model has no such layer; possible are {known}")
    layers = frozenset(names.get(word, numbers.get(word, -1)) for word in chosen)
    for group in shape.groups:
        inside = layers.intersection(group.layers)
        if inside and len(inside) < len(group.layers):
            here, there = min(inside), min(set(group.layers) - inside)
            raise PlanError(
                f"host_layers={here}: layer {here} shares parameters with layer {there}; possible is both of them, "
                "or neither"
            )
    return layers


def groups_of(layers: frozenset[int], layout: Layout) -> frozenset[int]:
    """The parameter groups that live on the host."""
    return frozenset(g for g, group in enumerate(layout.shape.groups) if layers.issuperset(group.layers))


def place(instructions: Sequence[Instruction], layers: frozenset[int], layout: Layout, stage: int) -> list[Instruction]:
    """One stage's instructions, layer by layer, with those of `layers` on the host, and the sums of their gradients."""
    if not layers or not instructions:
        return list(instructions)
    groups = groups_of(layers, layout)
    others = frozenset(range(len(layout.shape.groups))) - groups
    step = instructions[0].step
    instructions = all_reduce_gradients(instructions, layout, stage, step, "none", False, others)
    needed = [{v for v in ins.reads if v.kind in MOVES} for ins in instructions]
    later: set[Value] = set()  # what this rank reads after the instruction, seen from the end
    read_later: list[set[Value]] = []
    for ins, values in zip(reversed(instructions), reversed(needed), strict=True):
        read_later.append({v for v in ins.writes if v in later})
        later |= values
    read_later.reverse()
    result: list[Instruction] = []
    there: set[Value] = set()  # outputs and gradients that are on the host now
    for ins, values, wanted in zip(instructions, needed, read_later, strict=True):
        on_host = ins.op in COMPUTE and ins.op is not Op.STEP and layers.issuperset(ins.layers)
        for value in sorted(values):
            if on_host and value not in there:
                result.append(copy_of(Op.OFFLOAD, value, host(value), value.step, (value,)))
                there.add(value)
            elif not on_host and value in there:
                result.append(copy_of(Op.FETCH, host(value), value, value.step, (host(value),)))
                there.discard(value)
        if ins.op is Op.ALL_REDUCE and groups.issuperset(ins.layers):
            result.append(ins._replace(reads=tuple(map(host, ins.reads)), writes=tuple(map(host, ins.writes))))
            continue
        if not on_host:
            result.append(ins._replace(frees=tuple(host(v) if v in there else v for v in ins.frees)))
            there.difference_update(ins.frees)
            continue
        reads, writes, frees = (tuple(map(host, values)) for values in (ins.reads, ins.writes, ins.frees))
        result.append(ins._replace(reads=reads, writes=writes, frees=frees, stream="host"))
        for value in (v for v in ins.writes if v.kind in MOVES and v not in ins.frees):
            if value in wanted:
                there.add(value)
            else:  # for another rank
                result.append(copy_of(Op.FETCH, host(value), value, value.step, (host(value),)))
        there.difference_update(ins.frees)
    return result


def finish(update: Sequence[Instruction], groups: frozenset[int]) -> list[Instruction]:
    """STEP of a stage in two: that of the device, and that of the host."""
    result: list[Instruction] = []
    for ins in update:
        if ins.op is not Op.STEP:
            result.append(ins)
            continue
        for mine in (tuple(g for g in ins.layers if g not in groups), tuple(g for g in ins.layers if g in groups)):
            if not mine:
                continue
            reads, writes, frees = (
                tuple(v for v in values if v.index in mine) for values in (ins.reads, ins.writes, ins.frees)
            )
            part = ins._replace(layers=mine, reads=reads, writes=writes, frees=frees)
            if groups.issuperset(mine):
                reads, writes, frees = (tuple(map(host, values)) for values in (reads, writes, frees))
                part = part._replace(reads=reads, writes=writes, frees=frees, stream="host")
            result.append(part)
    return result


def state_of(state: frozenset[Value], groups: frozenset[int]) -> frozenset[Value]:
    """What a rank holds between steps."""
    return frozenset(host(v) if v.index in groups and tier(v) == "device" else v for v in state)


def computed(instructions: Sequence[Instruction]) -> tuple[frozenset[int], frozenset[int]]:
    """The layers that a rank computes on the host, and their parameter groups."""
    mine = [ins for ins in instructions if ins.op is Op.FORWARD and ins.stream == "host"]
    groups = {v.index for ins in mine for v in ins.reads if home(v).kind == "param"}
    return frozenset(layer for ins in mine for layer in ins.layers), frozenset(groups)
