"""What a layer's forward changes besides computing its output: running statistics, counters, its own generators.

    FORWARD      count 3 -> 4       the 3 is kept, if this forward will run again
    RECOMPUTE    count 3 -> 4, on a copy; then the layer gets its own count back, such as 9 after other micro-batches

So a recomputation repeats the forward exactly, and counts nothing twice. The runs of a layer show which buffers
change; the others are not copied after the first run. (Norms write their running statistics without changing a tensor's
version, so these always count as changing.) Numbers and tensors that are plain attributes are kept as well, such as
`self.calls` and `self.hidden`; changes of lists and other objects are not seen: use `register_buffer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minipar.models import randomness
from minipar.program import Op, Program

MicrobatchRun = tuple[int, int]  # micro-batch, step


class _Buffer(NamedTuple):
    """A buffer's module and name, or those of a tensor that is a plain attribute."""

    module: nn.Module
    name: str
    plain: bool = False

    @property
    def table(self) -> dict[str, Any]:
        return vars(self.module) if self.plain else self.module._buffers

    def now(self) -> Tensor | None:
        found = self.table.get(self.name)
        return found if isinstance(found, Tensor) else None


class Remembered:
    """One layer's buffers and generators, as its forwards found them."""

    def __init__(self, layer: nn.Module) -> None:
        modules = list(layer.modules())
        self._places = [_Buffer(m, name) for m in modules for name, b in m._buffers.items() if b is not None]
        self._generators: list[Any] = [g for m in modules for g in vars(m).values() if isinstance(g, torch.Generator)]
        self._generators += [g for g in randomness.dice_of(layer) if not randomness.is_global(g)]
        own = [m for m in modules if not type(m).__module__.startswith(("torch.", "minipar."))]
        self._places += [
            _Buffer(m, name, plain=True)
            for m in own
            for name, v in vars(m).items()
            if v is None or isinstance(v, Tensor)
        ]
        self._numbers = [
            (m, key) for m in own for key, v in vars(m).items() if isinstance(v, (int, float)) and key != "training"
        ]
        self._changing: set[_Buffer] = {
            place for place in self._places if isinstance(place.module, nn.modules.batchnorm._NormBase)
        }
        self._first = True
        self._kept: dict[MicrobatchRun, tuple[dict[_Buffer, Tensor | None], list[Any], list[Any]]] = {}

    def __bool__(self) -> bool:
        return bool(self._places or self._generators or self._numbers)

    @contextmanager
    def first(self, key: MicrobatchRun) -> Iterator[None]:
        """While entered, the layer runs forward, and will run again."""
        found = {place: place.now() for place in self._places}
        versions = {place: t._version for place, t in found.items() if t is not None}
        wanted = self._places if self._first else [place for place in self._places if place in self._changing]
        before = {place: t.detach().clone() for place in wanted if (t := found[place]) is not None}
        generators = [randomness.state_of(g) for g in self._generators]
        numbers = self._now()
        yield
        for place, t in found.items():
            now = place.now()
            same = now is t and (t is None or now is None or now._version == versions[place])
            if not same or (self._first and now is not None and not torch.equal(now, before[place])):
                self._changing.add(place)
        self._first = False
        self._kept[key] = {place: before.get(place) for place in self._changing}, generators, numbers

    @contextmanager
    def again(self, key: MicrobatchRun) -> Iterator[None]:
        """While entered, the layer runs again as it ran then; afterwards it has what it had before."""
        kept, generators, numbers = self._kept.get(key, ({}, [], []))
        later = self._now()
        self._set(numbers)
        now = {place: place.now() for place in self._places if place in self._changing}
        states = [randomness.state_of(g) for g in self._generators]
        copies: dict[int, Tensor] = {}  # (two modules may have the same buffer)
        for place, t in now.items():
            then = kept.get(place, t)
            place.table[place.name] = None if then is None else copies.setdefault(id(then), then.detach().clone())
        for g, state in zip(self._generators, generators, strict=False):
            randomness.restore(g, state)
        try:
            yield
        finally:
            self._set(later)
            for place, t in now.items():
                place.table[place.name] = t
            for g, state in zip(self._generators, states, strict=True):
                randomness.restore(g, state)

    def _now(self) -> list[Any]:
        """The numbers that are attributes, as they are."""
        return [getattr(module, key, None) for module, key in self._numbers]

    def _set(self, numbers: list[Any]) -> None:
        for (module, key), number in zip(self._numbers, numbers, strict=False):
            if vars(module).get(key) != number:
                setattr(module, key, number)

    def forget(self, key: MicrobatchRun) -> None:
        """The backward has run."""
        self._kept.pop(key, None)


def will_run_again(program: Program, rank: int) -> frozenset[tuple[int, int, int]]:
    """Layers, with micro-batch and step, of which a rank's program has a recomputation."""
    return frozenset(
        (layer, ins.microbatch, ins.step)
        for ins in program.ranks[rank]
        if ins.op is Op.RECOMPUTE
        for layer in ins.layers
    )
