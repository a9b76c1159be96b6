"""ZeRO: this rank's slice of the parameters of a group, on which its optimizer works.

    group g, N = 2      flat    [ weight . . . . . . | bias . 0 ]     every p.data is a view of it
                        part                  [ . . . . . . . . ]     an nn.Parameter, on which the optimizer works

Where parameters are gathered (ZeRO-3) the flat storage has size 0 in between. It is resized, never replaced: what
autograd saved (the transpose of a weight) is a view of this storage, and finds its values there again.

With precision=bf16 the flat storage is bfloat16 and the slice float32. Gradients travel as bfloat16 then, and are added
up in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle
from minipar.execution.owners import Owner, Slice
from minipar.execution.updating import Elements, Updated
from minipar.models.tensors import count_bytes
from minipar.program import Group, Instruction, Value


class SlicedGroup(Owner):
    """This rank's slice of a group: the k-th of N, all of one size.

    flat        the parameters of the layers, end to end, with zeros behind them
    part        the slice
    scattered   whether the layers' parameters exist only while they are gathered
    """

    def __init__(
        self,
        number: int,
        params: list[nn.Parameter],
        group: Group,
        k: int,
        n: int,
        device: torch.device,
        narrow: bool,
        scattered: bool,
    ) -> None:
        super().__init__(number, params, group)
        self.k, self.n, self.scattered = k, n, scattered
        count = sum(p.numel() for p in params)
        self.size = max(1, -(-count // n))
        flat = torch.zeros(self.size * n, dtype=params[0].dtype, device=device)
        torch.cat([p.data.reshape(-1) for p in params], out=flat[:count])
        part = flat[k * self.size : (k + 1) * self.size]
        self.copies_are = "optimizer" if narrow and not scattered else "parameters"  # (float32 copies, as in `Wide`)
        self.narrow = narrow  # whether the slice is in memory beside the layers' parameters, however these are kept
        self.part = nn.Parameter(part.clone() if narrow or scattered else part)
        self.flat = flat.to(torch.bfloat16) if narrow else flat
        start = 0
        for p in params:
            p.data = self.flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        self.owned = self.trained = self.summed = [self.part]
        self._let_go()

    def make_pieces(self, names: Mapping[int, str], group_of: Mapping[str, int]) -> None:
        """The slice; or runs of it, where its parameters are in several groups of the user's optimizer."""
        (whole,) = self.trained
        own = tuple(names[id(p)] for p in self.params)
        runs = [Elements(names[id(p)], tuple(p.shape), begin, end, at) for p, begin, end, at in self.places()]
        if len({group_of.get(name) for name in own}) == 1:
            self.pieces = [Updated(whole, own, tuple(runs), True)]
            return
        joined: list[list[Elements]] = []
        for run in runs:
            if joined and group_of.get(joined[-1][0].name) == group_of.get(run.name):
                joined[-1].append(run)
            else:
                joined.append([run])
        self._cuts = [(some[0].place, some[-1].place + some[-1].end - some[-1].begin) for some in joined]
        self.pieces = [
            Updated(
                nn.Parameter(whole.data[begin:end]),
                tuple(run.name for run in some),
                tuple(run._replace(place=run.place - begin) for run in some),
                True,
            )
            for some, (begin, end) in zip(joined, self._cuts, strict=True)
        ]

    _cuts: Sequence[tuple[int, int]] = ()  # where the pieces begin and end in the slice, if there are several

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(self.part, self.params[0])]

    def release(self, value: Value) -> None:
        if value.kind == "param":
            self._let_go()

    def _let_go(self) -> None:
        if self.scattered:
            self.flat.untyped_storage().resize_(0)

    def gather(self, comm: Communicator, ranks: tuple[int, ...]) -> list[Handle]:
        """Start to gather the parameters of the layers from the slices of all ranks."""
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        return comm.iall_gather(self.part.data, self.flat, ranks)

    def take_gradients(self, ins: Instruction) -> None:
        (whole,) = self.trained
        for piece, (begin, end) in zip(self.pieces if self._cuts else (), self._cuts, strict=True):
            piece.parameter.data = whole.data[begin:end]
            piece.parameter.grad = None if whole.grad is None else whole.grad[begin:end]

    def gradients(self) -> list[tuple[nn.Parameter, Tensor | Slice]]:
        whole = self.trained[0].grad
        assert whole is not None
        nothing = torch.zeros(0, dtype=whole.dtype)  # of a parameter without elements, which is in no slice
        found: list[tuple[nn.Parameter, Tensor | Slice]] = [
            (p, Slice(tuple(p.shape), 0, nothing)) for p in self.params if p.numel() == 0
        ]
        for p, begin, end, place in self.places():
            found.append((p, Slice(tuple(p.shape), begin, whole[place : place + end - begin].to("cpu", copy=True))))
        return found

    def places(self) -> list[tuple[nn.Parameter, int, int, int]]:
        """What the slice consists of: elements begin to end of a parameter, from a place on."""
        found, start = [], 0
        for p in self.params:
            runs = _runs(start, p.numel(), self.size)
            found += [(p, begin, end, place) for begin, end, k, place in runs if k == self.k]
            start += p.numel()
        return found

    def nbytes(self, kind: str) -> int:
        part, flat, frozen = count_bytes(self.part), count_bytes(self.flat), self.group.frozen
        beside = part if self.narrow and not self.scattered else 0
        return {
            "param": flat + (0 if self.scattered else frozen),
            "param_shard": part + frozen,
            "grad": count_bytes(self.params),
            "grad_shard": part,
            "buffer": flat,
            "optimizer_state": beside,
            "optimizer_shard": beside,
        }[kind]


def pack_gradients(slices: Sequence[SlicedGroup], device: torch.device) -> Tensor:
    """Whole gradients of some groups in one message: first what goes to the first rank, and so on.

    A parameter may lie across the border of two slices.
    """
    n, size = slices[0].n, sum(each.size for each in slices)
    packed = torch.empty(n * size, dtype=slices[0].params[0].dtype, device=device)
    rows = packed.view(n, size)
    grads: list[Tensor] = []
    places: list[Tensor] = []
    column = 0
    for each in slices:
        for grad, begin, end, k, place in _packed(each):
            target = rows[k, column + place : column + place + end - begin]
            if grad is None:
                target.zero_()
            else:
                grads.append(grad[begin:end])
                places.append(target)
        column += each.size
    if grads:
        torch._foreach_copy_(places, grads)
    return packed


def _packed(group: SlicedGroup) -> Iterator[tuple[Tensor | None, int, int, int, int]]:
    """What the slices of a group's gradient consist of: elements begin to end of a flat gradient, the slice, and the
    place in it. None: zeros, for a parameter that nothing used, micro-batches without rows, and behind the end."""
    start = 0
    for p in group.params:
        grad = None if p.grad is None else p.grad.reshape(-1)
        yield from ((grad, *run) for run in _runs(start, p.numel(), group.size))
        start += p.numel()
    yield from ((None, *run) for run in _runs(start, group.n * group.size - start, group.size))


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
