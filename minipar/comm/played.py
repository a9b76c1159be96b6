"""Collectives by a program of `program/collectives`, with the arguments of those in shared memory (shared.py).

A program has equal chunks, one for each rank. Where ranks have more rows than others, or none, parts are filled up to
the size of the largest on the way. A program runs in the `wait` of its handle: it is this rank's own work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

Play = Callable[..., Tensor]  # play(collective, flat tensor, op="sum", root=0)


def allreduce(play: Play, index: int, x: Tensor, op: str = "sum") -> None:
    """Reduce a contiguous tensor in place."""
    play("allreduce", x.view(-1), op)


def reduce(play: Play, index: int, x: Tensor, root: int, op: str = "sum") -> None:
    """Reduce a contiguous tensor in place on member `root`; the others' are left in between."""
    play("reduce", x.view(-1), op, root)


def broadcast(play: Play, index: int, x: Tensor, root: int) -> None:
    """Give a contiguous tensor of member `root` to all."""
    play("broadcast", x.view(-1), root=root)


def reduce_scatter(play: Play, index: int, x: Tensor, into: Tensor, sizes: Sequence[int], op: str = "sum") -> None:
    """Reduce a contiguous tensor, each member keeping its part (of these sizes) in `into`."""
    filled = _filled(x.view(-1).split(list(sizes)), max(sizes))
    into.view(-1).copy_(play("reduce_scatter", filled, op)[: into.numel()])


def all_gather(play: Play, index: int, into: Tensor, sizes: Sequence[int]) -> None:
    """Collect the members' parts, of these sizes, end to end; this one's is at its place already."""
    parts = into.view(-1).split(list(sizes))
    filled = _filled(parts, max(sizes))
    play("all_gather", filled)
    for part, chunk in zip(parts, filled.split(max(sizes)), strict=True):
        part.copy_(chunk[: part.numel()])


def all_to_all(play: Play, index: int, x: Tensor, into: Tensor, sizes: Sequence[Sequence[int]]) -> None:
    """Member k's part for member j has sizes[k][j] elements; in `into`, those for this member stand end to end."""
    most = max(map(max, sizes))
    came = play("all_to_all", _filled(x.split(list(sizes[index])), most))
    got = into.split([row[index] for row in sizes])
    for part, chunk in zip(got, came.split(most), strict=True):
        part.copy_(chunk[: part.numel()])


def _filled(parts: Sequence[Tensor], size: int) -> Tensor:
    whole = torch.zeros(size * len(parts), dtype=parts[0].dtype)
    for part, chunk in zip(parts, whole.split(size), strict=True):
        chunk[: part.numel()].copy_(part)
    return whole


class Played:
    """A program that its `wait` runs, in the place of a backend's work."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run
        self._error: BaseException | None = None

    def wait(self, *_: timedelta) -> None:
        """Run it, at the first call."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run()
            except BaseException as error:
                self._error = error
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._run is None

    def get_future(self) -> Any:
        """There is none: RuntimeError."""
        raise RuntimeError("a program that is played does not call back")
