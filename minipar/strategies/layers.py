"""From a schedule's actions to instructions on layers: who reads, writes and frees what.

    Forward(i) on a rank that holds layers 2:4      F 2 mb i   reads output(1)              writes output(2), saved(2)
                                                    F 3 mb i   reads output(2)              writes output(3), saved(3)
    Backward(i)                                     B 3 mb i   reads saved(3), output(2), grad_output(3)
                                                               writes grad_output(2), grad(3)   frees all that it read
                                                    B 2 mb i   ...

Autograd needs a layer's input until its backward is done, so B frees it. Layers before the first trainable one keep
nothing and have no backward. The last layer's forward includes the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from minipar.costs.shapes import Shape
from minipar.errors import PlanError
from minipar.program import (
    Action,
    Backward,
    Forward,
    Instruction,
    Op,
    Value,
    grad,
    grad_output,
    optimizer_state,
    output,
    param,
    saved,
)


@dataclass(frozen=True)
class Layout:
    """Which rank holds which layers: `dp` replicas of a pipeline of `pp` ranks; `split[s]` layers on stage s.

    rank = replica * pp + stage, so the ranks of one pipeline are neighbours.
    """

    shape: Shape
    dp: int
    pp: int
    split: tuple[int, ...]
    microbatches: int

    def rank(self, replica: int, stage: int) -> int:
        return replica * self.pp + stage

    def layers(self, stage: int) -> range:
        start = sum(self.split[:stage])
        return range(start, start + self.split[stage])

    @cached_property
    def _groups(self) -> list[list[int]]:
        stage_of = [stage for stage in range(self.pp) for _ in self.layers(stage)]
        found: list[list[int]] = [[] for _ in range(self.pp)]
        for k, group in enumerate(self.shape.groups):
            for stage in sorted({stage_of[layer] for layer in group.layers}):
                found[stage].append(k)
        return found

    def groups(self, stage: int) -> tuple[int, ...]:
        """Indices of the parameter groups with a layer on this stage."""
        return tuple(self._groups[stage])

    def trainable(self, stage: int) -> tuple[int, ...]:
        return tuple(k for k in self._groups[stage] if self.shape.groups[k].trainable)

    def holders(self, group: int) -> tuple[int, ...]:
        """All ranks, over stages and replicas, that hold parameters of this group: its gradients are summed there."""
        stages = [s for s in range(self.pp) if group in self._groups[s]]
        return tuple(sorted(self.rank(r, s) for r in range(self.dp) for s in stages))


def expand(actions: Sequence[Iterable[Action]], layout: Layout, step: int = 0) -> list[list[Instruction]]:
    """The instructions of one step, for each stage of one replica; `actions[s]` is the schedule of stage s."""
    shape, microbatches = layout.shape, layout.microbatches
    groups_of: list[list[int]] = [[] for _ in range(shape.layers)]
    for index, group in enumerate(shape.groups):
        for layer in group.layers:
            groups_of[layer].append(index)
    first = min((min(g.layers) for g in shape.groups if g.trainable), default=shape.layers)
    last = shape.layers - 1
    # One Value object each, shared by all instructions that name it: dictionaries then compare by identity.
    out = [[output(layer, i, step) for i in range(microbatches)] for layer in range(shape.layers)]
    gout = [[grad_output(layer, i, step) for i in range(microbatches)] for layer in range(shape.layers)]
    kept = [[saved(layer, i, step) for i in range(microbatches)] for layer in range(shape.layers)]
    params = [tuple(param(k) for k in groups_of[layer]) for layer in range(shape.layers)]
    grads = [tuple(grad(k) for k in groups_of[layer] if shape.groups[k].trainable) for layer in range(shape.layers)]

    def forward(layer: int, i: int) -> Instruction:
        reads = (out[layer - 1][i], *params[layer]) if layer else params[layer]
        if layer < first:
            frees: tuple[Value, ...] = (out[layer - 1][i],) if layer else ()
            if layer == last:
                frees += (out[layer][i],)  # a model with nothing to train: the loss is all that is wanted
            return Instruction(Op.FORWARD, (layer,), i, step, reads, (out[layer][i],), frees)
        return Instruction(Op.FORWARD, (layer,), i, step, reads, (out[layer][i], kept[layer][i]))

    def backward(layer: int, i: int) -> Instruction:
        held: tuple[Value, ...] = (kept[layer][i], out[layer][i] if layer == last else gout[layer][i])
        if layer:
            held += (out[layer - 1][i],)
        writes = ((gout[layer - 1][i], *grads[layer])) if layer > first else grads[layer]
        return Instruction(Op.BACKWARD, (layer,), i, step, held + params[layer], writes, held)

    ranks = []
    for stage, chosen in enumerate(actions):
        layers = layout.layers(stage)
        back = [layer for layer in reversed(layers) if layer >= first]
        instructions: list[Instruction] = []
        for action in chosen:
            i = action.microbatch
            if not 0 <= i < microbatches or action.chunk != 0:
                raise PlanError(f"{action}: stage {stage} has micro-batches 0 to {microbatches - 1} and only chunk 0")
            if isinstance(action, Forward):
                instructions += [forward(layer, i) for layer in layers]
            elif isinstance(action, Backward):
                instructions += [backward(layer, i) for layer in back]
            else:
                raise PlanError(f"{action}: a schedule yields Forward(i) and Backward(i)")
        ranks.append(instructions)
    return ranks


def step_of(layout: Layout, stage: int, step: int, keep: frozenset[int] = frozenset()) -> list[Instruction]:
    """The optimizer's STEP of a stage: reads every gradient, frees those whose group is not in `keep`."""
    groups = layout.trainable(stage)
    if not groups:
        return []
    params = tuple(param(k) for k in groups)
    states = tuple(optimizer_state(k) for k in groups)
    grads = tuple(grad(k) for k in groups)
    frees = tuple(grad(k) for k in groups if k not in keep)
    return [Instruction(Op.STEP, groups, -1, step, grads + params + states, params + states, frees)]


def state_of(layout: Layout, stage: int, keep: frozenset[int] = frozenset()) -> frozenset[Value]:
    """What a rank of this stage holds before and after a step: parameters, optimizer states, kept gradient buffers."""
    trainable = layout.trainable(stage)
    return frozenset(
        [param(k) for k in layout.groups(stage)]
        + [optimizer_state(k) for k in trainable]
        + [grad(k) for k in trainable if k in keep]
    )
