"""From a schedule's actions to instructions on layers, which say what they read, write and free.

    Forward(i) on a rank that holds layers 2:4      F 2 mb i   reads output(1)              writes output(2), saved(2)
                                                    F 3 mb i   reads output(2)              writes output(3), saved(3)
    Backward(i)                                     B 3 mb i   reads saved(3), output(2), grad_output(3)
                                                               writes grad_output(2), grad(3)   frees all that it read
                                                    B 2 mb i   ...

    BackwardInput(i)                                I 3 mb i   as B, but writes saved_weight(3) instead of grad(3)
    BackwardWeight(i)                               W 3 mb i   reads saved_weight(3), writes grad(3), frees what it read

Autograd needs a layer's input until the layer's backward is done, so B frees it. After I, saved_weight owns all that W
still needs: for a product of matrices, the layer's input and the gradient of its output. Layers before the first
trainable one save nothing and have no backward. The last layer's forward includes the loss.

In a model with branches, several layers may read the output of one layer (a fork). Then there is a grad_output for
every edge, and the layer's backward adds them up. On each rank an output is freed after its last read. A layer that
reads several outputs (a join) is given a tuple of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from minipar.errors import PlanError
from minipar.program import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Op,
    Value,
    grad,
    optimizer_state,
    param,
)
from minipar.program.edges import wiring
from minipar.strategies.draft import Draft
from minipar.strategies.layout import Layout
from minipar.strategies.rewriting import free_at_last_read

REST = tuple(Instruction._field_defaults.values())[3:]  # defaults of the fields after `frees`


def expand_layers(draft: Draft) -> Draft:
    """Each action of the schedule becomes one instruction for each layer; STEP updates the layers."""
    layout, ranks = draft.layout, range(draft.layout.pp)
    rows = expand(draft.actions, layout, draft.step, draft.steps if draft.plan.asynchronous else 1)
    update = tuple(tuple(step_of(layout, rank, draft.step)) for rank in ranks)
    return replace(
        draft, ranks=tuple(map(tuple, rows)), update=update, state=tuple(state_of(layout, rank) for rank in ranks)
    )


def expand(
    actions: Sequence[Iterable[Action]], layout: Layout, step: int = 0, steps: int = 1
) -> list[list[Instruction]]:
    """The instructions of one step, for each rank of one replica; `actions[r]` is the schedule of rank r.

    steps   for a schedule without flushes: the number of steps through which its actions count micro-batches
    """
    shape, microbatches = layout.shape, layout.microbatches * steps
    # micro-batch and step of each micro-batch of the actions
    of = [(i, step + later) for later in range(steps) for i in range(layout.microbatches)]
    groups_of: list[list[int]] = [[] for _ in range(shape.layers)]
    for index, group in enumerate(shape.groups):
        for layer in group.layers:
            groups_of[layer].append(index)
    first = layout.first_trainable
    last = shape.layers - 1
    wires = wiring(shape.edges, shape.layers)
    into = [zip(wires.inputs[layer], wires.into[layer], strict=True) for layer in range(shape.layers)]
    back = [[e for a, e in found if a >= first] for found in into]  # the edges to which a backward gives a gradient
    # One Value object each, shared by all instructions that name it: dictionaries then compare by identity.
    new = tuple.__new__  # (takes half the time of calling Value or Instruction)

    def values(kind: str, count: int) -> list[list[Value]]:
        return [[new(Value, (kind, index, *place, "")) for place in of] for index in range(count)]

    out, kept, left = (values(kind, shape.layers) for kind in ("output", "saved", "saved_weight"))
    gout = values("grad_output", max(shape.layers, len(shape.edges)))
    params = [tuple(param(k) for k in groups_of[layer]) for layer in range(shape.layers)]
    grads = [tuple(grad(k) for k in groups_of[layer] if shape.groups[k].trainable) for layer in range(shape.layers)]
    single = [(layer,) for layer in range(shape.layers)]

    FORWARD, WHOLE, INPUT, WEIGHT = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT

    def forward(layer: int, i: int) -> Instruction:
        given = tuple([out[a][i] for a in wires.inputs[layer]])
        reads = given + params[layer]
        if layer < first:
            gone = () if shape.edges else given
            if layer == last:
                gone += (out[layer][i],)  # in a model with nothing to train only the loss is needed
            return Instruction(FORWARD, single[layer], *of[i], reads, (out[layer][i],), gone)
        writes = out[layer][i], kept[layer][i]
        return new(Instruction, (FORWARD, single[layer], *of[i], reads, writes, (), *REST))

    def backward(layer: int, i: int, whole: bool) -> Instruction:
        came = (kept[layer][i], *[gout[e][i] for e in wires.out[layer]])
        held = (*came, out[layer][i]) if layer == last else came
        held += tuple([out[a][i] for a in wires.inputs[layer]])
        writes = grads[layer] if whole else (left[layer][i],)
        writes = (*[gout[e][i] for e in back[layer]], *writes)
        op, reads = WHOLE if whole else INPUT, held + params[layer]
        return new(Instruction, (op, single[layer], *of[i], reads, writes, came if shape.edges else held, *REST))

    def weights(layer: int, i: int) -> Instruction:
        mine = (left[layer][i],)
        reads = mine + params[layer]
        return new(Instruction, (WEIGHT, single[layer], *of[i], reads, grads[layer], mine, *REST))

    ranks = []
    for rank, chosen in enumerate(actions):
        chunks = layout.chunks(rank)
        backs = [[layer for layer in reversed(layers) if layer >= first] for layers in chunks]
        instructions: list[Instruction] = []
        for action in chosen:
            i = action.microbatch
            if not 0 <= i < microbatches or not 0 <= action.chunk < len(chunks):
                has = "only chunk 0" if len(chunks) == 1 else f"chunks 0 to {len(chunks) - 1}"
                raise PlanError(f"{action}: rank {rank} has micro-batches 0 to {microbatches - 1} and {has}")
            if isinstance(action, Forward):
                for layer in chunks[action.chunk]:
                    instructions.append(forward(layer, i))
            elif isinstance(action, (Backward, BackwardInput)):
                whole = isinstance(action, Backward)
                for layer in backs[action.chunk]:
                    instructions.append(backward(layer, i, whole))
            elif isinstance(action, BackwardWeight):
                for layer in backs[action.chunk]:
                    instructions.append(weights(layer, i))
            else:
                raise PlanError(
                    f"{action}: a schedule yields Forward(i, chunk), Backward, BackwardInput, BackwardWeight"
                )
        if shape.edges:
            outputs = {v for ins in instructions for v in ins.reads if v.kind == "output"}
            outputs.difference_update(*(ins.frees for ins in instructions))
            instructions = free_at_last_read(instructions, outputs.__contains__)
        ranks.append(instructions)
    return ranks


def step_of(layout: Layout, rank: int, step: int) -> list[Instruction]:
    """The optimizer's STEP of a rank. It reads every gradient and frees it. [] if the rank has nothing to train."""
    groups = layout.trainable(rank)
    if not groups:
        return []
    params, states, grads = (tuple(map(name, groups)) for name in (param, optimizer_state, grad))
    return [Instruction(Op.STEP, groups, -1, step, grads + params + states, params + states, grads)]


def state_of(layout: Layout, rank: int) -> frozenset[Value]:
    """What a rank holds before and after a step: all parameters, and optimizer states of the trainable ones."""
    return frozenset(map(param, layout.groups(rank))) | frozenset(map(optimizer_state, layout.trainable(rank)))
