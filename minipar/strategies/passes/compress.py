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
say what is sent. Shorter numbers, and the largest ones, can be those of a piece of a gradient, too.
With ZeRO (REDUCE_SCATTER) shorter numbers travel as the gradients would. But what topk and powersgd send is made of
whole gradients, and is small. So all ranks get all of it, as they do without ZeRO, and each keeps its slices of the
sum; and all that it has left out, which is as large as its whole gradients.
Where ranks share layers, topk chooses among the elements of shards and among those of whole gradients in messages of
their own: ranks have other shards, and must choose the same elements of what they have whole, or it drifts apart. Of a
gradient of which each of them makes a part, the parts are summed first, exactly (`forms.py`); what is made smaller is
the sum over the replicas:

    tp=2 dp=2      ALL_REDUCE over 0,1 [ whole gradient ]     ALL_REDUCE over 0,2 [ the largest 1 % ]
With precision=bf16 gradients have 16 bits, and what is left out of them 32: so what rounding takes away is sent later,
too. The numbers that topk sends have 16 bits, the factors of powersgd 32.
With parameter servers (`parameter_server.py`) what workers push is smaller in the same way, each piece of a tensor by
itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minipar.errors import PlanError
from minipar.program import Instruction, Op, Part, home, piece_of, residual
from minipar.program.shape import Shape
from minipar.strategies.draft import Draft
from minipar.strategies.rewriting import of_groups


def compress(draft: Draft) -> Draft:
    """Sums of gradients carry less than the gradients; what is left out waits for the next step."""
    shape, choice, narrow = draft.layout.shape, draft.plan.compress, draft.plan.precision == "bf16"
    draft = draft.each(
        lambda rank, row: [
            _smaller(each, shape, choice, narrow) for ins in row for each in _of_one_form(ins, shape, choice)
        ]
    )
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


def _of_one_form(ins: Instruction, shape: Shape, choice: str) -> list[Instruction]:
    """A sum of gradients whose elements topk chooses among; as two sums, if some gradients are shards and others are
    whole."""
    if not choice.startswith("topk") or not _sums(ins):
        return [ins]
    shards = tuple(g for g in ins.layers if shape.groups[g].is_cut)
    wholes = tuple(g for g in ins.layers if g not in shards)
    if not shards or not wholes:
        return [ins]
    waits = tuple(value for value in ins.reads if value.index not in ins.layers)
    halves = (of_groups(ins, shards), of_groups(ins, wholes))
    return [half._replace(reads=half.reads + waits) for half in halves]


def _sums(ins: Instruction) -> bool:
    """Whether an instruction sums gradients."""
    return ins.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER) and home(ins.reads[0]).kind == "grad"


def _smaller(ins: Instruction, shape: Shape, choice: str, narrow: bool) -> Instruction:
    """A sum of gradients with smaller messages; any other instruction unchanged."""
    if not _sums(ins):
        return ins
    piece, part = piece_of(ins), ins.parts[0]
    if not keeps_residual(choice) and (piece or ins.op is Op.REDUCE_SCATTER):
        return ins._replace(parts=(part._replace(bytes=_in_16_bits(part.bytes, shape)),))
    if piece:
        sent = _largest((piece[1] - piece[0]) // shape.itemsize, shape, choice, len(ins.group), narrow)
        parts = [part._replace(op=Op.ALL_GATHER, bytes=sent)]
    else:
        tensors = [(g, t) for g in ins.layers for t in range(len(shape.groups[g].tensors))]
        messages = [tensors] if part.layer < 0 else [[one] for one in tensors]
        parts = [part for one in messages for part in _carried(one, shape, choice, len(ins.group), narrow)]
    kept = tuple(map(residual, ins.layers)) if keeps_residual(choice) else ()
    writes = ins.writes + kept if ins.writes else ()  # (the last piece writes for all)
    return ins._replace(reads=ins.reads + kept, writes=writes, parts=tuple(parts))


def _in_16_bits(size: int, shape: Shape) -> int:
    return 2 * size // shape.itemsize


def _carried(tensors: Sequence[tuple[int, int]], shape: Shape, choice: str, ranks: int, narrow: bool) -> list[Part]:
    """The parts that are sent in place of one message of these tensors, given as (parameter group, place in it). Their
    bytes are to those of the shape's tensors as what is sent is to the gradients, which with `narrow` have 16 bits."""
    layer = -1 if len(tensors) > 1 else tensors[0][0]
    sizes = [shape.groups[g].tensors[t] // shape.itemsize for g, t in tensors]
    kind, _, number = choice.partition(":")
    if kind in ("bf16", "fp16"):
        return [Part(Op.ALL_REDUCE, layer, 2 * sum(sizes))]
    item, wide = (2, 4) if narrow else (shape.itemsize, shape.itemsize)  # of a gradient, and of what is left out
    if kind == "topk":
        return [Part(Op.ALL_GATHER, layer, _largest(sum(sizes), shape, choice, ranks, narrow))]
    if not shape.dims:
        raise PlanError(f"compress={choice}: needs the shapes of all tensors; compile for shape_of(model)")
    first = second = 0
    for (g, t), size in zip(tensors, sizes, strict=True):
        factors = low_rank(shape.dims[g][t], int(number))
        first += size if factors is None else factors[0] * factors[2]
        second += 0 if factors is None else factors[1] * factors[2]
    scale = wide * shape.itemsize // item
    return [Part(Op.ALL_REDUCE, layer, count * scale) for count in (first, second) if count]


def _largest(count: int, shape: Shape, choice: str, ranks: int, narrow: bool) -> int:
    """Bytes in which all ranks send the largest of so many numbers, to those of the shape's tensors as above."""
    item = 2 if narrow else shape.itemsize
    return ranks * row_bytes(top(count, choice), item) * shape.itemsize // item


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
