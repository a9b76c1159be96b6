"""What one parameter server keeps: its part of the parameters, its optimizer, and gradients that wait to be applied.

flat      [ weight . . . . | bias . | next weight's first half ]     one run of bytes, sent as it is
pushed    [ . . . . . . . . . . . . . . . . . . . . . . . . . . ]     one for each gradient that waits, same layout
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm.missing import is_missing
from minipar.execution.saving.contents import SavedSlice, optimizer_class, restore_slices, states_of_slice
from minipar.execution.updating import Elements, Form, Optimizer, Scheduler, Update, Updated
from minipar.models.tensors import dtype_name, dtype_named
from minipar.server.connection import Peer
from minipar.server.framing import bytes_of
from minipar.strategies.shares import Piece, cut

if TYPE_CHECKING:
    from minipar.execution.saving.storage import Reading


class ParameterKey(NamedTuple):
    """A parameter as servers and workers name it: any text or number, shape, dtype ("float32")."""

    name: str | int
    shape: tuple[int, ...]
    dtype: str

    @property
    def type(self) -> torch.dtype:
        return dtype_named(self.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.type.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)}"


def key_of(name: str | int, tensor: Tensor) -> ParameterKey:
    return ParameterKey(name, tuple(tensor.shape), dtype_name(tensor.dtype))


def pieces_of(keys: Sequence[ParameterKey], servers: int) -> list[list[Piece]]:
    """What each server keeps."""
    return cut([key.nbytes for key in keys], servers, [key.type.itemsize for key in keys])


def digest(keys: Sequence[ParameterKey], servers: int) -> bytes:
    """A hash of the keys: a worker and a server compare it first, to be sure that they have the same ones."""
    return hashlib.sha256(json.dumps([servers, [list(key) for key in keys]]).encode()).digest()


def view(flat: Tensor, key: ParameterKey, piece: Piece) -> Tensor:
    """A piece's elements in the memory of a server, in memory order."""
    return flat[piece.place : piece.place + piece.size].view(key.type)


def length(pieces: Sequence[Piece]) -> int:
    return pieces[-1].place + pieces[-1].size if pieces else 0


class Room:
    """Memory for one gradient, and the pieces in it: allocated once and used again for the next gradients."""

    def __init__(self, keys: Sequence[ParameterKey], pieces: Sequence[Piece]) -> None:
        flat = torch.empty(length(pieces), dtype=torch.uint8)
        whole = bytes_of(flat)
        self.bytes = {p.tensor: whole[p.place : p.place + p.size] for p in pieces}
        self.of = {p.tensor: view(flat, keys[p.tensor], p) for p in pieces}


Gradients = dict[int, Tensor]  # by tensor


def squares(gradients: Gradients) -> float:
    """The sum of the squares of some gradients."""
    return sum(torch.linalg.vector_norm(one).item() ** 2 for one in gradients.values())


@dataclass
class Pushed:
    """A worker's gradient of one step, as far as it has arrived. It is of `rows` of the `of` rows of the step, and
    already scaled by rows / of."""

    worker: int
    session: int
    step: int
    rows: int
    of: int
    room: Room
    missing: set[int] = field(default_factory=set)  # tensors of which the piece is not here yet


class Shard:
    """One server's part. `values` are the initial parameters, in the order of `keys`; `schedule` is the scheduler's
    state in a saved run, from which it goes on."""

    def __init__(
        self,
        keys: Sequence[ParameterKey],
        pieces: Sequence[Piece],
        values: Sequence[Tensor],
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        forms: Sequence[Form] = (),
        schedule: dict[str, Any] | None = None,
    ) -> None:
        self.keys, self.pieces = keys, pieces
        self.by_tensor = {piece.tensor: piece for piece in pieces}  # (tensors are numbered as their keys)
        self.flat = torch.zeros(length(pieces), dtype=torch.uint8)
        self.parameters = [nn.Parameter(view(self.flat, keys[p.tensor], p)) for p in pieces]
        for piece, parameter in zip(pieces, self.parameters, strict=True):
            size = keys[piece.tensor].type.itemsize
            whole = values[piece.tensor].detach().reshape(-1)
            parameter.data.copy_(whole[piece.start // size : piece.stop // size])
        forms = forms or [Form(str(key.name), key.shape, key.type) for key in keys]
        self.update, self.updates = Update(optimizer, forms, scheduler), 0
        if self.update.schedule is not None:
            self.update.schedule.load(schedule)
        self.updated = [_updated(keys[p.tensor], p, own) for p, own in zip(pieces, self.parameters, strict=True)]
        self.part = self.update.part(self.updated)
        self.optimizer = self.part.optimizer
        self.readers: list[Peer] = []  # peers to which `flat` may still be on its way
        self.spare: list[Room] = []
        self.pushed: dict[tuple[int, int], Pushed] = {}  # by worker and session

    # gradients

    def pushing(self, worker: int, session: int, step: int, rows: int, of: int) -> Pushed:
        """The place for a worker's gradient of a step: the one that has begun to arrive, or a new one."""
        found = self.pushed.get((worker, session))
        if found is None or found.step != step:
            if found is not None:
                self.let_go(found)
            room = self.spare.pop() if self.spare else Room(self.keys, self.pieces)
            found = self.pushed[worker, session] = Pushed(worker, session, step, rows, of, room, set(self.by_tensor))
        return found

    def find(self, worker: int, step: int) -> Pushed | None:
        """A worker's gradient of a step that is whole."""
        for pushed in self.pushed.values():
            if pushed.worker == worker and pushed.step == step and not pushed.missing:
                return pushed
        return None

    def let_go(self, pushed: Pushed) -> None:
        del self.pushed[pushed.worker, pushed.session]
        self.spare.append(pushed.room)

    def combine(self, taken: Sequence[Pushed]) -> Gradients:
        """The gradient of the mean over the rows of some gradients: their sum, in this order and in the memory of the
        first one, scaled. What no worker has used gets none."""
        rows, of = sum(pushed.rows for pushed in taken), taken[0].of
        found = {}
        for k, total in taken[0].room.of.items():
            for other in taken[1:]:
                total += other.room.of[k]
            if 0 < rows != of:
                total *= of / rows
            if not is_missing(total):
                found[k] = total
        return found

    def clip(self, gradients: Gradients, whole: float, most: float) -> None:
        """Scale what was combined down, where the norm of all parts of it is larger than `most`; `whole` is the square
        of that norm."""
        factor = min(1.0, most / (whole**0.5 + 1e-6))
        for one in gradients.values() if factor < 1 else ():
            one.mul_(factor)

    def apply(self, taken: Sequence[Pushed], gradients: Gradients) -> None:
        """Update with what was combined; free the gradients."""
        if self.readers:
            self._spare_readers()
        own = dict(zip(self.by_tensor, self.parameters, strict=True))
        for k, gradient in gradients.items():
            own[k].grad = gradient
        if self.update.schedule is not None:
            self.part.follow(self.update.schedule.at(self.updates))
            self.update.schedule.forget(self.updates)
        self.optimizer.step()
        for k in gradients:
            own[k].grad = None
        self.updates += 1
        for pushed in taken:
            self.let_go(pushed)

    def _spare_readers(self) -> None:
        """Before an update: if answers are still being sent, they keep the old memory, and the update gets a copy."""
        if any(peer.busy for peer in self.readers):
            self.flat = self.flat.clone()
            for piece, parameter in zip(self.pieces, self.parameters, strict=True):
                parameter.data = view(self.flat, self.keys[piece.tensor], piece)
        self.readers = []

    def state_bytes(self) -> dict[int, int]:
        """Bytes that the optimizer keeps, by tensor."""
        kept = [self.optimizer.state.get(parameter, {}).values() for parameter in self.parameters]
        sizes = [sum(value.nbytes for value in values if isinstance(value, Tensor)) for values in kept]
        return dict(zip(self.by_tensor, sizes, strict=True))

    # saved runs

    @property
    def optimizer_name(self) -> str:
        return optimizer_class(self.optimizer)

    def saved(self) -> Iterator[SavedSlice]:
        """What is saved of this part: parameters, and what the optimizer keeps of them. No copies are made."""
        for piece in self.updated:
            (run,) = piece.runs
            kept = self.optimizer.state.get(piece.parameter, {})
            yield SavedSlice(f"parameters/{run.name}", run.shape, run.begin, piece.parameter.detach())
            yield from states_of_slice(piece, kept)

    def saved_schedule(self) -> dict[str, Any] | None:
        """The state of the scheduler now, if there is one."""
        return None if self.update.schedule is None else self.update.schedule.saved(self.updates)

    def resume(self, source: Reading) -> None:
        """Go on with this part of a saved run."""
        restore_slices(self.updated, self.optimizer, source)


def _updated(key: ParameterKey, piece: Piece, own: nn.Parameter) -> Updated:
    """A piece as its optimizer knows it."""
    begin, size = piece.start // key.type.itemsize, own.numel()
    return Updated(own, (str(key.name),), (Elements(str(key.name), key.shape, begin, begin + size, 0),), True)
