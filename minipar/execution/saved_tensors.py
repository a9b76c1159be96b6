"""What autograd keeps of one layer from its forward to its backward, so that it can be copied away and back in between.

    forward     autograd saves a tensor -> it gets a note instead: which storage, and where in it
    OFFLOAD     the storages are copied away, and freed
    FETCH       new storages get the same bytes
    backward    autograd asks for the tensor -> a view of the present storage. An input half lets go of what the weight
                half does not ask for

Storages that somebody else keeps stay where they are: parameters, the layer's input, its output, the loss's targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minipar.errors import RankError
from minipar.models.tensors import saving_hooks, storages


class Slot:
    """One storage, and the tensors in it that were saved, with the versions that they had."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self.nbytes, self.device = self.storage.nbytes(), tensor.device
        self.saved: list[tuple[Tensor, int]] = []
        self.notes = 0  # that were made of its tensors, and still count

    def check(self) -> None:
        """RankError if a saved tensor was changed in place since, as autograd itself would say."""
        for tensor, version in self.saved:
            if tensor._version != version:
                raise RankError(
                    f"a {tuple(tensor.shape)} tensor that backward needs was changed in place after it was saved; "
                    "offload=activations needs layers that do not"
                )

    def bytes(self) -> Tensor:
        """The storage as a tensor of bytes."""
        assert self.storage is not None
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def let_go(self) -> None:
        self.storage = None
        self.saved.clear()

    def make(self) -> Tensor:
        """A storage of the same bytes, to be filled, as a tensor of bytes."""
        fresh = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.storage = fresh.untyped_storage()
        return fresh


class Note(NamedTuple):
    """What autograd has in place of a tensor."""

    slot: Slot
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def let_go(self) -> None:
        """Autograd will not ask for this tensor again. The last note of a storage frees it."""
        self.slot.notes -= 1
        if self.slot.notes == 0:
            self.slot.let_go()


class SavedTensors:
    """What autograd keeps of one layer and micro-batch: run its forward inside of `saving()`, then `settle` it.

    known   tensors that are kept anyway
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = storages(known)
        self._slots: dict[int, Slot] = {}
        self.slots: list[Slot] = []

    def saving(self) -> AbstractContextManager[Any]:
        """While entered, autograd saves notes."""
        return saving_hooks(self._pack, self._unpack)

    def settle(self, output: Iterable[Tensor]) -> None:
        """The forward is done: leave out the storages of its output, which stay."""
        handed_on = storages(output)
        self.slots = [slot for key, slot in self._slots.items() if key not in handed_on]
        self._known, self._slots = {}, {}

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def let_go(self) -> None:
        """Free all storages, which have been copied away."""
        for slot in self.slots:
            slot.let_go()

    def _pack(self, tensor: Tensor) -> Any:
        # (never the tensor itself: the graph that holds it may be its own)
        usual = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor._is_zerotensor()
        plain = usual and tensor.layout is torch.strided
        key = tensor.untyped_storage().data_ptr() if plain else 0
        if not key or key in self._known or tensor.is_conj() or tensor.is_neg():
            slot = Slot(tensor) if plain else None
            if slot is not None:
                slot.saved.append((tensor.detach(), tensor._version))
            return tensor.detach(), slot
        slot = self._slots.setdefault(key, Slot(tensor))
        slot.saved.append((tensor.detach(), tensor._version))
        slot.notes += 1
        return Note(slot, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Note):
            tensor, slot = packed
            if slot is not None:
                slot.check()
            return tensor
        slot, size, stride, offset, dtype = packed
        slot.check()
        assert slot.storage is not None
        empty = torch.empty(0, dtype=dtype, device=slot.storage.device)
        return empty.set_(slot.storage, offset, size, stride)
