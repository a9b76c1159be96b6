"""Collectives on outputs and their gradients, with tensor parallelism: a value gets another form.

    ALL_REDUCE       P -> R      [a] + [b]        ->  a + b on every rank
    ALL_GATHER       S1 -> R     [a] and [b]      ->  a b, end to end in dimension 1
    REDUCE_SCATTER   P -> S1     [a c] + [b d]    ->  a + b on one rank, c + d on the other
    ALL_TO_ALL       S1 -> S2    every rank cuts its shard in dimension 2, and joins what it gets in dimension 1

A value is a tensor, or several of them (`models/tensors.py`); those whose letter stays are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle, Then
from minipar.models.tensors import map_tensors, tensors
from minipar.program import Instruction, Op, Value
from minipar.program.comm_volume import changing
from minipar.program.forms import letters

Finish = Callable[[], Tensor]  # the tensor in its new form, once the messages are through


def start(
    ins: Instruction, live: dict[Value, Any], comm: Communicator, weigh: Callable[[Value, Any], None]
) -> list[Handle]:
    """Start a collective; the value is there in its new form when all handles were waited for.

    weigh   notes how large the value is in its new form, and what of it changes
    """
    (source,), (target,) = ins.reads, ins.writes
    content = live[source]
    several = content if isinstance(content, list) else tensors(content)  # (gradients are a list, None among them)
    handles: list[Handle] = []
    changed: list[Finish | None] = []
    before, after = letters(source.form, len(several)), letters(target.form, len(several))
    for tensor, old, new in zip(several, before, after, strict=True):
        if old == new or tensor is None:
            changed.append(None)
            continue
        handle, finish = _change(tensor.detach(), old, new, ins, comm)
        handles.append(handle)
        changed.append(finish)

    def put() -> None:
        made = iter([old if finish is None else finish() for old, finish in zip(several, changed, strict=True)])
        live[target] = list(made) if isinstance(content, list) else _rebuilt(content, made)
        weigh(target, live[target])

    weigh(changing(ins), [t for t, old, new in zip(several, before, after, strict=True) if old != new])
    if not handles:
        put()
        return []
    return [*handles[:-1], Then(handles[-1], put)]


def _rebuilt(content: Any, made: Iterator[Any]) -> Any:
    return map_tensors(content, lambda _: next(made))


def _change(tensor: Tensor, old: str, new: str, ins: Instruction, comm: Communicator) -> tuple[Handle, Finish]:
    """Start to change one tensor: the message, and what makes the tensor in its new form of it."""
    count, group = len(ins.group), ins.group
    if ins.op is Op.ALL_REDUCE:
        # A copy: autograd may have saved the tensor itself, or what it is a view of.
        whole = tensor.clone(memory_format=torch.contiguous_format)
        return comm.iallreduce(whole, group, str(ins)), lambda: whole
    if ins.op is Op.REDUCE_SCATTER:
        packed = torch.stack(tensor.chunk(count, int(new[1:])))
        part = torch.empty_like(packed[0])
        return comm.ireduce_scatter(packed, part, group), lambda: part
    if ins.op is Op.ALL_GATHER:
        parts = torch.empty((count, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        found = comm.iall_gather(tensor.contiguous().view(-1), parts.view(-1), group)
        handle = found[0] if found else Handle(None, None, set())
        return handle, partial(_joined, parts, int(old[1:]))
    exchanged = torch.stack(tensor.chunk(count, int(new[1:])))
    got = torch.empty_like(exchanged)
    return comm.iall_to_all(exchanged, got, group), partial(_joined, got, int(old[1:]))


def own_shard(content: Any, form: str, index: int, count: int) -> Any:
    """What rank `index` of `count` reads of a value: of tensors with the letter C its shard, the others as they are."""
    if "C" not in form:
        return content
    several = content if isinstance(content, list) else tensors(content)
    made = [
        tensor.chunk(count, int(letter[1:]))[index].contiguous() if letter[0] == "C" and tensor is not None else tensor
        for tensor, letter in zip(several, letters(form), strict=True)
    ]
    return made if isinstance(content, list) else _rebuilt(content, iter(made))


def alone(content: Any, before: str, after: str, count: int) -> Any:
    """A value of the shapes that it would have in another form, made by one rank alone: for measuring, since its
    numbers are not those of the other ranks."""
    found = tensors(content)
    changed = iter(
        [
            _shaped(tensor, old, new, count)
            for tensor, old, new in zip(found, letters(before, len(found)), letters(after, len(found)), strict=True)
        ]
    )
    return _rebuilt(content, changed)


def _shaped(tensor: Tensor, old: str, new: str, count: int) -> Tensor:
    if new[0] == "C":
        return tensor.chunk(count, int(new[1:]))[0].contiguous()
    if old != new and old[0] == "S":
        tensor = torch.cat([tensor] * count, int(old[1:]))
    return tensor.chunk(count, int(new[1:]))[0].contiguous() if old != new and new[0] == "S" else tensor


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Equal parts end to end in one dimension."""
    return torch.cat(parts.unbind(0), dim)
