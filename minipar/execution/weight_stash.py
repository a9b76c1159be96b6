"""Versions of a rank's parameters, where an asynchronous program keeps several alive.

    p of a layer  --p.data-->  version 3    [ . . . . ]     F and B of micro-batch 4: the layer sees this one
                               version 5    [ . . . . ]     <--  `leading` p: the optimizer makes it version 6

What autograd saves of a layer is a view of the storage of the version that its forward used, or the parameter itself,
which shows that version again while its backward runs. So a version that is still needed is never written to: the
update goes to a copy. One that nothing needs any more is updated in place. The optimizer works on parameters of its
own, whose storage is that of the newest version: its state exists once, and autograd does not take an update for a
mistake (a backward that uses other weights than its forward is what AMPNet is about).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from minipar.program import Instruction, Program, Value, param, version_of


class Stash:
    """The versions of the trainable parameters of one rank; nothing, in a synchronous program.

    leading[g]   what the optimizer works on for group g
    """

    def __init__(self, program: Program, rank: int, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        held = program.state[rank] if program.state else ()
        self.groups = groups
        self.decides = program.in_flight is not None  # then there is one version, and its number is known afterwards
        trained = sorted(value.index for value in held if version_of(value) >= 0)
        self.versions: dict[int, dict[int, list[Tensor]]] = {g: {0: [p.data for p in groups[g]]} for g in trained}
        self.shown = dict.fromkeys(trained, 0)
        self.leading = {g: [nn.Parameter(p.data) for p in groups[g]] for g in trained}

    def begin(self) -> None:
        """A new pass: the newest version is its version 0."""
        for g, versions in self.versions.items():
            self._show(g, max(versions))
            self.versions[g] = {0: versions[max(versions)]}
            self.shown[g] = 0

    def show(self, values: Iterable[Value]) -> None:
        """Let the layers see the versions among some values."""
        if self.decides:
            return
        for value in values:
            if value.kind == "param" and value.step >= 0 and self.shown[value.index] != value.step:
                self._show(value.index, value.step)

    def _show(self, g: int, version: int) -> None:
        for p, tensor in zip(self.groups[g], self.versions[g][version], strict=True):
            p.data = tensor
        self.shown[g] = version

    def make_next(self, ins: Instruction) -> None:
        """Before a STEP: give the optimizer the gradients, and room for the next version of what it updates."""
        for g in ins.layers:
            for own, p in zip(self.leading.get(g, ()), self.groups[g], strict=False):
                own.grad = p.grad
            if g not in self.versions or self.decides:
                continue
            versions = self.versions[g]
            newest = max(versions)
            if param(g, newest) in ins.frees:
                versions[newest + 1] = versions.pop(newest)
            else:
                versions[newest + 1] = [tensor.clone() for tensor in versions[newest]]
                for own, tensor in zip(self.leading[g], versions[newest + 1], strict=True):
                    own.data = tensor
            if self.shown[g] == newest and newest not in versions:
                self.shown[g] = newest + 1

    def release(self, value: Value) -> None:
        """Let a version go."""
        versions = self.versions.get(value.index, {})
        if not self.decides and value.step in versions and len(versions) > 1:
            del versions[value.step]
            if self.shown[value.index] == value.step:
                self._show(value.index, max(versions))

    def forget_gradients(self, groups: Iterable[int]) -> None:
        for g in groups:
            for own in self.leading.get(g, ()):
                own.grad = None
