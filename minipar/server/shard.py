"""The line of all parameters, one after another in one run of bytes, and what a server does with its part of it.

    line      | 0.weight . . . . . . . . | 0.bias . | 1.weight . . . . . . . |
    servers   |------------- 0 --------------|------------- 1 ---------------|

A worker has the whole line, as it was pulled; a server has its part of the parameters, and of each gradient. So what is
sent are always runs of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minipar.comm.missing import is_missing
from minipar.execution.saving.contents import SavedSlice, optimizer_class, restore_slices, states_of_slice
from minipar.execution.updating import Elements, Form, Optimizer, Scheduler, Update, Updated
from minipar.strategies.shares import GRAIN, Piece, cut

if TYPE_CHECKING:
    from minipar.execution.saving.storage import Reading

Gradients = dict[int, Tensor]  # by key


def form_of(name: str, tensor: Tensor) -> Form:
    """A key: a parameter as servers and workers name it."""
    return Form(name, tuple(tensor.shape), tensor.dtype)


def pieces_of(keys: Sequence[Form], servers: int) -> list[list[Piece]]:
    """For each server, its pieces of the parameters."""
    sizes = [torch.Size(key.shape).numel() * key.dtype.itemsize for key in keys]
    return cut(sizes, servers, [key.dtype.itemsize for key in keys])


class Line:
    """Memory for pieces that follow each other: `bytes`, all of it; `of`, by key the elements of its piece."""

    def __init__(self, keys: Sequence[Form], pieces: Sequence[Piece]) -> None:
        self.begin = pieces[0].place
        before = self.begin % GRAIN  # so that elements of every type are where their type wants them
        whole = torch.zeros(before + pieces[-1].place + pieces[-1].size - self.begin, dtype=torch.uint8)
        self.bytes = whole[before:]
        self.of = {piece.tensor: self.part([piece]).view(keys[piece.tensor].dtype) for piece in pieces}

    def part(self, pieces: Sequence[Piece]) -> Tensor:
        """The bytes of some pieces that follow each other."""
        return self.bytes[pieces[0].place - self.begin : pieces[-1].place + pieces[-1].size - self.begin]

    def values(self, keys: Sequence[Form]) -> list[Tensor]:
        """All parameters, of a line that has them whole."""
        return [self.of.get(k, torch.empty(0, dtype=key.dtype)).view(key.shape) for k, key in enumerate(keys)]


@dataclass
class Gradient:
    """A worker's gradient of one step. It is of `rows` of the `of` rows of the step, and already scaled by rows / of;
    of the keys `missing` it has not arrived yet."""

    step: int
    rows: float
    of: float
    line: Line
    missing: set[int]


def combine(taken: Sequence[Gradient]) -> Gradients:
    """The gradient of the mean over the rows of some gradients: their sum, in this order and in the memory of the first
    one, scaled. What no worker has used gets none."""
    rows, of = sum(gradient.rows for gradient in taken), taken[0].of
    found = {}
    for k, total in taken[0].line.of.items():
        for other in taken[1:]:
            total += other.line.of[k]
        if 0 < rows != of:
            total *= of / rows
        if not is_missing(total):
            found[k] = total
    return found


def squares(gradients: Gradients) -> float:
    """The sum of the squares of some gradients."""
    return sum(torch.linalg.vector_norm(one).item() ** 2 for one in gradients.values())


def clip(gradients: Gradients, whole: float, most: float) -> None:
    """Scale gradients down where the norm of all servers' parts is larger than `most`; `whole` is its square."""
    factor = min(1.0, most / (whole**0.5 + 1e-6))
    for one in gradients.values() if factor < 1 else ():
        one.mul_(factor)


class Shard:
    """One server's part of the parameters. Initial values are given for all keys.

    forms      the parameters that the optimizer is made of, in the model's order; (): the keys
    schedule   the scheduler's state in a saved run, from which it goes on
    """

    def __init__(
        self,
        keys: Sequence[Form],
        pieces: Sequence[Piece],
        values: Sequence[Tensor],
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        forms: Sequence[Form] = (),
        schedule: dict[str, Any] | None = None,
    ) -> None:
        self.keys, self.pieces, self.line = keys, pieces, Line(keys, pieces)
        self.parameters: dict[int, nn.Parameter] = {}
        self.updated: list[Updated] = []
        for piece in pieces:
            key, own = keys[piece.tensor], nn.Parameter(self.line.of[piece.tensor])
            begin = piece.start // key.dtype.itemsize
            own.data.copy_(values[piece.tensor].detach().reshape(-1)[begin : begin + own.numel()])
            self.parameters[piece.tensor] = own
            elements = Elements(key.name, key.shape, begin, begin + own.numel(), 0)
            self.updated.append(Updated(own, (key.name,), (elements,), True))
        self.update, self.updates = Update(optimizer, forms or keys, scheduler), 0
        if self.update.schedule is not None:
            self.update.schedule.load(schedule)
        self.part = self.update.part(self.updated)
        self.optimizer = self.part.optimizer
        self.optimizer_name = optimizer_class(self.optimizer)

    def gradient(self, step: int, rows: float, of: float) -> Gradient:
        """Memory for a worker's gradient."""
        return Gradient(step, rows, of, Line(self.keys, self.pieces), set(self.parameters))

    def apply(self, gradients: Gradients) -> None:
        """Make an update."""
        for k, gradient in gradients.items():
            self.parameters[k].grad = gradient
        if self.update.schedule is not None:
            self.part.follow(self.update.schedule.at(self.updates))
            self.update.schedule.forget(self.updates)
        self.optimizer.step()
        for k in gradients:
            self.parameters[k].grad = None
        self.updates += 1

    def state_bytes(self) -> dict[int, int]:
        """Bytes that the optimizer keeps, by key."""
        kept = {k: self.optimizer.state.get(own, {}).values() for k, own in self.parameters.items()}
        return {k: sum(one.nbytes for one in values if isinstance(one, Tensor)) for k, values in kept.items()}

    # saved runs

    def saved(self) -> Iterator[SavedSlice]:
        """What is saved of this part: parameters, and what the optimizer keeps of them. No copies are made."""
        for piece in self.updated:
            (run,) = piece.runs
            yield SavedSlice(f"parameters/{run.name}", run.shape, run.begin, piece.parameter.detach())
            yield from states_of_slice(piece, self.optimizer.state.get(piece.parameter, {}))

    def saved_schedule(self) -> dict[str, Any] | None:
        """The state of the scheduler now, if there is one."""
        return None if self.update.schedule is None else self.update.schedule.saved(self.updates)

    def resume(self, source: Reading) -> None:
        """Go on with this part of a saved run."""
        restore_slices(self.updated, self.optimizer, source)
