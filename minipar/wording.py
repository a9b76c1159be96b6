"""Counts in words: `1 rank`, `2 ranks`, `1 micro-batch`, `3 micro-batches`."""

from __future__ import annotations


def several(count: float, what: str) -> str:
    """A count with its noun, which is given in the singular: `several(2, "rank")` is `2 ranks`."""
    number = str(count) if isinstance(count, int) else f"{count:g}"
    return f"{number} {what if count == 1 else plural(what)}"


def plural(what: str) -> str:
    """The plural of an English noun: `ranks`, `micro-batches`, `processes`, `copies`."""
    if what.endswith(("s", "x", "ch", "sh")):
        return f"{what}es"
    return f"{what[:-1]}ies" if what.endswith("y") and what[-2:-1] not in "aeiou" else f"{what}s"
