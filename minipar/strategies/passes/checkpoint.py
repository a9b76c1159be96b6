"""Checkpointing: forward keeps only some outputs; before their backward the layers between them run forward again.

    without                                       checkpoint=2 (segments of two layers)

    F0 saved(0)                                   F0
    F1 saved(1), output(0)                        F1            frees output(0); output(1) stays: a checkpoint
    F2 saved(2), output(1)                        F2 saved(2)   the last segment keeps what it saves,
    F3 saved(3), output(2)                        F3 saved(3)   since its backward comes next
    B3, B2, B1, B0                                B3, B2
                                                  R0 saved(0)   writes output(0), too
                                                  R1 saved(1)   not its output: B2, which needed it, is done
                                                  B1, B0

This pass removes what FORWARD saves, and puts RECOMPUTE before BACKWARD. A schedule of `Move`s says what both read,
write and free. Such a schedule can also run a layer three times or more (R without saving). A segment whose backward
comes right after its forward on the same rank is not recomputed.

RECOMPUTE needs no message: it reads a checkpoint of its own rank. It comes before the backward that waits for a
gradient, so it runs while the gradient is under way.

In a model with branches a segment also ends where a layer reads several outputs, or where several layers read one. All
outputs at which a segment ends are checkpoints.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; for budgets Griewank and Walther 2000
(revolve) and Beaumont et al. 2019 (rotor), see `minipar.costs.reversal`. `segments.py` turns `checkpoint=` into moves.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import groupby, pairwise

from minipar.costs.recomputation import Move, at_once, halves, in_segments
from minipar.program import Instruction, LayerRun, Op, output, saved
from minipar.program.edges import wiring
from minipar.strategies.draft import Draft
from minipar.strategies.segments import cut

NEEDS_SAVED = (Op.BACKWARD, Op.BACKWARD_INPUT)


def recompute_segments(draft: Draft) -> Draft:
    """Forward keeps only checkpoints; the layers between them run forward again before their backward."""
    layout, moves = draft.layout, draft.moves

    def chunks(rank: int) -> list[tuple[range, Sequence[Move]]]:
        if layout.shape.edges:
            return [(segment, in_segments(len(segment), [range(len(segment))])) for segment in _segments(draft, rank)]
        return [(layout.trained(stage), moves[stage]) for stage in layout.placement[rank]]

    return draft.each(lambda rank, row: recompute(row, chunks(rank)))


def recompute(
    instructions: Sequence[Instruction],
    chunks: Sequence[tuple[range, Sequence[Move]]],
    microbatches: Container[int] | None = None,
) -> list[Instruction]:
    """One rank's instructions, layer by layer, in which every micro-batch follows the schedule of each chunk.

    instructions   as `layers.expand` gives them
    chunks         for each chunk, its layers that have a backward, and their schedule, in which the first of these
                   layers has number 0 (`segments.schedules`)
    microbatches   the micro-batches that follow the schedule; the others keep everything. Default: all

    Of a split backward only the input half needs the recomputation. What it leaves for the weight half stays in memory.
    """
    if not any(move.op is Op.RECOMPUTE for _, schedule in chunks for move in schedule):
        return list(instructions)
    chunk_of = {layer: c for c, (layers, _) in enumerate(chunks) for layer in layers}
    forwards = {(ins.layers[0], ins.microbatch, ins.step): ins for ins in instructions if ins.op is Op.FORWARD}
    backwards = {(ins.layers[0], ins.microbatch, ins.step): ins for ins in instructions if ins.op in NEEDS_SAVED}

    def action(ins: Instruction) -> tuple[Op, int, int, int]:
        return ins.op, ins.microbatch, ins.step, chunk_of.get(ins.layers[0], -1)

    again = [(halves(schedule), halves(at_once(schedule))) for _, schedule in chunks]
    runs = [(key, list(run)) for key, run in groupby(instructions, key=action)]
    result: list[Instruction] = []
    kept: set[tuple[int, int, int]] = set()  # micro-batch, step and chunk whose backward comes right after the forward
    for k, ((op, i, step, c), run) in enumerate(runs):
        spared = microbatches is not None and i not in microbatches
        if c < 0 or op is Op.BACKWARD_WEIGHT or not chunks[c][1] or spared:
            result += run
            continue
        following = runs[k + 1][0] if k + 1 < len(runs) else None
        if op is Op.FORWARD and following and following[0] in NEEDS_SAVED and following[1:] == (i, step, c):
            kept.add((i, step, c))
        layers = chunks[c][0]
        later, immediate = again[c]
        forward, backward = immediate if (i, step, c) in kept else later
        for ins in run:
            if ins.layers[0] == (layers[0] if op is Op.FORWARD else layers[-1]):  # (once for each action)
                part = forward if op is Op.FORWARD else backward
                result += [_moved(move, (layers[0] + move.layer, i, step), forwards, backwards) for move in part]
    return result


def _segments(draft: Draft, rank: int) -> list[range]:
    """The segments of a rank of a model with branches: each is a part of a chain of its trained layers."""
    layout = draft.layout
    chained, found = wiring(layout.shape.edges, layout.shape.layers).chained, []
    for part in map(layout.trained, layout.placement[rank]):
        begins = [layer for layer in part if layer == part.start or layer not in chained]
        for start, stop in pairwise([*begins, part.stop]):
            cuts = cut(draft.plan.checkpoint, range(start, stop), None, 1)
            found += [range(start + one.start, start + one.stop) for one in cuts]
    return found


def _moved(
    move: Move, place: LayerRun, forwards: dict[LayerRun, Instruction], backwards: dict[LayerRun, Instruction]
) -> Instruction:
    """The instruction of a layer and micro-batch, as a move of the schedule changes it."""
    if move.op is Op.BACKWARD:
        return backwards[place]
    # (the user's own schedule may forget a forward; the verifier reports that, not this pass)
    ins = forwards.get(place) or backwards[place]
    layer, i, step = place
    writes = (output(layer, i, step),) * move.hands + (saved(layer, i, step),) * move.saves
    frees = (ins.frees if move.op is Op.FORWARD else ()) + (output(layer - 1, i, step),) * move.drops
    return ins._replace(op=move.op, writes=writes, frees=frees)
