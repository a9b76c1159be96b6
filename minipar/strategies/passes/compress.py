"""Compression: the messages that sum gradients over the replicas are made smaller than the gradients.

    compress=bf16          [ g as 16-bit numbers ]                                    half of float32; also fp16
    compress=topk:0.01     [ the largest 1 % ][ where they are ]  gathered, added     the rest stays in the residual
    compress=powersgd:2    G is n x m:  P = G Q [ n x 2 ]  summed, made orthonormal   G is about P Q'
                                        Q = G' P [ m x 2 ] summed                     the rest stays in the residual

Sources: Lin et al., "Deep Gradient Compression", ICLR 2018 (the largest elements); Vogels et al., "PowerSGD: Practical
Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019 (low rank).

What topk and powersgd leave out is added to the next step's gradient (error feedback). Until then it is kept in
`residual(g)`, which is as large as the gradient, and which the collective reads and writes. Over all ranks, the sum of
what was sent and what is kept equals the sum of the gradients. In the program the sum is still an ALL_REDUCE; its parts
say what is sent. With parameter servers (`parameter_server.py`) what workers push is smaller in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minipar.errors import PlanError
from minipar.program import Instruction, Op, Part, residual
from minipar.program.shape import Shape
from minipar.strategies.draft import Draft


def compress(draft: Draft) -> Draft:
    """Sums of gradients carry less than the gradients; what is left out waits for the next step."""
    shape, choice = draft.layout.shape, draft.plan.compress
    draft = draft.each(lambda rank, row: [_smaller(ins, shape, choice) for ins in row])
    written = [{v for ins in row for v in ins.writes if v.kind == "residual"} for row in draft.ranks]
    return draft.each_state(lambda rank, held: held | written[rank])


def parse(value: object) -> str:
    """The plan's word for a compression. Errors: PlanError for anything else. R is a fraction of all numbers, or a
    rank."""
    text = str(value)
    kind, _, number = text.partition(":")
    if text in ("none", "bf16", "fp16"):
        return text
    try:
        if kind == "topk" and 0 < float(number) <= 1:
            return text
        if kind == "powersgd" and int(number) >= 1:
            return text
    except ValueError:
        pass
    raise PlanError(
        f"compress={value}: must be none, bf16, fp16, topk:R (R from 0 to 1: the part of all numbers that is sent) or "
        "powersgd:R (R at least 1: the rank)"
    )


def keeps_residual(choice: str) -> bool:
    """Whether a compression leaves something out, which is kept for the next step."""
    return choice.startswith(("topk", "powersgd"))


def _smaller(ins: Instruction, shape: Shape, choice: str) -> Instruction:
    """A sum of gradients with smaller messages; any other instruction unchanged."""
    if ins.op is not Op.ALL_REDUCE:
        return ins
    part = ins.parts[0]
    tensors = [(g, t) for g in ins.layers for t in range(len(shape.groups[g].tensors))]
    messages = [tensors] if part.layer < 0 else [[one] for one in tensors]
    parts = [part for one in messages for part in _carried(one, shape, choice, len(ins.group))]
    kept = tuple(map(residual, ins.layers)) if keeps_residual(choice) else ()
    return ins._replace(reads=ins.reads + kept, writes=ins.writes + kept, parts=tuple(parts))


def _carried(tensors: Sequence[tuple[int, int]], shape: Shape, choice: str, ranks: int) -> list[Part]:
    """The parts that are sent in place of one message of these tensors, given as (parameter group, place in it)."""
    layer = -1 if len(tensors) > 1 else tensors[0][0]
    sizes = [shape.groups[g].tensors[t] // shape.itemsize for g, t in tensors]
    kind, _, number = choice.partition(":")
    if kind in ("bf16", "fp16"):
        return [Part(Op.ALL_REDUCE, layer, 2 * sum(sizes))]
    if kind == "topk":
        return [Part(Op.ALL_GATHER, layer, ranks * row_bytes(top(sum(sizes), choice), shape.itemsize))]
    if not shape.dims:
        raise PlanError(f"compress={choice}: needs the shapes of all tensors; compile for shape_of(model)")
    first = second = 0
    for (g, t), size in zip(tensors, sizes, strict=True):
        factors = low_rank(shape.dims[g][t], int(number))
        first += size if factors is None else factors[0] * factors[2]
        second += 0 if factors is None else factors[1] * factors[2]
    return [Part(Op.ALL_REDUCE, layer, count * shape.itemsize) for count in (first, second) if count]


def top(count: int, choice: str) -> int:
    """How many of `count` numbers topk sends."""
    return min(count, max(1, math.ceil(float(choice.partition(":")[2]) * count)))


def row_bytes(count: int, itemsize: int) -> int:
    """Bytes of one rank's message with so many numbers and their places (32 bits each), rounded up to a multiple of
    8."""
    return -(-count * (itemsize + 4) // 8) * 8


def pushed_bytes(count: int, itemsize: int, choice: str) -> int:
    """Bytes in which a worker pushes so many numbers to a parameter server."""
    kind = choice.partition(":")[0]
    if kind == "topk":
        return row_bytes(top(count, choice), itemsize) if count else 0
    return count * (2 if kind in ("bf16", "fp16") else itemsize)


def low_rank(dims: Sequence[int], rank: int) -> tuple[int, int, int] | None:
    """Rows and columns of a tensor as a matrix, and the rank of its factors; None if the factors would not be
    smaller."""
    if len(dims) < 2:
        return None
    n, m = dims[0], math.prod(dims[1:])
    rank = min(rank, n, m)
    return (n, m, rank) if (n + m) * rank < n * m else None
