"""Versions of a rank's parameters, where an asynchronous program keeps several alive.

    p of a layer  --p.data-->  version 3    [ . . . . ]     F and B of micro-batch 4: the layer sees this one
                               version 5    [ . . . . ]     <--  `trained` p: the optimizer makes it version 6

What autograd saves of a layer is a view of the storage of the version that its forward used, or the parameter itself,
which shows that version again while its backward runs. So a version that is still needed is never written to: the
update goes to a copy. One that nothing needs any more is updated in place. The optimizer works on parameters of its
own, whose storage is that of the newest version: its state exists once, and autograd does not take an update for a
mistake (a backward that uses other weights than its forward is what AMPNet is about).
"""

from __future__ import annotations

from torch import Tensor, nn

from minipar.execution.owners import Owner
from minipar.program import Group, Instruction, Value, param


class Leading(Owner):
    """The optimizer works on parameters of its own, of the same storages: there is one version, updated in place.

    Which version it is, is known afterwards, where a rank decides as it runs.
    """

    def __init__(self, number: int, params: list[nn.Parameter], group: Group, holders: int = 1) -> None:
        super().__init__(number, params, group, holders)
        self.trained = [nn.Parameter(p.data) for p in params]

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.trained, self.params, strict=True))

    def take_gradients(self, ins: Instruction) -> None:
        for own, p in zip(self.trained, self.params, strict=True):
            own.grad = p.grad


class Versions(Leading):
    """Several versions, each kept as long as an instruction still reads it. The optimizer updates the newest one.

    versions   by number, which counts the updates of this pass
    """

    def __init__(self, number: int, params: list[nn.Parameter], group: Group, holders: int = 1) -> None:
        super().__init__(number, params, group, holders)
        self.versions: dict[int, list[Tensor]] = {0: [p.data for p in params]}
        self._shown = 0

    def all_versions(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [pair for tensors in self.versions.values() for pair in zip(self.params, tensors, strict=True)]

    def begin(self) -> None:
        """A new pass: the newest version is its version 0."""
        newest = self.versions[max(self.versions)]
        self._point_to(newest)
        self.versions, self._shown = {0: newest}, 0

    def show(self, value: Value) -> None:
        if value.kind == "param" and value.step >= 0 and self._shown != value.step:
            self._point_to(self.versions[value.step])
            self._shown = value.step

    def _point_to(self, tensors: list[Tensor]) -> None:
        for p, tensor in zip(self.params, tensors, strict=True):
            p.data = tensor

    def take_gradients(self, ins: Instruction) -> None:
        """Before a STEP: also make room for the next version."""
        super().take_gradients(ins)
        newest = max(self.versions)
        if param(self.number, newest) in ins.frees:
            self.versions[newest + 1] = self.versions.pop(newest)
            if self._shown == newest:
                self._shown = newest + 1
            return
        self.versions[newest + 1] = [tensor.clone() for tensor in self.versions[newest]]
        for own, tensor in zip(self.trained, self.versions[newest + 1], strict=True):
            own.data = tensor

    def release(self, value: Value) -> None:
        if value.kind == "param" and value.step in self.versions and len(self.versions) > 1:
            del self.versions[value.step]
            if self._shown == value.step:
                newest = max(self.versions)
                self._point_to(self.versions[newest])
                self._shown = newest
