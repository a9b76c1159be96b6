"""Collectives on outputs and their gradients, with tensor parallelism: a value gets another form.

    ALL_REDUCE       P -> R      [a] + [b]        ->  a + b on every rank
    ALL_GATHER       S1 -> R     [a] and [b]      ->  a b, end to end in dimension 1
    REDUCE_SCATTER   P -> S1     [a c] + [b d]    ->  a + b on one rank, c + d on the other
    ALL_TO_ALL       S1 -> S2    every rank cuts its shard in dimension 2, and joins what it gets in dimension 1
                     U0 -> U1    the same of parts as large as the counts say, which every rank has before it (N)

A value is a tensor, or several of them (`models/tensors.py`); those whose letter stays are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle
from minipar.errors import RankError
from minipar.models.nodes import Cut
from minipar.models.tensors import differentiable, map_tensors, tensors
from minipar.program import Instruction, Op, Value
from minipar.program.comm_volume import changing
from minipar.program.forms import (
    COUNTS,
    WHOLE,
    along,
    axes_in,
    changed_axis,
    letter_of,
    letters,
    needed,
    parts_of,
    rows_left,
    shard_of,
)

if TYPE_CHECKING:
    from minipar.sharding import unequal

Finish = Callable[[], Tensor]  # the tensor in its new form, once the messages are through


def start(
    ins: Instruction,
    live: dict[Value, Any],
    comm: Communicator,
    rows: int,
    weigh: Callable[[Value, Any], None],
    counts: Sequence[int] = (),
) -> list[Handle]:
    """Start a collective; the value is there in its new form when all handles were waited for.

    rows    of the micro-batch
    weigh   notes how large the value is in its new form, and what of it changes
    counts  how many ranks there are along each axis
    """
    (source,), (target,) = ins.reads, ins.writes
    if source not in live:  # a micro-batch without rows, which the other ranks have not either
        return []
    content = live[source]
    several = content if isinstance(content, list) else tensors(content)  # (gradients are a list, None among them)
    handles: list[Handle] = []
    changed: list[Finish | None] = []
    axis = changed_axis(source.form, target.form) or 0
    before, after = (letters(along(value.form, axis), len(several)) for value in (source, target))
    table: unequal.Table = []
    moving: list[Tensor | None] = []
    left = rows_between(source.form, target.form, counts, rows, len(several))
    for tensor, old, new, own_rows in zip(several, before, after, left, strict=True):
        if old == COUNTS and any(letter[0] == "U" for letter in before):
            from minipar.sharding import unequal

            table = unequal.table_of(tensor, len(ins.group))
        if old != new:
            moving.append(tensor)
        if old == new or tensor is None:
            changed.append(None)
            continue
        if old[0] == "U":
            handle, finish = _exchange(tensor.detach(), int(old[1]), table, ins, comm)
            moving[-1] = _like_equal_parts(tensor, int(old[1]), table, ins.group.index(comm.rank))
        else:
            handle, finish = _change(tensor.detach(), old, new, ins, comm, own_rows)
        handles.append(handle)
        changed.append(finish)

    def put() -> None:
        results = iter([old if finish is None else finish() for old, finish in zip(several, changed, strict=True)])
        live[target] = list(results) if isinstance(content, list) else _rebuilt(content, results)
        weigh(target, live[target])

    weigh(changing(ins), moving)
    if not handles:
        put()
        return []
    return [*handles[:-1], handles[-1].then(put)]


def rows_between(
    before: str, after: str, counts: Sequence[int], rows: int, tensors_of_it: int, axis: int | None = None
) -> list[int]:
    """For each tensor of a value that changes its form along an axis, how many of the micro-batch's rows are left to
    that axis by those that cut before it. `axis`: by default the only one on which the forms differ."""
    axis = changed_axis(before, after) or 0 if axis is None else axis
    both = zip(letters(before, tensors_of_it), letters(after, tensors_of_it), strict=True)
    return [rows_left(old if "r" in old else new, axis, counts, rows) for old, new in both]


def _rebuilt(content: Any, parts: Iterator[Any]) -> Any:
    return map_tensors(content, lambda _: next(parts))


def _change(
    tensor: Tensor, old: str, new: str, ins: Instruction, comm: Communicator, rows: int
) -> tuple[Handle, Finish]:
    """Start to change one tensor: the message, and what makes the tensor in its new form of it."""
    count, group = len(ins.group), ins.group
    if ins.op is Op.ALL_REDUCE:
        # A copy: autograd may have saved the tensor itself, or what it is a view of.
        whole = tensor.clone(memory_format=torch.contiguous_format)
        return comm.iallreduce(whole, group, str(ins)), lambda: whole
    if ins.op is Op.REDUCE_SCATTER:
        packed = torch.stack(_parts(tensor, new, count, rows))
        part = torch.empty_like(packed[0])
        return comm.ireduce_scatter(packed, part, group), lambda: part
    if ins.op is Op.ALL_GATHER:
        parts = torch.empty((count, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        found = comm.iall_gather(tensor.contiguous().view(-1), parts.view(-1), group)
        handle = found[0] if found else Handle(None, None, set())
        return handle, partial(_joined, parts, old, rows)
    exchanged = torch.stack(_parts(tensor, new, count, rows))
    got = torch.empty_like(exchanged)
    return comm.iall_to_all(exchanged, got, group), partial(_joined, got, old, rows)


def _exchange(
    tensor: Tensor, of: int, table: unequal.Table, ins: Instruction, comm: Communicator
) -> tuple[Handle, Finish]:
    """Start to exchange unequal parts: every rank has the table, and so knows what it gets."""
    from minipar.sharding import unequal

    index = ins.group.index(comm.rank)
    sizes = unequal.sizes(table, of)
    taken = [row[index] for row in sizes]
    sent = torch.cat(unequal.parts(tensor, table, of, index))
    got = sent.new_empty((sum(taken), *sent.shape[1:]))
    each = math.prod(sent.shape[1:])
    handle = comm.iall_to_all(sent, got, ins.group, [[each * size for size in row] for row in sizes])
    return handle, lambda: unequal.joined(got.split(taken), table, 1 - of, index)


def _like_equal_parts(tensor: Tensor, of: int, table: unequal.Table, index: int) -> Tensor:
    """A tensor without memory, of which a rank would send as many bytes, if its parts were equal."""
    from minipar.sharding import unequal

    sent = unequal.sizes(table, of)[index]
    nbytes = (sum(sent) - sent[index]) * math.prod(tensor.shape[1:]) * tensor.itemsize
    return torch.empty(round(nbytes * len(sent) / (len(sent) - 1)), dtype=torch.uint8, device="meta")


def in_gradient(given: Any, reads: str) -> list[Tensor]:
    """The tensors of a node's input for which its gradient has a place: those that can have one, and counts."""
    if COUNTS not in reads:
        return differentiable(given)
    found = zip(tensors(given), letters(reads), strict=True)
    return [tensor for tensor, letter in found if COUNTS in letter or differentiable(tensor)]


def with_counts(gradients: Sequence[Tensor | None], given: Any, reads: str) -> list[Tensor | None]:
    """The gradients of a node's input, and beside them the counts that it was given: `reads` is the input's form."""
    if COUNTS not in reads:
        return list(gradients)
    rest = iter(gradients)
    return [next(rest) if differentiable(tensor) else tensor for tensor in in_gradient(given, reads)]


def without_counts(gradients: list[Tensor | None], form: str) -> list[Tensor | None]:
    """The gradients alone, as autograd takes them."""
    if COUNTS not in form:
        return gradients
    return [gradient for gradient, letter in zip(gradients, letters(form), strict=True) if COUNTS not in letter]


Places = Sequence[tuple[int, int]]  # along each axis the place of a rank, and how many ranks there are


def own_shard(content: Any, form: str, places: Places, rows: int) -> Any:
    """What a rank reads of a value: of tensors with the letter C its shard, the others as they are."""
    if "C" not in form:
        return content
    several = content if isinstance(content, list) else tensors(content)

    def own(tensor: Tensor | None, letter: str) -> Tensor | None:
        parts, counts = parts_of(letter, len(places)), [count for _, count in places]
        for axis in range(len(places)):
            if parts[axis][0] == "C" and tensor is not None:
                own = letter_of(["S" + part[1:] if part[0] == "C" else part for part in parts])
                left = rows_left(own, axis, counts, rows)
                tensor = _part(tensor, parts[axis], *places[axis], left).contiguous()
        return tensor

    pieces = [own(tensor, letter) for tensor, letter in zip(several, letters(form), strict=True)]
    return pieces if isinstance(content, list) else _rebuilt(content, iter(pieces))


def part_of_batch(content: Any, form: str, places: Places) -> Any:
    """What a rank has of rows, of which ranks have parts along some axes: `form` of "S0" rows, of "S1" tokens. Tensors
    without such a dimension are the same for all. Errors: RankError for parts that are not equal."""
    if not form:
        return content
    for (index, count), part in zip(places, parts_of(form, len(places)), strict=True):
        if part != WHOLE:
            content = _part_along(content, int(part[1:]), index, count)
    return content


def _part_along(content: Any, dim: int, index: int, count: int) -> Any:

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim:
            return tensor
        if tensor.shape[dim] % count:
            what = "rows of a micro-batch" if dim == 0 else "tokens of a sequence"
            raise RankError(
                f"{tensor.shape[dim]} {what} cannot be divided among {count} ranks in equal parts; possible are "
                f"multiples of {count}"
            )
        return tensor.chunk(count, dim)[index].contiguous()

    return map_tensors(content, part)


def on_one_rank(content: Any, before: str, after: str, counts: Sequence[int], rows: int) -> Any:
    """A value of the shapes that it would have in another form, made by one rank alone: for measuring, since its
    numbers are not those of the other ranks. Unequal shards are as large as if all columns of the counts were alike.

    counts   how many ranks there are along each axis
    """
    found = tensors(content)
    for axis in reversed(range(axes_in(before, after))):
        olds, news = (letters(along(form, axis), len(found)) for form in (before, after))
        left = rows_between(before, needed(after), counts, rows, len(found), axis)
        both = zip(found, olds, news, left, strict=True)
        found = [_shaped(tensor, old, new, counts[axis], of) for tensor, old, new, of in both]
    return _rebuilt(content, iter(found))


def _shaped(tensor: Tensor, old: str, new: str, count: int, rows: int) -> Tensor:
    if new[0] == "U" or old == new:
        return tensor
    if old[0] == "S":
        tensor = _joined([tensor] * count, old, rows)
    if (old[0], new) == ("S", COUNTS):
        return _balanced(tensor, count)
    return _part(tensor, new, 0, count, rows).contiguous() if new[0] in "SC" else tensor


def _balanced(counts: Tensor, count: int) -> Tensor:
    """Counts of the same sum, of which each of `count` ranks has the same share, and its columns as equal ones as can
    be."""
    columns = counts.shape[1]
    share, wide = int(counts.sum()) // count, columns // count
    even = torch.zeros_like(counts)
    even[0] = torch.tensor([share // wide + (x % wide < share % wide) for x in range(columns)])
    return even


def _parts(tensor: Tensor, letter: str, count: int, rows: int) -> list[Tensor]:
    """The shards of a tensor that is whole."""
    return [_part(tensor, letter, index, count, rows) for index in range(count)]


def _part(tensor: Tensor, letter: str, index: int, count: int, rows: int) -> Tensor:
    """One of them."""
    dim, pieces = shard_of(letter, rows)
    return tensor.chunk(count, dim)[index] if pieces == 1 else Cut(dim, index, count, pieces).of(tensor)


def _joined(parts: Tensor | Sequence[Tensor], letter: str, rows: int) -> Tensor:
    """The whole tensor of its shards."""
    dim, pieces = shard_of(letter, rows)
    return Cut(dim, 0, len(parts), pieces).joined(list(parts))
