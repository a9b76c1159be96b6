"""What one parameter server keeps: its part of the parameters, its optimizer, and gradients that wait to be applied.

flat      [ weight . . . . | bias . | next weight's first half ]     one run of bytes, sent as it is
pushed    [ . . . . . . . . . . . . . . . . . . . . . . . . . . ]     one for each gradient that waits, same layout
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.comm.missing import is_missing
from minipar.execution.saving.contents import (
    SavedSlice,
    SavedSource,
    of_whole,
    optimizer_class,
    restore_slices,
    states_of_slice,
)
from minipar.execution.updating import Elements, Form, Optimizer, Scheduler, Update, Updated
from minipar.models.nodes import Cut
from minipar.models.tensors import dtype_name, dtype_named
from minipar.server.connection import Peer
from minipar.server.framing import bytes_of
from minipar.strategies.shares import GRAIN, Piece, cut


class ParameterKey(NamedTuple):
    """A parameter as servers and workers name it: any text or number, shape, dtype ("float32"). Of a parameter of which
    ranks have shards, each is a key; `cut` says which one it is (dim, index, count and pieces of a `Cut`). Of one that
    is served in pieces, each is a key; `part` has its first element and its end, in the parameter or its shard."""

    name: str | int
    shape: tuple[int, ...]
    dtype: str
    cut: tuple[int, int, int, int] | None = None
    part: tuple[int, int] | None = None

    @property
    def type(self) -> torch.dtype:
        return dtype_named(self.dtype)

    @property
    def nbytes(self) -> int:
        begin, end = self.part or (0, torch.Size(self.shape).numel())
        return (end - begin) * self.type.itemsize

    @property
    def offset(self) -> int:
        """The byte of the parameter, or of its shard, with which it begins."""
        return self.part[0] * self.type.itemsize if self.part else 0

    def of(self, whole: Tensor) -> Tensor:
        """The elements of this key, of all those of the parameter or its shard."""
        flat = whole.reshape(-1)
        return flat[slice(*self.part)] if self.part else flat

    def __str__(self) -> str:
        return f"{self.dtype} {tuple(self.shape)}"


def key_of(name: str | int, tensor: Tensor) -> ParameterKey:
    return ParameterKey(name, tuple(tensor.shape), dtype_name(tensor.dtype))


def pieces_of(keys: Sequence[ParameterKey], servers: int) -> list[list[Piece]]:
    """What each server keeps: of all shards of a parameter the same part."""
    first = [key for key in keys if key.cut is None or key.cut[1] == 0]
    copies = [1 if key.cut is None else key.cut[2] for key in first]
    return cut([key.nbytes for key in first], servers, [key.type.itemsize for key in first], copies)


def digest(keys: Sequence[ParameterKey], servers: int) -> str:
    """A hash of the keys: a worker and a server compare it first, to be sure that they have the same ones."""
    return hashlib.sha256(json.dumps([servers, [list(key) for key in keys]]).encode()).hexdigest()


def view(flat: Tensor, key: ParameterKey, piece: Piece) -> Tensor:
    """A piece's elements in the memory of a server, in memory order."""
    return flat[piece.place : piece.place + piece.size].view(key.type)


def length(pieces: Sequence[Piece]) -> int:
    return pieces[-1].place + pieces[-1].size if pieces else 0


class Run(NamedTuple):
    """Bytes `start` to `stop` of what a server keeps, which a worker keeps from byte `place` on."""

    start: int
    stop: int
    place: int


def kept_by(pieces: Sequence[Piece], held: Collection[int]) -> list[Piece]:
    """What a worker with these tensors keeps of a server's pieces: with smaller places, but aligned as there."""
    found: list[Piece] = []
    end, shift, before = 0, 0, -2
    for k, piece in enumerate(pieces):
        if piece.tensor in held:
            if k > before + 1:  # (pieces that follow each other at the server do so here: they travel as one run)
                shift = end + (piece.place - end) % GRAIN - piece.place
            found.append(piece._replace(place=piece.place + shift))
            end, before = piece.place + shift + piece.size, k
    return found


def runs_of(pieces: Sequence[Piece], held: Collection[int], wanted: Collection[int]) -> list[Run]:
    """What a server sends of some tensors to a worker that keeps `held` of its pieces, as few runs of bytes."""
    places = {piece.tensor: piece.place for piece in kept_by(pieces, held)}
    found: list[Run] = []
    before = -2
    for k, piece in enumerate(pieces):
        if piece.tensor in wanted:
            stop = piece.place + piece.size
            if k == before + 1:
                found[-1] = found[-1]._replace(stop=stop)
            else:
                found.append(Run(piece.place, stop, places[piece.tensor]))
            before = k
    return found


@dataclass(frozen=True)
class Division:
    """Which workers have what, where not every worker pulls everything at once.

    keys    for each parameter group, its keys by number; where groups are served in pieces, for each piece; where some
            are served together, for these
    held    for each worker its groups (or pieces, or groups together), in the order in which it pulls them
    own     for each worker, the keys that it has
    each    whether every group (or piece, ...) is updated and sent by itself, as soon as all have pushed its gradient
    ahead   whether some groups may have had more updates than others, since stages do not wait for each other
    """

    keys: tuple[tuple[int, ...], ...]
    held: tuple[tuple[int, ...], ...]
    own: tuple[frozenset[int], ...]
    each: bool
    ahead: bool = False

    def holders(self, group: int) -> list[int]:
        """The workers that have a group."""
        return [worker for worker, held in enumerate(self.held) if group in held]


class Room:
    """Memory for one gradient, and the pieces in it: made once and used again for the next gradients."""

    def __init__(self, keys: Sequence[ParameterKey], pieces: Sequence[Piece], flat: Tensor) -> None:
        self.flat = flat
        whole = bytes_of(flat)
        self.bytes = {p.tensor: whole[p.place : p.place + p.size] for p in pieces}
        self.views = [view(flat, keys[p.tensor], p) for p in pieces]
        self.of = dict(zip(self.bytes, self.views, strict=True))  # by tensor


Gradients = dict[int, Tensor]  # by tensor


def squares(gradients: Gradients) -> float:
    """The sum of the squares of some gradients."""
    return sum(torch.linalg.vector_norm(one).item() ** 2 for one in gradients.values())


@dataclass
class Pushed:
    """A worker's gradient of one step, as far as it has arrived. That of its whole replica is of `rows` of the `of`
    rows of the step, and already scaled by rows / of."""

    worker: int
    life: int
    step: int
    rows: int
    of: int
    room: Room
    missing: set[int] = field(default_factory=set)  # tensors of which the piece is not here yet
    held: frozenset[int] = frozenset()  # tensors that the worker has
    passed_on: bool = False  # whether some of it is of an earlier life of the worker


def scale_of(replicas: Sequence[Sequence[Pushed]]) -> float:
    """By what the sum of some replicas' gradients is scaled, so that it is the gradient of the mean over their rows."""
    first = [pushed[0] for pushed in replicas if pushed]  # (all ranks of a replica say the same of its rows)
    rows = sum([pushed.rows for pushed in first])
    return first[0].of / rows if 0 < rows != first[0].of else 1.0


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
        self.keys, self.pieces, self.schedule = keys, pieces, schedule
        self.by_tensor = {piece.tensor: piece for piece in pieces}  # (tensors are numbered as their keys)
        self.flat = torch.zeros(length(pieces), dtype=torch.uint8)
        self.bytes = bytes_of(self.flat)
        self.before = torch.empty(0, dtype=torch.uint8)  # where it is kept, what some tensors were before an update
        self.parameters = [nn.Parameter(view(self.flat, keys[p.tensor], p)) for p in pieces]
        self.own = {piece.tensor: p for piece, p in zip(pieces, self.parameters, strict=True)}
        for piece, parameter in zip(pieces, self.parameters, strict=True):
            size = keys[piece.tensor].type.itemsize
            whole = values[piece.tensor].detach().reshape(-1)
            parameter.data.copy_(whole[piece.start // size : piece.stop // size])
        forms = forms or [Form(str(key.name), key.shape, key.type) for key in keys]
        self.scheduler = scheduler
        self.update, self.updates = self._begun(optimizer, forms), 0
        self.furthest = 0  # updates of the stage that has had most; `updates` counts those of all stages
        self.updated = [_updated(keys[p.tensor], p, own) for p, own in zip(pieces, self.parameters, strict=True)]
        self.part = self.update.part(self.updated)
        # (a server may keep nothing, if there are more servers than elements)
        self.optimizer = self.part.optimizer if self.part.which else None
        self.readers: list[Peer] = []  # peers to which `flat` may still be on its way
        self.spare: list[Room] = []
        self.pushed: dict[tuple[int, int], Pushed] = {}  # by worker and life
        # Runs of pieces of one type are summed in one go.
        self.runs: list[tuple[torch.dtype, int, int]] = []
        for piece in pieces:
            dtype = keys[piece.tensor].type
            if self.runs and self.runs[-1][0] is dtype and self.runs[-1][2] == piece.place:
                self.runs[-1] = dtype, self.runs[-1][1], piece.place + piece.size
            else:
                self.runs.append((dtype, piece.place, piece.place + piece.size))

    def _begun(self, optimizer: Optimizer, forms: Sequence[Form]) -> Update:
        update = Update(optimizer, forms, self.scheduler)
        if update.schedule is not None:
            update.schedule.load(self.schedule)
        return update

    @property
    def nbytes(self) -> int:
        return length(self.pieces)

    # gradients

    def pushing(
        self, worker: int, life: int, step: int, rows: int, of: int, held: Collection[int] | None = None
    ) -> Pushed:
        """The place for a worker's gradient of a step: the one that has begun to arrive, or a new one. `held`: the
        tensors that the worker has; default: all."""
        found = self.pushed.get((worker, life))
        if found is None or found.step != step:
            if found is not None:
                self.let_go(found)
            room = self.spare.pop() if self.spare else self._room(torch.empty(self.nbytes, dtype=torch.uint8))
            mine = frozenset(self.by_tensor if held is None else self.by_tensor.keys() & held)
            found = Pushed(worker, life, step, rows, of, room, set(mine), mine)
            self.pushed[worker, life] = found
        return found

    def _room(self, flat: Tensor) -> Room:
        return Room(self.keys, self.pieces, flat)

    def find(self, worker: int, step: int) -> Pushed | None:
        """A worker's gradient of a step that is whole."""
        for pushed in self.pushed.values():
            if pushed.worker == worker and pushed.step == step and not pushed.missing:
                return pushed
        return None

    def let_go(self, pushed: Pushed) -> None:
        del self.pushed[pushed.worker, pushed.life]
        self.spare.append(pushed.room)

    def passes_on(self, pushed: Pushed, life: int) -> None:
        """What has arrived of a gradient is that of another life of its worker, which pushes it again."""
        del self.pushed[pushed.worker, pushed.life]
        pushed.life, pushed.passed_on = life, True
        self.pushed[pushed.worker, life] = pushed

    def keep(self, tensors: Collection[int]) -> None:
        """Keep some tensors as they are now, before they are updated."""
        if not len(self.before):
            self.before = torch.empty_like(self.flat)
        for piece in (self.by_tensor[k] for k in tensors if k in self.by_tensor):
            place = slice(piece.place, piece.place + piece.size)
            self.before[place] = self.flat[place]

    @property
    def bytes_before(self) -> memoryview:
        return bytes_of(self.before)

    def combine(
        self,
        taken: Sequence[Pushed],
        tensors: Collection[int] | None = None,
        scale: float = 1.0,
        number: int | None = None,
    ) -> Gradients:
        """Sum gradients, in this order, and scale the sum, in the memory of the first one that has a tensor. What no
        worker has used gets none.

        tensors   only these; default: all
        number    of the update; default: that of all tensors together
        """
        if not taken or self.optimizer is None:
            return {}
        if tensors is None and all(len(p.held) == len(self.pieces) for p in taken):
            if len(taken) > 1 or scale != 1:
                self._add(taken, scale)
            return {k: total for k, total in taken[0].room.of.items() if not is_missing(total)}
        found = {}
        for k in self.by_tensor if tensors is None else tensors:
            here = [p for p in taken if k in p.held]
            if here:
                total = here[0].room.of[k]
                for other in here[1:]:
                    total += other.room.of[k]
                if scale != 1:
                    total *= scale
                if not is_missing(total):
                    found[k] = total
        return found

    def clip(self, gradients: Gradients, whole: float, most: float) -> float:
        """Scale what was combined down, where the norm of all parts together is larger than `most`; `whole` is the
        square of that norm. Returns the factor."""
        factor = min(1.0, most / (whole**0.5 + 1e-6))
        for one in gradients.values() if factor < 1 else ():
            one.mul_(factor)
        return factor

    def apply(self, taken: Sequence[Pushed], gradients: Gradients, number: int | None = None) -> None:
        """Update with what was combined; free the gradients. `number`: of the update, where the tensors of each stage
        are updated by themselves."""
        if taken:
            self.step(gradients, number)
            self.end(taken, number)

    def step(self, gradients: Gradients, number: int | None = None) -> None:
        """Update the tensors of these gradients. `number`: of the update; default: that of all tensors together."""
        if self.optimizer is None or not gradients:
            return
        if self.readers:
            self._spare_readers()
        for k, gradient in gradients.items():
            self.own[k].grad = gradient
        if self.update.schedule is not None:
            self.part.follow(self.update.schedule.at(self.updates if number is None else number))
        self.optimizer.step()
        for k in gradients:
            self.own[k].grad = None

    def end(self, taken: Sequence[Pushed], number: int | None = None) -> None:
        """All tensors of an update are there: the next one begins, and its gradients are free."""
        if number is None:  # (else another stage may be behind)
            self.forget(self.updates)
        self.updates += 1
        self.furthest = self.updates if number is None else max(self.furthest, number + 1)
        for pushed in taken:
            self.let_go(pushed)

    def forget(self, number: int) -> None:
        """Forget what the scheduler has said of the updates before this one."""
        if self.update.schedule is not None:
            self.update.schedule.forget(number)

    def _add(self, taken: Sequence[Pushed], scale: float) -> None:
        """Sum whole gradients and scale the sum, in the memory of the first."""
        for dtype, start, stop in self.runs:
            sums = taken[0].room.flat[start:stop].view(dtype)
            for other in taken[1:]:
                sums += other.room.flat[start:stop].view(dtype)
            if scale != 1:
                sums *= scale

    def _spare_readers(self) -> None:
        """Before an update: if answers are still being sent, they keep the old memory, and the update gets a copy."""
        if any(peer.busy for peer in self.readers):
            flat = torch.empty_like(self.flat)
            flat.copy_(self.flat)
            self._take(flat)
        self.readers = []

    def _take(self, flat: Tensor) -> None:
        self.flat, self.bytes = flat, bytes_of(flat)
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            parameter.data = view(flat, self.keys[piece.tensor], piece)

    def state_bytes(self) -> dict[int, int]:
        """Bytes that the optimizer keeps, by tensor."""
        found: dict[int, int] = {}
        for piece, parameter in zip(self.pieces, self.parameters, strict=True) if self.optimizer else ():
            assert self.optimizer is not None
            states = (v for v in self.optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor))
            found[piece.tensor] = sum(value.numel() * value.element_size() for value in states)
        return found

    # snapshots

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything, as tensors by name and a few facts. Gradients that are not whole are left out."""
        tensors = {"parameters": self.flat}
        numbers: dict[str, Any] = {}
        for k, parameter in enumerate(self.parameters if self.optimizer else ()):
            assert self.optimizer is not None
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{k}/{name}"] = value.detach().clone()  # (some share their memory)
                else:
                    numbers[f"{k}/{name}"] = value
        whole = [p for p in self.pushed.values() if not p.missing]
        for k, pushed in enumerate(whole):
            tensors[f"pushed/{k}"] = pushed.room.flat
        facts = [[p.worker, p.life, p.step, p.rows, p.of, sorted(p.held)] for p in whole]
        return tensors, {
            "numbers": numbers, "pushed": facts, "updates": self.updates, "furthest": self.furthest
        }  # fmt: skip

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go back to what `state` gave."""
        self._take(tensors["parameters"].clone())
        self.readers = []
        self.pushed = {
            (worker, life): Pushed(
                worker, life, step, rows, of, self._room(tensors[f"pushed/{k}"].clone()), set(), frozenset(held)
            )
            for k, (worker, life, step, rows, of, held) in enumerate(facts["pushed"])
        }
        if self.optimizer is None:
            return
        states: dict[int, dict[str, Any]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "optimizer":
                k, _, state = rest.partition("/")
                states.setdefault(int(k), {})[state] = value
        for name, number in facts["numbers"].items():
            k, _, state = name.partition("/")
            states.setdefault(int(k), {})[state] = number
        if self.update.schedule is not None and facts["updates"] < self.updates:
            self.update = self._begun(self.update.factory, self.update.forms)
        self.updates, self.furthest = facts["updates"], facts["furthest"]
        # (torch counts parameters by group; those that are in no group have no state)
        place = {id(p): k for k, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"])}
        numbered = {place[id(self.parameters[k])]: found for k, found in states.items()}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    # saved runs

    @property
    def optimizer_name(self) -> str:
        return "" if self.optimizer is None else optimizer_class(self.optimizer)

    def saved(self) -> Iterator[SavedSlice]:
        """What is saved of this part: parameters, and what the optimizer keeps of them. No copies are made."""
        for piece, key in zip(self.updated, self._kept_keys(), strict=True):
            (run,) = piece.runs
            kept = {} if self.optimizer is None else self.optimizer.state.get(piece.parameter, {})
            values = SavedSlice(f"parameters/{run.name}", run.shape, run.begin, piece.parameter.detach())
            for found in (values, *states_of_slice(piece, kept)):
                yield from of_whole(found, _cut_of(key))

    def _kept_keys(self) -> list[ParameterKey]:
        return [self.keys[piece.tensor] for piece in self.pieces]

    def saved_schedule(self) -> dict[str, Any] | None:
        """The state of the scheduler now, if there is one."""
        return None if self.update.schedule is None else self.update.schedule.saved(self.furthest)

    def resume(self, source: SavedSource) -> None:
        """Go on with this part of a saved run."""
        cuts = [_cut_of(key) for key in self._kept_keys()]
        restore_slices(self.updated, self.optimizer, source, cuts)


def _cut_of(key: ParameterKey) -> Cut | None:
    return None if key.cut is None else Cut(*key.cut)


def _updated(key: ParameterKey, piece: Piece, own: nn.Parameter) -> Updated:
    """A piece as its optimizer knows it."""
    begin, size = (key.offset + piece.start) // key.type.itemsize, own.numel()
    return Updated(own, (str(key.name),), (Elements(str(key.name), key.shape, begin, begin + size, 0),), True)
