"""Versions of a rank's parameters, where an asynchronous program keeps several alive.

    p of a layer  --p.data-->  version 3    [ . . . . ]     F and B of micro-batch 4: the layer sees this one
                               version 5    [ . . . . ]     <--  `trained` p: the optimizer makes it version 6

What autograd saves of a layer is a view of the storage of the version that its forward used, or the parameter itself,
which shows that version again while its backward runs. So a version that is still needed is never written to: the
update goes to a copy. One that nothing needs any more is updated in place. The optimizer works on parameters of its
own, whose storage is that of the newest version: its state exists once, and autograd does not take an update for a
mistake (a backward that uses other weights than its forward is what AMPNet is about).

With offload=parameters, and with zero=3, a version is whole on the device only while it is used. What autograd saved of
a layer is a view of it. So its storage is resized, never replaced, as long as the version is kept.

With precision=bf16 the versions are bfloat16, and the optimizer has one float32 copy: a version is the copy rounded,
as it was after so many updates. With zero=1 each replica's optimizer has a slice of the newest version:

    STEP of version 4      version 3  [ . . | . . ]  -->  [ . . | 4 4 ]  --ALL_GATHER-->  version 4  [ 4 4 | 4 4 ]

With zero=3 the slices are what is kept of versions, on the device or away.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minipar.comm.communicator import Communicator
from minipar.comm.handles import Handle
from minipar.execution.owners import Owner, Wide
from minipar.execution.parameter_slices import SlicedGroup
from minipar.models.tensors import resize
from minipar.program import Group, Instruction, Value, param, tier, version_of


class Leading(Owner):
    """The optimizer works on parameters of its own, of the same storages: there is one version, updated in place.

    Which version it is, is known afterwards, where a rank decides as it runs.
    """

    def __init__(self, number: int, params: list[nn.Parameter], group: Group, holders: int = 1) -> None:
        super().__init__(number, params, group, holders)
        self.trained = [nn.Parameter(p.data) for p in params]

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.trained, self.params, strict=True))

    def take_storages(self) -> None:
        for own, p in zip(self.trained, self.params, strict=True):
            own.data = p.data

    def take_gradients(self, ins: Instruction) -> None:
        for own, p in zip(self.trained, self.params, strict=True):
            own.grad = p.grad


class Alive:
    """The versions of some parameters that are still needed, and which of them the layers see.

    alive       by number, which counts the updates of this pass
    away        whether the newest one has no memory here, but while it is used
    elsewhere   those that a slower tier has, too, or of which there are slices
    here        those that have memory here
    first       how many updates came before this pass
    """

    def __init__(self, params: Sequence[nn.Parameter], away: bool = False) -> None:
        self.params = params
        self.alive: dict[int, list[Tensor]] = {0: [p.data for p in params]}
        self.away = away
        self.elsewhere, self.here = ({0}, set[int]()) if away else (set[int](), {0})
        self.first = 0
        self._shown = 0

    @property
    def newest(self) -> list[Tensor]:
        return self.alive[max(self.alive)]

    def through(self, value: Value) -> Value:
        """A version by its number through all passes."""
        return value._replace(step=self.first + value.step)

    def tensors(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [pair for tensors in self.alive.values() for pair in zip(self.params, tensors, strict=True)]

    def begin(self) -> None:
        """A new pass: the newest version is its version 0."""
        newest, last = self.newest, max([*self.alive, *self.elsewhere])
        self._point_to(newest)
        self.alive, self._shown, self.first = {0: newest}, 0, self.first + last
        self.elsewhere, self.here = ({0}, set()) if self.away else (set(), {0})

    def show(self, value: Value) -> None:
        """Let the layers see the version that an instruction reads."""
        if version_of(value) >= 0 and self._shown != value.step:
            self._point_to(self.alive[value.step])
            self._shown = value.step

    def _point_to(self, tensors: list[Tensor]) -> None:
        for p, tensor in zip(self.params, tensors, strict=True):
            p.data = tensor

    def _new(self) -> list[Tensor]:
        """The tensors of a version, with memory."""
        return [torch.empty_like(p) for p in self.params]

    def _resize(self, tensors: list[Tensor], whole: bool) -> None:
        """Give the tensors of a version their memory, or free it."""
        resize(tensors, whole)

    def in_place(self, number: int, ins: Instruction) -> bool:
        """Before what makes the next version of group `number`: whether the newest one is needed no more, and becomes
        the next one."""
        newest = max(self.alive)
        if all(value.index != number or version_of(value) != newest for value in ins.frees):
            return False
        self.alive[newest + 1] = self.alive.pop(newest)
        self.here.discard(newest)
        self.here.add(newest + 1)
        if self._shown == newest:
            self._shown = newest + 1
        return True

    def add(self, tensors: list[Tensor]) -> None:
        """The next version."""
        made = max(self.alive) + 1
        self.alive[made] = tensors
        self.here.add(made)

    def next(self, number: int, ins: Instruction, copied: bool) -> list[Tensor]:
        """Room for the next version, perhaps in the place of the newest one; `copied`: it begins as a copy of that."""
        if not self.in_place(number, ins):
            self.add([tensor.clone() if copied else torch.empty_like(tensor) for tensor in self.newest])
        return self.newest

    def bring(self, version: int) -> list[Tensor]:
        """Room for a version that comes back."""
        found = self.alive.setdefault(version, [])
        found += [] if found else self._new()
        self._resize(found, True)
        self.here.add(version)
        return found

    def let_go(self, version: int) -> None:
        """Free the memory of a version that is elsewhere."""
        if version in self.here:
            self._resize(self.alive[version], False)
            self.here.discard(version)

    def release(self, value: Value) -> None:
        """Free a version, but the newest. Of one that is elsewhere, too, only the memory is freed."""
        if self.away:
            self.let_go(value.step)
        if value.step in self.alive and value.step not in self.elsewhere and len(self.alive) > 1:
            del self.alive[value.step]
            self.here.discard(value.step)
            if self._shown == value.step:
                self._point_to(self.newest)
                self._shown = max(self.alive)

    def leave(self, value: Value) -> None:
        """A slower tier does not have this version any more."""
        self.elsewhere.discard(value.step)
        if value.step not in self.here:
            self.release(value)


class Versioned(Owner):
    """Several versions of what this rank owns, each kept as long as an instruction still reads it.

    kept       the tier in which they are while nothing uses them
    versions   those on the device
    made       those on the host, where the optimizer makes them if they are kept away: all of them, or the one that
               goes on to the disk. An optimizer on the host has one copy otherwise, and each version is fetched when it
               is made
    """

    kept = "device"
    versions: Alive
    made: Alive | None = None

    def _keep(self, kept: str) -> None:
        """What the rank owns now is the first version."""
        self.kept, away = kept, kept != "device"
        self.versions = Alive(self.owned, away)
        self.made = Alive(self.masters) if self.masters and away else None

    @property
    def updated(self) -> Alive:
        """The versions that STEP makes."""
        return self.versions if self.made is None else self.made

    def among(self, value: Value) -> Alive:
        """The versions to which this one belongs."""
        return self.versions if tier(value) == "device" else self.updated

    def all_versions(self) -> list[tuple[nn.Parameter, Tensor]]:
        return self.versions.tensors()

    def begin(self) -> None:
        self.versions.begin()
        if self.made is not None:
            self.made.begin()

    def show(self, value: Value) -> None:
        # (A version that is kept away is read there to be fetched. Layers on the host have theirs at home.)
        if self.among(value) is self.versions and (self.kept == "device" or tier(value) == "device"):
            self.versions.show(value)

    def release(self, value: Value) -> None:
        if self.made is None or tier(value) == "device":
            self.among(value).release(value)
        elif tier(value) == self.kept:
            self.leave(value)

    def room(self, ins: Instruction) -> list[Tensor]:
        if self.masters and self.made is None:
            return self.versions.next(self.number, ins, copied=False)
        return self.versions.bring(ins.writes[0].step)

    def make_next(self, ins: Instruction) -> None:
        """Before a STEP: let the optimizer work on the next version, if that is made now."""
        if self.masters and self.made is None:
            return
        for own, tensor in zip(self.trained, self.updated.next(self.number, ins, copied=True), strict=True):
            own.data = tensor
        if self.made is not None:
            self.versions.elsewhere.add(max(self.made.alive))

    def take_storages(self) -> None:
        super().take_storages()
        self.versions.alive[0] = [p.data for p in self.owned]

    def make_resizable(self) -> None:
        super().make_resizable()
        if self.made is not None:
            self.made.alive[0] = [p.data for p in self.masters]

    def tensors_of(self, value: Value) -> list[Tensor]:
        """The tensors of a version on the device, or on the host."""
        return self.among(value).alive[value.step]

    def leave(self, value: Value) -> None:
        """A slower tier does not have this version any more."""
        self.versions.leave(value)
        if self.made is not None and tier(value) == "host":
            self.made.release(value)


class Versions(Versioned, Leading):
    """The optimizer updates the newest version itself."""

    def __init__(
        self, number: int, params: list[nn.Parameter], group: Group, holders: int = 1, kept: str = "device"
    ) -> None:
        super().__init__(number, params, group, holders)
        self._keep(kept)

    def take_gradients(self, ins: Instruction) -> None:
        super().take_gradients(ins)
        self.make_next(ins)


class WideVersions(Versioned, Wide):
    """With precision=bf16 the optimizer updates one float32 copy, of which the layers have versions in bfloat16."""

    def __init__(
        self, number: int, params: list[nn.Parameter], group: Group, holders: int = 1, kept: str = "device"
    ) -> None:
        super().__init__(number, params, group, holders)
        for p in params:
            p.data = p.data.to(torch.bfloat16)
        self._keep(kept)

    def take_gradients(self, ins: Instruction) -> None:
        super().take_gradients(ins)
        self.versions.next(self.number, ins, copied=False)

    def show_update(self) -> None:
        for own, tensor in zip(self.trained, self.versions.newest, strict=True):
            tensor.copy_(own.data)


class HostVersions(Versioned, Owner):
    """The optimizer works on the host."""

    def __init__(
        self, number: int, params: list[nn.Parameter], group: Group, holders: int, narrow: bool, kept: str
    ) -> None:
        super().__init__(number, params, group, holders)
        self.work_on_host()
        for p in params if narrow else ():
            p.data = p.data.to(torch.bfloat16)
        self._keep(kept)

    def take_gradients(self, ins: Instruction) -> None:
        super().take_gradients(ins)
        self.make_next(ins)


class SlicedVersions(Versioned, SlicedGroup):
    """With zero=1 this rank updates its slice of the next version; the others come from the other replicas."""

    def __init__(
        self, number: int, params: list[nn.Parameter], group: Group, k: int, n: int, device: torch.device, narrow: bool
    ) -> None:
        super().__init__(number, params, group, k, n, device, narrow, scattered=False)
        self.versions = Alive(params)

    def take_gradients(self, ins: Instruction) -> None:
        if not self.masters:  # (from which the slice of the next version will be fetched)
            self._make_room(ins)
        super().take_gradients(ins)

    def room(self, ins: Instruction) -> list[Tensor]:
        self._make_room(ins)
        return [self.part.data]

    def _make_room(self, ins: Instruction) -> None:
        if not self.versions.in_place(self.number, ins):
            self.flat = self.flat.clone()
            sizes = [p.numel() for p in self.params]
            parts = self.flat[: sum(sizes)].split(sizes)
            self.versions.add([part.view(p.shape) for part, p in zip(parts, self.params, strict=True)])
            if not self.apart:
                self.part.data = self.flat[self.k * self.size : (self.k + 1) * self.size]


class Flat(Alive):
    """Versions of which each lies in one storage: `flat` is that of the first, with zeros behind the parameters."""

    def __init__(self, params: Sequence[nn.Parameter], flat: Tensor) -> None:
        super().__init__(params, away=True)
        self.like = flat

    def flat(self, tensors: list[Tensor]) -> Tensor:
        """All that lies in the storage of a version, which has its memory."""
        return self.like.new_empty(0).set_(tensors[0].untyped_storage(), 0, self.like.shape, (1,))

    def _new(self) -> list[Tensor]:
        sizes = [p.numel() for p in self.params]
        parts = self.like.new_empty(self.like.shape)[: sum(sizes)].split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def _resize(self, tensors: list[Tensor], whole: bool) -> None:
        size = self.like.numel() * self.like.element_size()
        tensors[0].untyped_storage().resize_(size if whole else 0)


class ScatteredVersions(Versioned, SlicedGroup):
    """With zero=3 this rank keeps its slice of each version, and updates that of the newest one. A version is gathered
    where it is used.

    whole   the versions that were gathered
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
        kept: str,
        on_host: bool,
    ) -> None:
        super().__init__(number, params, group, k, n, device, narrow, scattered=True)
        self.whole = Flat(params, self.flat)
        if on_host:
            self.work_on_host()
        self._keep(kept)

    def among(self, value: Value) -> Alive:
        return self.whole if value.kind == "param" else super().among(value)

    def all_versions(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [*super().all_versions(), *self.whole.tensors()]

    def begin(self) -> None:
        super().begin()
        self.whole.begin()

    def show(self, value: Value) -> None:
        if value.kind == "param":
            self.whole.show(value)

    def gather(
        self, comm: Communicator, ranks: tuple[int, ...], algorithm: str | None = None, version: int = -1
    ) -> list[Handle]:
        for gone in self.whole.elsewhere - self.versions.alive.keys() - self.versions.elsewhere:
            self.whole.leave(param(self.number, gone))
        self.whole.elsewhere.add(version)
        (part,) = self.versions.alive[version]
        return comm.iall_gather(part, self.whole.flat(self.whole.bring(version)), ranks, algorithm)

    def gathered(self, value: Value) -> tuple[Tensor | None, Tensor]:
        part = self.versions.alive[value.step][0] if value.step in self.versions.here else None
        return part, self.whole.flat(self.whole.alive[value.step])

    def take_gradients(self, ins: Instruction) -> None:
        self.make_next(ins)
        super().take_gradients(ins)
