"""Where the autograd graphs of a rank are cut. The program of the rank decides it."""

from __future__ import annotations

from minipar.program import BACKWARDS, Op, Program

_GRAPH = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)


def pieces_of(program: Program, rank: int) -> dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]]:
    """For each compute instruction, its layers in runs; the graph must be cut between two runs.

    There is a cut before each layer at which some forward, recomputation or backward of the same micro-batch begins,
    and before the first trainable layer. Where backwards are split, there is also a cut after the first trainable
    layer, because that layer has no input half. With tensor parallelism there is a cut where a rank takes its shard of
    a whole value.
    """
    cuts: dict[int, set[int]] = {}
    first = {program.first_trainable}
    if any(ins.op is Op.BACKWARD_INPUT for ins in program.ranks[rank]):
        first.add(program.first_trainable + 1)
    first |= {l for l, forms in enumerate(program.forms) if "C" in forms.reads}
    first |= {l + 1 for l, forms in enumerate(program.forms) if "C" in forms.grad_reads}
    for ins in program.ranks[rank]:
        if ins.op in _GRAPH:
            cuts.setdefault(ins.microbatch, set(first)).add(ins.layers[0])
    pieces: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {}
    for ins in program.ranks[rank]:
        if ins.op in _GRAPH:
            starts = [k for k, layer in enumerate(ins.layers) if not k or layer in cuts[ins.microbatch]]
            ends = [*starts[1:], len(ins.layers)]
            pieces[ins.layers, ins.microbatch] = [ins.layers[a:b] for a, b in zip(starts, ends, strict=True)]
    return pieces
