"""What the loss is a mean over that a model makes itself, such as `model(**batch).loss`: `train(loss=None)`.

    rows 0 | 1 2        loss of all = sum over parts of (loss of a part * its count) / the count of all

It is found by trying: of each tensor of the batch, its numbers other than -100, -1 or 0 (also without those of the
first token, as where each token predicts the next one), and the rows. What a batch has of them may be even; so these
losses are also compared where most numbers of a tensor are replaced by one that a loss may leave out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minipar.errors import PlanError
from minipar.models.losses import Own
from minipar.models.tensors import copied, count_rows, map_tensors, named_tensors, take_rows

TRIED = 3  # rows
_PARTS = range(3), range(1), range(1, 3)
_IGNORED = (-100, -1, 0)
_TARGETS = ("label", "target")

Count = Callable[[Any], Any]


@dataclass(frozen=True)
class Elements:
    """Counts a batch by one of its tensors, such as "x['labels']": its numbers other than `ignored` from token `first`
    on, or its rows."""

    place: str
    ignored: int | None = None
    first: int = 0

    def __call__(self, batch: Any) -> float:
        found = dict(named_tensors(batch, "x"))[self.place]
        if self.ignored is None:
            return len(found)
        return int((found[:, self.first :] if self.first else found).ne(self.ignored).sum())


def find_count(own: Own, model: nn.Module, x: Any, parts: int) -> tuple[Count, str]:
    """What a model's own loss is a mean over, and a warning, which may be "".

    model   on the CPU, where an index that is far off is an error and no more
    x       a batch of which at least `TRIED` rows are there; parts: how many parts it is split into
    Errors: PlanError for a model that gives no loss, and for a loss whose count is not among those tried.
    """
    named = [(name, t) for name, t in named_tensors(x, "x")]
    rows = Elements(named[0][0])
    if parts == 1 or count_rows(x) < TRIED:
        return own.count or rows, ""
    named.sort(key=lambda one: any(word in one[0].lower() for word in _TARGETS))
    named.reverse()
    with _as_evaluated(model) as model:
        try:
            seen = _losses(model, x)
            if all(map(math.isfinite, seen)) and seen != _losses(model, x, 1):
                return own.count or rows, "the model draws random numbers for its loss: parts of a batch draw others"
        except PlanError:
            raise
        except Exception:
            return own.count or rows, ""  # (the profile of the layers will raise this error)
        left: list[Count] = [own.count] if own.count else [*_possible(named), rows]
        left = [count for count in left if _fits(count, x, seen)]
        for place, ignored in [] if own.count else [(name, k) for name, _ in named for k in _IGNORED]:
            other = _uneven(x, place, ignored)
            try:
                found = _losses(model, other)
            except Exception:  # (the model has no such number there)
                continue
            if found == seen or not all(map(math.isfinite, found)):
                continue
            left = [count for count in left if _fits(count, other, found)]
            if left and isinstance(left[0], Elements) and (left[0].place, left[0].ignored) == (place, ignored):
                break
    if not left:
        raise PlanError(
            f"loss=None: of {TRIED} rows the model's own loss is {seen[0]:.6g}, and of 1 + 2 of them {seen[1]:.6g} and "
            f"{seen[2]:.6g}; it is a mean neither over rows nor over what {', '.join(name for name, _ in named)} have "
            f"other than {', '.join(map(str, _IGNORED))}, so it cannot be split. Say what it counts with "
            "loss=minipar.models.losses.weighted(None, count=lambda batch: ...), or train with dp=1 microbatches=1"
        )
    return left[0], ""


@contextmanager
def _as_evaluated(model: nn.Module) -> Iterator[nn.Module]:
    """The model, or a float32 copy of one with fewer bits, without dropout and gradients."""
    modes = [(module, module.training) for module in model.modules()]
    narrow = any(p.is_floating_point() and p.itemsize < 4 for p in model.parameters())
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield (copied(model).float() if narrow else model).eval()
    finally:
        for module, mode in modes:
            module.train(mode)


def _losses(model: nn.Module, x: Any, seed: int = 0) -> list[float]:
    """The loss of all rows that are tried, and those of their parts."""
    found = []
    for part in _PARTS:
        torch.manual_seed(seed)
        found.append(float(Own()(model(take_rows(x, part)), None)))
    return found


def _fits(count: Count, x: Any, losses: list[float]) -> bool:
    """Whether the loss of all rows is the mean of those of the parts, by what they count."""
    whole, *counts = (float(count(take_rows(x, part))) for part in _PARTS)
    if not whole:
        return False
    mean = sum(c * loss for c, loss in zip(counts, losses[1:], strict=True) if c) / whole
    return sum(counts) == whole and abs(mean - losses[0]) <= 1e-5 * max(abs(losses[0]), abs(mean))


def _possible(named: list[tuple[str, Tensor]]) -> list[Count]:
    """What a loss may count of these tensors."""
    whole = [(name, t.dim()) for name, t in named if not t.is_floating_point()]
    return [Elements(name, k, first) for name, dims in whole for k in _IGNORED for first in range(min(dims, 2))[::-1]]


def _uneven(x: Any, place: str, ignored: int) -> Any:
    """The batch with most numbers of a tensor replaced by `ignored`: the first token keeps its number, and the last
    ones, more of them in each row; of numbers for whole rows, the first and the last row that is tried keep theirs."""
    names = iter([name for name, _ in named_tensors(x, "x")])

    def changed(t: Tensor) -> Tensor:
        if next(names) != place:
            return t
        t = t.clone()
        if t.dim() == 1:
            t[1] = ignored
        for row in range(TRIED) if t.dim() > 1 else ():
            t[row, 1 : max(1, t.shape[1] - 1 - row)] = ignored
        return t

    return map_tensors(x, changed)
