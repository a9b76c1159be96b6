"""Lines: the trainable parameters of a group on a rank, in the forms in which layers and the optimizer have them.

    params     weight   bias                the layers' own parameters
    flat       [ weight . . . | bias . 0 ]  where replicas share a group out (ZeRO), every p.data is a view of it
    part                  [ . . . . . . ]   this rank's slice, the k-th of n of one size
    trained    what the optimizer works on: `params`, or `part`, or copies of these: on the host, in float32 beside
               layers of a shorter type, or parameters of their own that have the memory of the newest version

A flat whose parameters are gathered where they are used (ZeRO-3) has size 0 in between. It is resized, never replaced:
what autograd saved (the transpose of a weight) is a view of this storage, and finds its values there again. Slices are
of float32 where layers have a shorter type; gradients travel in that then, and are added up in float32.

Where several versions of parameters are alive, autograd has saved views of the one that its forward used, which is
never written to while anything needs it. The optimizer works on parameters of its own, so that its state exists once,
and so that autograd does not take an update for a mistake (a backward that uses other weights than its forward is what
AMPNet is about).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm import missing
from minipar.comm.missing import is_missing
from minipar.execution.streams import on_host
from minipar.execution.updating import Updated, whole_piece
from minipar.models.nodes import Cut
from minipar.models.tensors import count_bytes
from minipar.program import Group


class Slice(NamedTuple):
    """Neighbouring elements, in memory order, of a tensor of this shape, from `start` on; of what, says `key`.
    `number`: a plain number, made a tensor."""

    key: str
    shape: tuple[int, ...]
    start: int
    values: Tensor
    number: bool = False

    def of_whole(self, cut: Cut | None) -> Iterator[Slice]:
        """A slice of a rank's part of a tensor, as slices of the whole one. `cut`: which part, None for all."""
        if cut is None or len(self.shape) <= cut.dim:
            if cut is None or cut.index == 0:  # (one number is the same for all parts)
                yield self
            return
        whole = cut.whole_shape(self.shape)
        for place, start, count in cut.runs(whole, self.start, self.start + self.values.numel()):
            yield Slice(self.key, whole, place, self.values[start - self.start :][:count], self.number)


def assemble(slices: Iterable[Slice], add: bool = False) -> dict[str, Tensor]:
    """The tensors of which ranks have brought all slices, whole, by key. Elements that several have brought are the
    same, or, with `add`, terms of a sum."""
    found: dict[str, Tensor] = {}
    for key, shape, start, values, _ in slices:
        if key not in found:
            found[key] = torch.zeros(shape, dtype=values.dtype)
        there = found[key].view(-1)[start : start + values.numel()]
        there.copy_(there + values if add else values)
    return found


class Place(NamedTuple):
    """Which slice of a group a rank has: the k-th of n, on its device; `scattered`: the layers' parameters exist only
    while they are gathered."""

    k: int
    n: int
    device: torch.device
    scattered: bool


class Line:
    """The trainable parameters of one group that this rank's layers use.

    place     the slice that this rank updates; None: it updates all
    holders   how many ranks have the same gradient after the sum
    narrow    the layers have this shorter type; `wide`: the optimizer works in float32 nevertheless
    on_host   the optimizer works on copies on the host
    separate  the optimizer works on parameters of its own, though with the memory of the layers' ones

    owned     what the rank has of the group on its device between steps: `params`, or `part`
    updated   what the optimizer is given of `trained`: all, or of a slice a part for each parameter; see `give`
    places    what a slice consists of: elements begin to end of a parameter, from a place on
    absent    parameters that no backward of this step has reached here, by id; None before gradients were packed
    frozen    frozen parameters of the group's layers, where they are copied together with these
    """

    def __init__(
        self,
        number: int,
        params: list[nn.Parameter],
        group: Group,
        holders: int = 1,
        place: Place | None = None,
        narrow: torch.dtype | None = None,
        wide: bool = False,
        on_device: bool = True,
        separate: bool = False,
    ) -> None:
        self.number, self.params, self.group, self.holders = number, params, group, holders
        self.place, self.wide, self.on_device = place, wide, on_device
        self.owned: Sequence[nn.Parameter] = params
        self.frozen: Sequence[nn.Parameter] = ()
        self.updated: Sequence[Updated] = ()
        self.places: Sequence[tuple[nn.Parameter, int, int, int]] = ()
        self.absent: set[int] | None = None
        for p in params if narrow is not None and not wide else ():
            p.data = p.data.to(narrow)
        if place is not None:
            self.owned = [self._lay_out(place, narrow)]
        self.trained: Sequence[nn.Parameter] = self.owned
        if not on_device:
            self.trained = [nn.Parameter(on_host(p.detach())) for p in self.owned]
        elif place is None and (wide or separate):
            self.trained = [nn.Parameter(p.detach().clone() if wide else p.data) for p in params]
        for p in params if narrow is not None and place is None else ():
            p.data = p.data.to(narrow)

    def _lay_out(self, place: Place, narrow: torch.dtype | None) -> nn.Parameter:
        """Lay the parameters end to end, with zeros behind them, and give this rank's slice."""
        count = sum(p.numel() for p in self.params)
        self.size = max(1, -(-count // place.n))
        flat = torch.zeros(self.size * place.n, dtype=self.params[0].dtype, device=place.device)
        torch.cat([p.data.reshape(-1) for p in self.params], out=flat[:count])
        part = flat[place.k * self.size : (place.k + 1) * self.size]
        self.beside = bool(narrow) and not place.scattered  # whether the slice is in memory beside the parameters
        self.part = nn.Parameter(part.clone() if narrow or place.scattered else part)
        self.flat = flat.to(narrow) if narrow else flat
        start = 0
        for p in self.params:
            p.data = self.flat[start : start + p.numel()].view(p.shape)
            runs = _runs(start, p.numel(), self.size)
            self.places = [*self.places, *((p, begin, end, at) for begin, end, k, at in runs if k == place.k)]
            start += p.numel()
        if place.scattered:
            self.flat.untyped_storage().resize_(0)
        return self.part

    def give(self, names: Mapping[int, str]) -> None:
        """Choose what the optimizer is given. `names` of parameters by their id."""
        if self.place is None:
            pairs = zip(self.params, self.trained, strict=True)
            self.updated = [whole_piece(names[id(p)], own) for p, own in pairs]
            return
        self.updated = [
            Updated(nn.Parameter(self._part(at, end - begin)), names[id(p)], tuple(p.shape), begin, True)
            for p, begin, end, at in self.places
        ]

    def _part(self, at: int, count: int) -> Tensor:
        """Elements of the slice that the optimizer works on."""
        return self.trained[0].data[at : at + count]

    def pieces(self) -> Sequence[Updated]:
        """What the optimizer is given, in the memory that the slice has now."""
        for part, (_, begin, end, at) in zip(self.updated, self.places, strict=False):
            part.parameter.data = self._part(at, end - begin)
        return self.updated

    @property
    def apart(self) -> bool:
        """Whether the layers' parameters exist only while they are gathered, or in another type than the slice's."""
        return self.place is not None and (self.place.scattered or self.beside)

    # the table's contents --------------------------------------------------------------------------------------------

    @property
    def here(self) -> list[Tensor]:
        """What the device holds of the group between steps, or would."""
        return [p.data for p in (*self.owned, *self.frozen)]

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Let the layers use a version of the parameters."""
        for p, tensor in zip(self.params, tensors, strict=True):
            p.data = tensor

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """What the device has beside the layers' parameters, each with one of those that it belongs to."""
        if self.place is not None:
            parts = zip(self.updated, self.places, strict=False) if self.on_device else ()
            return [(self.part, self.params[0]), *((part.parameter, p) for part, (p, *_) in parts)]
        return list(zip(self.trained, self.params, strict=True)) if self.on_device else []

    @property
    def copies_are(self) -> str:
        """What a memory tracker calls the copies."""
        return "optimizer" if (self.wide if self.place is None else self.beside) else "parameters"

    def nbytes(self, kind: str) -> int:
        """Bytes of the group's value of this kind; for the optimizer's, only what it has beside its own states."""
        frozen, grads = self.group.frozen, count_bytes(self.params)
        if self.place is None:
            beside = count_bytes(list(self.trained)) if self.wide and self.on_device else 0
            return {"param": sum(self.group.tensors) + frozen, "grad": grads, "optimizer_state": beside}[kind]
        part, flat = count_bytes(self.part), count_bytes(self.flat)
        beside = part if self.beside else 0
        return {
            "param": flat + (0 if self.place.scattered else frozen),
            "param_shard": part + frozen,
            "grad": grads,
            "grad_shard": part,
            "buffer": flat,
            "optimizer_state": beside,
            "optimizer_shard": beside,
        }[kind]

    # a step ----------------------------------------------------------------------------------------------------------

    def unused(self, gradient: Tensor) -> set[str]:
        """The parameters of the slice that no rank has a gradient of: a sum says that (`comm/missing.py`)."""
        return {
            part.name for part, (p, begin, end, at) in zip(self.updated, self.places, strict=True)
            if id(p) in (self.absent or ()) and is_missing(gradient[at : at + end - begin])
        }  # fmt: skip

    def take(self, gradients: Sequence[Tensor | None], unused: Container[str] = ()) -> None:
        """Before an update: give the optimizer the gradients of what it works on, in its type; of a slice none for the
        parameters that are `unused`."""
        for own, gradient in zip(self.trained, gradients, strict=True):
            own.grad = gradient if gradient is None or gradient.dtype is own.dtype else gradient.to(own.dtype)
        for part, (_, begin, end, at) in zip(self.pieces(), self.places, strict=False):
            grad = self.trained[0].grad
            part.parameter.grad = None if grad is None or part.name in unused else grad[at : at + end - begin]
        self.absent = None

    def forget_gradients(self) -> None:
        """Free the gradients, which were used, or are on their way to the host."""
        for p in (*self.params, *self.owned, *self.trained, *(part.parameter for part in self.updated)):
            p.grad = None

    def round_into(self, tensors: Sequence[Tensor]) -> None:
        """After an update: round float32 copies into the layers' parameters, or another version of them."""
        if self.wide and self.place is None and self.on_device:
            for own, tensor in zip(self.trained, tensors, strict=True):
                tensor.copy_(own.data)

    def gradients(self, names: Mapping[int, str]) -> Iterator[Slice]:
        """Copies of the gradients that the optimizer has been given, on the CPU; of a slice those of its elements.
        `names` of parameters by their id."""
        for p in self.params if self.place is not None else ():
            if p.numel() == 0:  # it is in no slice
                yield Slice(names[id(p)], tuple(p.shape), 0, torch.zeros(0, dtype=self.part.dtype))
        for own, name, shape, begin, _ in self.updated:
            grad = torch.zeros_like(own) if own.grad is None else own.grad
            yield Slice(
                name, shape, begin, (grad.to_dense() if grad.is_sparse else grad).reshape(-1).to("cpu", copy=True)
            )

    # slices ----------------------------------------------------------------------------------------------------------

    def _packed(self) -> Iterator[tuple[Tensor | None, int, int, int, int]]:
        """What the slices of the gradient consist of: elements begin to end of a flat gradient, the slice, and the
        place in it. None: for a parameter that nothing used, micro-batches without rows, and behind the end."""
        assert self.place is not None
        absent = {id(p) for p in self.params if p.grad is None}
        self.absent = absent if self.absent is None else self.absent & absent
        start = 0
        for p in self.params:
            grad = None if p.grad is None else p.grad.reshape(-1)
            yield from ((grad, *run) for run in _runs(start, p.numel(), self.size))
            start += p.numel()
        yield from ((None, *run) for run in _runs(start, self.place.n * self.size - start, self.size))


def pack_gradients(lines: Sequence[Line], device: torch.device) -> Tensor:
    """Whole gradients of some groups in one message: first what goes to the first rank, and so on.

    A parameter may lie across the border of two slices.
    """
    assert lines[0].place is not None
    n, size = lines[0].place.n, sum(line.size for line in lines)
    packed = torch.empty(n * size, dtype=lines[0].params[0].dtype, device=device)
    rows = packed.view(n, size)
    grads: list[Tensor] = []
    places: list[Tensor] = []
    column = 0
    for line in lines:
        for grad, begin, end, k, at in line._packed():
            target = rows[k, column + at : column + at + end - begin]
            if grad is None:
                missing.fill(target)
            else:
                grads.append(grad[begin:end])
                places.append(target)
        column += line.size
    if grads:
        torch._foreach_copy_(places, grads)
    return packed


def _runs(start: int, count: int, size: int) -> list[tuple[int, int, int, int]]:
    """Elements start to start + count of a tensor that is cut into slices of `size`, slice by slice.

    Of each run: its begin and end, counted from `start`; the slice; and its place in the slice.
    """
    found = []
    at = start
    while at < start + count:
        k, place = divmod(at, size)
        end = min(start + count, (k + 1) * size)
        found.append((at - start, end - start, k, place))
        at = end
    return found
