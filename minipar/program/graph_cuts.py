"""Where the autograd graphs of a rank are cut. The program of the rank decides it."""

from __future__ import annotations

from minipar.program import BACKWARDS, Op, Program

_GRAPH = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)


def pieces_of(program: Program, rank: int) -> dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]]:
    """For each compute instruction, its layers in runs; the graph must be cut between two runs.

    There is a cut before each layer at which some forward, recomputation or backward of the same micro-batch begins,
    and before the first trainable layer. Where backwards are split, there is also a cut after the first trainable
    layer, because that layer has no input half.
    """
    cuts: dict[int, set[int]] = {}
    first = {program.first_trainable}
    if any(ins.op is Op.BACKWARD_INPUT for ins in program.ranks[rank]):
        first.add(program.first_trainable + 1)
    for ins in program.ranks[rank]:
        if ins.op in _GRAPH:
            cuts.setdefault(ins.microbatch, set(first)).add(ins.layers[0])
    pieces: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}
    for ins in program.ranks[rank]:
        if ins.op in _GRAPH:
            runs: list[list[int]] = []
            for layer in ins.layers:
                if not runs or layer in cuts[ins.microbatch]:
                    runs.append([])
                runs[-1].append(layer)
            pieces[ins.layers, ins.microbatch] = [tuple(run) for run in runs]
    return pieces
