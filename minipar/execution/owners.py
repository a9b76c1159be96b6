"""Who owns a parameter group on a rank: one object for each group, chosen when the rank is built.

    Owner       the layers' own parameters are what the optimizer updates
    Wide        precision=bf16: the layers have bfloat16, the optimizer float32 copies
    Sliced      this rank updates a slice (`parameter_slices.py`)
    Versions    an asynchronous program: the optimizer works on the newest version (`parameter_versions.py`)

Where STEP runs on the host, the optimizer of an Owner or of a Sliced works on copies there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minipar.execution.streams import on_host
from minipar.execution.updating import Updated, whole_piece
from minipar.models.tensors import count_bytes
from minipar.program import Group, Instruction, Value


class Slice(NamedTuple):
    """A run of neighbouring elements of a tensor of this shape, from `start` on, in memory order."""

    shape: tuple[int, ...]
    start: int
    values: Tensor


def assemble(slices: Sequence[Slice]) -> Tensor:
    """The whole tensor of which the ranks have brought all slices."""
    whole = torch.zeros(slices[0].shape, dtype=slices[0].values.dtype)
    flat = whole.view(-1)
    for part in slices:
        flat[part.start : part.start + part.values.numel()] = part.values
    return whole


class Owner:
    """The trainable parameters of one group that this rank's layers use, and what the optimizer updates of them.

    params    as the layers have them
    owned     what this rank has of them on its device between steps
    trained   what the optimizer works on
    summed    the parameters in whose `.grad` the sum over all replicas arrives
    masters   copies on the host, where STEP works on them
    pieces    what the optimizer is given: `trained`, or parts of it
    holders   how many ranks have the same sum
    """

    copies_are = "parameters"  # what a memory tracker calls the copies

    def __init__(self, number: int, params: list[nn.Parameter], group: Group, holders: int = 1) -> None:
        self.number, self.params, self.group, self.holders = number, params, group, holders
        self.owned: Sequence[nn.Parameter] = params
        self.trained: Sequence[nn.Parameter] = params
        self.summed: Sequence[nn.Parameter] = params
        self.masters: Sequence[nn.Parameter] = ()
        self.pieces: Sequence[Updated] = ()

    def work_on_host(self) -> None:
        """Let the optimizer work on copies on the host, where gradients are brought."""
        self.masters = [nn.Parameter(on_host(p.detach())) for p in self.owned]
        self.trained = self.summed = self.masters

    def make_resizable(self) -> None:
        """Give copies on the host memory that can be freed between steps, as pinned memory cannot."""
        for master in self.masters:
            if not master.untyped_storage().resizable():
                master.data = master.data.clone()

    def make_pieces(self, names: Mapping[int, str], group_of: Mapping[str, int]) -> None:
        """Say what the optimizer updates; `names` of parameters by their id, `group_of` names in the optimizer."""
        pairs = zip(self.params, self.trained, strict=True)
        self.pieces = [whole_piece(names[id(p)], own) for p, own in pairs]

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """What this rank's device has beside the layers' parameters, each with one of those that it belongs to."""
        return []

    def all_versions(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Where there are several versions of the parameters: their values in each of them, with the parameters."""
        return []

    # while a program runs --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new pass through the program."""

    def show(self, value: Value) -> None:
        """The next instruction reads this value of the group: let the layers use it."""

    def release(self, value: Value) -> None:
        """The program frees a value of the group."""

    def let_gradient_go(self) -> None:
        """Free the gradient, which the device does not need any more."""
        for p in (*self.params, *self.owned):
            p.grad = None

    # a step ----------------------------------------------------------------------------------------------------------

    def take_gradients(self, ins: Instruction) -> None:
        """Before a STEP: give the optimizer the gradients, and room for its states."""

    def finish_update(self) -> None:
        """After a STEP: free its gradients, and let the layers use the new parameters."""
        for p in (*self.params, *self.owned, *self.trained, *(piece.parameter for piece in self.pieces)):
            p.grad = None
        self.show_update()

    def show_update(self) -> None:
        """Let the layers use what the optimizer has made."""

    # questions -------------------------------------------------------------------------------------------------------

    def add_squares(self, total: Tensor) -> None:
        """Add the sum of the squares of the gradient, or of this rank's part of it."""
        for p in self.summed:
            if p.grad is not None:
                total += torch.linalg.vector_norm(p.grad).double().to(total.device) ** 2 / self.holders

    def gradients(self) -> list[tuple[nn.Parameter, Tensor | Slice]]:
        """Copies of the gradients that the optimizer has been given, on the CPU; of each parameter, or of its slice."""
        found: list[tuple[nn.Parameter, Tensor | Slice]] = []
        for p, own in zip(self.params, self.trained, strict=True):
            grad = torch.zeros_like(own) if own.grad is None else own.grad
            found.append((p, grad.to("cpu", copy=True)))
        return found

    def nbytes(self, kind: str) -> int:
        """Bytes of the group's value of this kind; for the optimizer's, only what it has beside its own states."""
        return {
            "param": sum(self.group.tensors) + self.group.frozen,
            "grad": count_bytes(self.params),
            "optimizer_state": 0,
        }[kind]


class Wide(Owner):
    """With precision=bf16 the optimizer updates float32 copies, which are then rounded into the layers' parameters."""

    copies_are = "optimizer"

    def __init__(self, number: int, params: list[nn.Parameter], group: Group, holders: int = 1) -> None:
        super().__init__(number, params, group, holders)
        self.trained = [nn.Parameter(p.detach().clone()) for p in params]

    def copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.trained, self.params, strict=True))

    def take_gradients(self, ins: Instruction) -> None:
        for own, p in zip(self.trained, self.params, strict=True):
            own.grad = None if p.grad is None else p.grad.to(own.dtype)

    def show_update(self) -> None:
        for own, p in zip(self.trained, self.params, strict=True):
            p.data.copy_(own.data)

    def nbytes(self, kind: str) -> int:
        return count_bytes(list(self.trained)) if kind == "optimizer_state" else super().nbytes(kind)
