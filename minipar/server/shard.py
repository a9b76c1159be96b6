"""The line of all parameters, one after another in one run of bytes, and what a server does with its part of it.

    line      | 0.weight . . . . . . . . | 0.bias . | 1.weight . . . . . . . |
    servers   |------------- 0 --------------|------------- 1 ---------------|

A worker has the whole line, as it was pulled; a server has its part of the parameters, and of each gradient. So what is
sent are always runs of bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from minipar.comm.missing import is_missing, real
from minipar.execution.emulation import Pacing
from minipar.execution.lines import Slice
from minipar.execution.saving.contents import elements_of, restore_pieces
from minipar.execution.saving.folder import Saved
from minipar.execution.saving.storage import Reading
from minipar.execution.updating import Form, Optimizer, Scheduler, Update, Updated
from minipar.program.server_rule import SYNC, Mode
from minipar.strategies.shares import GRAIN, Piece, cut

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


@dataclass(frozen=True)
class Settings:
    """What servers and workers must know of each other.

    folder     where they meet; only this user may look into it
    keys       the parameters, in the order of their line
    workers    that all wait for before they begin; more may come later
    steps      of a worker (async, ssp), or updates (sync, k-of-n), after which everything ends
    servers    how many have parts of the line
    groups     the parameter group of each key; (): each is one of its own
    on_death   of a worker: "continue", and wait until it comes back; or "abort"
    clip       the norm to which an update's gradient is scaled down, that of all parts of it; None: it is not
    compress   how workers push gradients: none, bf16, fp16, topk:R
    pacing     of emulated devices; None: nothing is delayed
    secret     known to nobody else
    """

    folder: str
    keys: tuple[Form, ...]
    workers: int
    steps: int
    mode: Mode = SYNC
    servers: int = 1
    groups: tuple[int, ...] = ()
    on_death: str = "continue"
    clip: float | None = None
    compress: str = "none"
    pacing: Pacing | None = None
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def pieces(self) -> list[list[Piece]]:
        """For each server, its pieces of the parameters."""
        return pieces_of(self.keys, self.servers)

    def groups_of(self, keys: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.groups[k] if self.groups else k for k in keys))


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
            real(total).add_(real(other.line.of[k]))
        if 0 < rows != of:
            real(total).mul_(of / rows)
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
    """One server's part of the parameters. `values` are the initial ones, of all keys.

    optimizer  makes the optimizer of the whole model, of which each server has a part; it must work element by element
    scheduler  makes a scheduler of it, which steps once for each update
    forms      the parameters that the optimizer is made of, in the model's order; (): the keys
    """

    def __init__(
        self,
        settings: Settings,
        number: int,
        values: Sequence[Tensor],
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        forms: Sequence[Form] = (),
    ) -> None:
        self.keys, self.pieces = settings.keys, settings.pieces[number]
        self.line = Line(self.keys, self.pieces)
        self.parameters: dict[int, nn.Parameter] = {}
        self.updated: list[Updated] = []
        for piece in self.pieces:
            key, own = self.keys[piece.tensor], nn.Parameter(self.line.of[piece.tensor])
            begin = piece.start // key.dtype.itemsize
            own.data.copy_(values[piece.tensor].detach().reshape(-1)[begin : begin + own.numel()])
            self.parameters[piece.tensor] = own
            self.updated.append(Updated(own, key.name, key.shape, begin, True))
        update = Update(optimizer, forms or self.keys, scheduler)
        self.part, self.schedule, self.updates = update.part(self.updated), update.schedule, 0
        self.optimizer = self.part.optimizer

    def gradient(self, step: int, rows: float, of: float) -> Gradient:
        """Memory for a worker's gradient."""
        return Gradient(step, rows, of, Line(self.keys, self.pieces), set(self.parameters))

    def apply(self, gradients: Gradients) -> None:
        """Make an update."""
        for k, gradient in gradients.items():
            self.parameters[k].grad = gradient
        if self.schedule is not None:
            self.part.follow(self.schedule.at(self.updates))
            self.schedule.forget(self.updates)
        self.optimizer.step()
        for k in gradients:
            self.parameters[k].grad = None
        self.updates += 1

    def state_bytes(self) -> dict[int, int]:
        """Bytes that the optimizer keeps, by key."""
        kept = {k: self.optimizer.state.get(own, {}).values() for k, own in self.parameters.items()}
        return {k: sum(one.nbytes for one in values if isinstance(one, Tensor)) for k, values in kept.items()}

    # saved runs

    def saved(self) -> Iterator[Slice]:
        """What is saved of this part: parameters, and what the optimizer keeps of them. No copies are made."""
        for piece in self.updated:
            yield from elements_of(piece, self.optimizer.state.get(piece.parameter, {}))

    def saved_schedule(self) -> dict[str, Any] | None:
        """The state of the scheduler now, if there is one."""
        return None if self.schedule is None else self.schedule.saved(self.updates)

    def resume(self, saved: Saved) -> None:
        """Go on with this part of a saved run."""
        restore_pieces(self.updated, [self.optimizer], Reading(saved))
        if self.schedule is not None:
            self.schedule.load(saved.header.schedule)
