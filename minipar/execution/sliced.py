"""Slices of sequences on a rank: how they are cut, and how a layer runs on one (see `models/sliced.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from minipar.costs.slicing import token_ranges
from minipar.errors import PlanError
from minipar.models.tensors import count_bytes, detach, differentiable, storages, take_tokens, tensors
from minipar.strategies.keys import check_causal

if TYPE_CHECKING:
    from minipar.program.shape import Shape
    from minipar.strategies.plan import Plan


def cut(value: Any, slices: int | tuple[int, ...], j: int) -> Any:
    """The tokens of slice j of every tensor (rows, tokens, ...) inside a value. Errors: PlanError if it has none."""
    return take_tokens(value, token_ranges(slices, count_tokens([value]))[j])


def count_tokens(values: Iterable[Any]) -> int:
    """How many tokens a row has: the size of dimension 1, which is the same in all tensors inside these values."""
    shapes = [tuple(t.shape) for value in values for t in tensors(value)]
    counts = {shape[1] for shape in shapes if len(shape) > 1}
    if len(counts) != 1 or any(len(shape) < 2 for shape in shapes):
        words = ", ".join(map(str, shapes))
        raise PlanError(
            f"tensors of shapes {words} cannot be cut into slices of tokens; possible are inputs and targets of "
            "(rows, tokens, ...) with the same number of tokens, or a schedule such as 1f1b, which cuts rows only"
        )
    return counts.pop()


def share(y: Any, slices: int | tuple[int, ...], j: int) -> float:
    """The part of a row's tokens that slice j has."""
    tokens = count_tokens([y])
    return len(token_ranges(slices, tokens)[j]) / tokens


def ranges_of(plan: Plan, shape: Shape, values: Iterable[Any]) -> list[range]:
    """The tokens of a plan's slices in these inputs and targets; [] if it cuts none. Errors: PlanError if it cannot."""
    if plan.slice_count == 1:
        return []
    check_causal(plan, shape)
    return token_ranges(plan.cut, count_tokens(values))


def tokens_in(value: Any) -> int:
    """The number of tokens in a slice's value: dimension 1 of its first tensor."""
    first = tensors(value)[0]
    return first.shape[1]


class Alone:
    """A layer on one slice of sequences, as a function of its input, so that it can be measured by itself."""

    def __init__(self, layer: nn.Module, start: int, before: Any, more: bool, trains: bool) -> None:
        self.layer, self.start, self.before, self.more, self.trains = layer, start, before, more, trains
        self.given: Any = None
        self.handed_on: Any = None

    def __call__(self, x: Any) -> Any:
        self.given = detach(self.before, self.trains)
        output, after = self.layer(x, self.start, self.given)
        self.handed_on = after if self.more else None
        return output

    @property
    def beside(self) -> Any:
        return self.given, self.handed_on

    def sizes(self, known: Any) -> tuple[int, int]:
        """Bytes of the tensors for the next slice, and of their gradients; `known` tensors are counted elsewhere."""
        return carry_sizes(self.handed_on, known)


def carry_sizes(handed_on: Any, known: Any) -> tuple[int, int]:
    """Bytes of the tensors that a layer gives to the next slice, by storage, without `known`; and of the gradients."""
    before = storages(tensors(known)).keys()
    size = sum(n for key, n in storages(tensors(handed_on)).items() if key not in before)
    return size, count_bytes(differentiable(handed_on))
