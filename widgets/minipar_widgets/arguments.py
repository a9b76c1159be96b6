"""What a widget's arguments may be: each check returns the value, or raises a PlanError that says what is possible."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from typing import TypeVar

from minipar.errors import PlanError
from minipar.wording import did_you_mean

T = TypeVar("T")


def whole(name: str, value: object, least: int, most: int, more: str = "") -> int:
    """A whole number from `least` to `most`; `more` says what to do for other numbers."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise PlanError(f"{name}={value!r}: possible are whole numbers from {least:,} to {most:,}{more}")
    return value


def number(name: str, value: object, least: float, most: float) -> float:
    """A number from `least` to `most`."""
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    if not fits or not least <= value <= most:  # type: ignore[operator]
        raise PlanError(f"{name}={value!r}: possible are numbers from {least:g} to {most:g}")
    return float(value)  # type: ignore[arg-type]


def one_of(name: str, value: T, known: Collection[T]) -> T:
    """One of some known values."""
    if value not in known:
        near = did_you_mean(value, map(str, known))
        raise PlanError(f"{name}={value!r}: unknown; possible are {', '.join(map(str, known))}{near}")
    return value
