"""Versions of a rank's parameters, where an asynchronous program keeps several alive.

    p of a layer  --p.data-->  version 3    [ . . . . ]     F and B of micro-batch 4: the layer sees this one
                               version 5    [ . . . . ]     <--  `trained` p: the optimizer makes it version 6

What autograd saves of a layer is a view of the storage of the version that its forward used, or the parameter itself,
which shows that version again while its backward runs. So a version that is still needed is never written to: the
update goes to a copy. One that nothing needs any more is updated in place. The optimizer works on parameters of its
own, whose storage is that of the newest version: its state exists once, and autograd does not take an update for a
mistake (a backward that uses other weights than its forward is what AMPNet is about).

With precision=bf16 the versions are bfloat16, and the optimizer has one float32 copy: a version is the copy rounded,
as it was after so many updates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minipar.execution.owners import Owner
from minipar.models.tensors import count_bytes
from minipar.program import Group, Instruction, Value, version_of


class Versions(Owner):
    """Several versions of a group's parameters, each kept as long as an instruction still reads it.

    Where a rank decides as it runs, instructions name no versions: there is one, which is updated in place.

    alive   the versions that are still needed, by number, which counts the updates of this pass
    wide    whether the optimizer works on float32 copies
    """

    def __init__(
        self, number: int, params: list[nn.Parameter], group: Group, holders: int = 1, wide: bool = False
    ) -> None:
        super().__init__(number, params, group, holders)
        self.wide = wide
        self.copies_are = "optimizer" if wide else "parameters"
        self.trained = [nn.Parameter(p.detach().clone() if wide else p.data) for p in params]
        for p in params if wide else ():
            p.data = p.data.to(torch.bfloat16)
        self.alive: dict[int, list[Tensor]] = {0: [p.data for p in params]}
        self._shown = 0

    @property
    def newest(self) -> list[Tensor]:
        return self.alive[max(self.alive)]

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.trained, self.params, strict=True))

    def all_versions(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [pair for tensors in self.alive.values() for pair in zip(self.params, tensors, strict=True)]

    def begin(self) -> None:
        """A new pass: the newest version is its version 0."""
        self.alive = {0: self.newest}
        self._show(0)

    def show(self, value: Value) -> None:
        if self._shown != value.step:
            self._show(value.step)

    def _show(self, version: int) -> None:
        for p, tensor in zip(self.params, self.alive[version], strict=True):
            p.data = tensor
        self._shown = version

    def release(self, value: Value) -> None:
        """Free a version, but the newest."""
        if value.step in self.alive and len(self.alive) > 1:
            del self.alive[value.step]
            if self._shown == value.step:
                self._show(max(self.alive))

    def take_gradients(self, ins: Instruction) -> None:
        for own, p in zip(self.trained, self.params, strict=True):
            own.grad = p.grad if p.grad is None or not self.wide else p.grad.to(own.dtype)
        if any(version_of(value) >= 0 for value in ins.writes):
            self._make_room(ins)

    def _make_room(self, ins: Instruction) -> None:
        """Before a STEP: room for the next version, in the place of the newest one if nothing needs that any more."""
        newest = max(self.alive)
        if any(value.index == self.number and version_of(value) == newest for value in ins.frees):
            self.alive[newest + 1] = self.alive.pop(newest)
            self._shown += self._shown == newest
        else:
            self.alive[newest + 1] = [tensor.clone() for tensor in self.newest]
        for own, tensor in zip(self.trained, self.newest, strict=True):
            if not self.wide:
                own.data = tensor

    def show_update(self) -> None:
        for own, tensor in zip(self.trained, self.newest, strict=True):
            if self.wide:
                tensor.copy_(own.data)

    def nbytes(self, kind: str) -> int:
        return count_bytes(list(self.trained)) if self.wide and kind == "optimizer_state" else super().nbytes(kind)
