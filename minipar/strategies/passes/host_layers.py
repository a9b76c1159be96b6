"""Layers on the host: large and cheap layers, such as an embedding, are computed where there is memory for them.

    host_layers=0     F 0 on the host | FETCH output(0) | F 1 | F 2 | B 2 | B 1 | OFFLOAD grad_output(0) |
                      B 0 on the host | STEP 1:3 | STEP 0 on the host

Their parameters, gradients, optimizer states and saved values never leave the host. Only outputs and their gradients
are copied. This pass follows where each of these is, and adds a copy where it is needed in the other place.
"""

from __future__ import annotations

from collections.abc import Sequence

from minipar.errors import PlanError
from minipar.program import COMPUTE, MOVED, Instruction, Op, Value, host, tier
from minipar.program.shape import Shape
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import copy_of, in_two, renamed


def place(draft: Draft) -> Draft:
    """Some layers are computed on the host, where their parameters stay; what they read and write is copied."""
    layout = draft.layout
    draft = draft.each(lambda rank, row: _with_copies(row, layout))
    draft = draft.each_update(lambda rank, row: [each for ins in row for each in in_two(ins, layout.on_host)])
    return draft.each_state(
        lambda rank, held: [host(v) if layout.on_host(v.index) and tier(v) == "device" else v for v in held]
    )


def find(chosen: Sequence[str], shape: Shape) -> frozenset[int]:
    """The layers that were chosen, by name or number. Errors: PlanError for unknown ones, or half of a tied set."""
    if not chosen:
        return frozenset()
    known = shape.own_names
    names = {name: k for k, name in reversed(list(enumerate(known)))}
    numbers = {str(k): k for k in range(shape.own_layers)}
    for word in chosen:
        if word not in names and word not in numbers:
            possible = ", ".join(known[:8]) if known else f"0 to {shape.own_layers - 1}"
            raise PlanError(f"host_layers={word}: the model has no such layer; possible are {possible}")
    layers = frozenset(names.get(word, numbers.get(word, -1)) for word in chosen)
    for group in shape.groups:
        all_of_it = set(map(shape.own_layer, group.layers))
        inside = layers & all_of_it
        if inside and len(inside) < len(all_of_it):
            here, there = min(inside), min(all_of_it - inside)
            raise PlanError(
                f"host_layers={here}: layer {here} shares parameters with layer {there}; possible is both of them, "
                "or neither"
            )
    return layers


def _with_copies(instructions: Sequence[Instruction], layout: Layout) -> list[Instruction]:
    """The instructions, layer by layer, with some of them on the host."""
    result: list[Instruction] = []
    there: set[Value] = set()  # outputs and gradients that are on the host now
    for ins in instructions:
        on_host = ins.op in COMPUTE and layout.host.issuperset(ins.layers)
        for value in sorted({v for v in ins.reads if v.kind in MOVED}):
            if on_host and value not in there:
                result.append(copy_of(Op.OFFLOAD, value, host(value), value.step, (value,)))
                there.add(value)
            elif not on_host and value in there:
                result.append(copy_of(Op.FETCH, host(value), value, value.step, (host(value),)))
                there.discard(value)
        if on_host:
            result.append(renamed(ins, host)._replace(stream="host"))
            there.update(v for v in ins.writes if v.kind in MOVED)
        else:
            result.append(ins._replace(frees=tuple(host(v) if v in there else v for v in ins.frees)))
        there.difference_update(ins.frees)
    return result
