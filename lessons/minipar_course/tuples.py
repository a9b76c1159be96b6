"""The lists of lesson 18 as minipar's own objects: `verify` and `simulate` read the program, pictures the trace.

    program = to_program(rows, stages=2)                  rows: one list of tuples for each rank (see small_engine.py)
    verify(program), simulate(program)
    to_trace(program, times)                              times: (start, end) of each tuple, by rank

What each tuple reads and writes is what the interpreter takes from its tables and puts there, named layer by layer:

    F i       reads the output before its stage and the weights, writes outputs and what autograd saves of each layer
    F0 i      the same, but writes the last output only;  R i  writes what F0 left out
    B i       reads all of that and the gradient that came, adds to the weights' and writes the one that goes
    SUM       whole gradients on each rank;  SCATTER, STEP ranks, GATHER  one slice of gradients, states, weights

A value is freed by the last tuple that reads it. Nothing is added or mended: where a SEND is missing, so it is in the
program, and `verify` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minipar.errors import ProgramError
from minipar.prediction.simulator import simulate
from minipar.program import Group, Instruction, Op, Part, Program, Value, values
from minipar.program.mesh import Mesh
from minipar.program.shape import Shape
from minipar.trace import Trace

_OPS = {
    "F": Op.FORWARD, "F0": Op.FORWARD, "R": Op.RECOMPUTE, "B": Op.BACKWARD, "STEP": Op.STEP, "SEND": Op.SEND,
    "RECV": Op.RECV, "SUM": Op.ALL_REDUCE, "SCATTER": Op.REDUCE_SCATTER, "GATHER": Op.ALL_GATHER,
}  # fmt: skip
_LENGTHS = {"F": (2,), "F0": (2,), "R": (2,), "B": (2,), "STEP": (1, 2), "SEND": (4,), "RECV": (4,), "SUM": (2,),
            "SCATTER": (2,), "GATHER": (2,)}  # fmt: skip


def to_program(rows: Sequence[Sequence[tuple[Any, ...]]], stages: int, shape: Shape | None = None) -> Program:
    """The program that these lists are, one list for each rank; rank = replica * stages + stage.

    shape   of the model, whose layers are cut as `small_engine.Stage` cuts them; else each stage is one layer
    Errors: ProgramError for what is no such list.
    """
    layers = stages if shape is None else shape.layers
    groups = tuple(Group((layer,), (4,)) for layer in range(layers)) if shape is None else shape.groups
    sliced = any(ins[:1] == ("SCATTER",) for row in rows for ins in row)
    summed = any(ins[:1] == ("SUM",) for row in rows for ins in row)
    ranks, state = [], []
    for rank, row in enumerate(rows):
        k, (size, larger) = rank % stages, divmod(layers, stages)
        first, end = (j * size + min(j, larger) for j in (k, k + 1))
        for ins in row:
            if not isinstance(ins, tuple) or not ins or len(ins) not in _LENGTHS.get(ins[0], ()):
                raise ProgramError(f"rank {rank}: {ins!r} is no instruction of lesson 18")
        ranks.append(_freed([_instruction(ins, first, end, groups) for ins in row], keep=summed))
        mine = range(first, end)
        held = {values.param(g) for g in mine} | {
            (values.optimizer_shard if sliced else values.optimizer_state)(g) for g in mine
        }
        state.append(frozenset(held | ({values.grad(g) for g in mine} if summed else set())))
    microbatches = sum(ins[0] in ("F", "F0") for ins in rows[0])
    mesh = Mesh(dp=len(rows) // stages, pp=stages)
    return Program(tuple(ranks), layers, microbatches, groups, mesh, tuple(state), name="lists of lesson 18")


def to_trace(program: Program, times: Sequence[Sequence[tuple[float, float]]], like: Trace | None = None) -> Trace:
    """When each tuple began and ended on each rank, in seconds, as a measured trace of the program made of them.

    like    another trace of the same program, that knows the bytes of its values; else memory is counted in activations
    """
    first = min(start for row in times for start, _ in row)
    starts, ends = ([[pair[k] - first for pair in row] for row in times] for k in (0, 1))
    known = like or simulate(program)
    return Trace(program, starts, ends, known.size, "measured", known.unit)


def _instruction(ins: tuple[Any, ...], first: int, end: int, groups: Sequence[Group]) -> Instruction:
    """One tuple of a rank whose stage has the layers from `first` to before `end`."""
    op, mine = ins[0], tuple(range(first, end))
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    params, down = tuple(map(values.param, mine)), tuple(reversed(mine))
    if op in ("SEND", "RECV"):
        _, what, i, peer = ins
        ahead = (what == "output") == (op == "SEND")  # the message crosses the border behind this stage
        value = (values.output if what == "output" else values.grad_output)((end if ahead else first) - 1, i)
        reads, writes = ((value,), ()) if op == "SEND" else ((), (value,))
        return Instruction(_OPS[op], (value.index,), i, 0, reads, writes, stream=f"{op.lower()} {peer}", peer=peer)
    if op in ("F", "F0", "R"):
        i = ins[1]
        reads = (*([values.output(first - 1, i)] if first else []), *params)
        written: list[Value] = []
        for layer in mine:
            if (op == "F" or layer == end - 1) if op != "R" else layer < end - 1:
                written.append(values.output(layer, i))
            if op != "F0":
                written.append(values.saved(layer, i))
        return Instruction(_OPS[op], mine, i, 0, reads, tuple(written), parts=_parts(_OPS[op], mine))
    if op == "B":
        i, read = ins[1], []
        for layer in down:
            read.append(values.saved(layer, i))
            if layer == end - 1:
                read.append(values.output(layer, i) if end == len(groups) else values.grad_output(layer, i))
            read += [values.output(layer - 1, i)] if layer else []
            read.append(values.param(layer))
        out = (*map(values.grad, down[:-1]), *([values.grad_output(first - 1, i)] if first else []), values.grad(first))
        return Instruction(_OPS[op], mine, i, 0, tuple(read), out, parts=_parts(_OPS[op], down))
    if op == "STEP":
        whole = len(ins) == 1
        states = tuple(map(values.optimizer_state if whole else values.optimizer_shard, mine))
        gradients = tuple(map(values.grad if whole else values.grad_shard, mine))
        return Instruction(Op.STEP, mine, -1, 0, (*gradients, *params, *states), (*params, *states))
    if op == "SUM":
        reads = writes = tuple(map(values.grad, down))
    elif op == "SCATTER":
        reads, writes = tuple(map(values.grad, down)), (*map(values.grad_shard, down), *map(values.buffer, down))
    else:
        reads = writes = params
    named, ranks = mine if op == "GATHER" else down, tuple(ins[1])
    sizes = {g: sum(groups[g].tensors) for g in mine}
    parts = (
        tuple(Part(_OPS[op], g, sizes[g]) for g in mine)
        if op == "GATHER"
        else (Part(_OPS[op], -1, sum(sizes.values())),)
    )
    stream = f"group {','.join(map(str, ranks))}"
    return Instruction(_OPS[op], named, -1, 0, reads, writes, stream=stream, group=ranks, parts=parts)


def _parts(op: Op, layers: tuple[int, ...]) -> tuple[Part, ...]:
    return tuple(Part(op, layer) for layer in layers) if len(layers) > 1 else ()


def _freed(row: list[Instruction], keep: bool) -> tuple[Instruction, ...]:
    """Let the last instruction that reads a value free it, but for weights, states, and gradients if `keep`."""
    last = {value: k for k, ins in enumerate(row) for value in ins.reads}
    last |= {value: k for k, ins in enumerate(row) for value in ins.writes if value.kind == "buffer"}
    stay = ("param", "optimizer_state", "optimizer_shard", *(("grad",) if keep else ()))
    return tuple(
        ins._replace(frees=tuple(v for v in (*ins.reads, *ins.writes) if v.kind not in stay and last.get(v) == k))
        for k, ins in enumerate(row)
    )
