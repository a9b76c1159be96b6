"""Words of messages: counts with their nouns (`1 rank`, `3 micro-batches`), and the known word near an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def several(count: float, what: str) -> str:
    """A count with its noun, which is given in the singular: `several(2, "rank")` is `2 ranks`."""
    number = str(count) if isinstance(count, int) else f"{count:g}"
    return f"{number} {what if count == 1 else plural(what)}"


def plural(what: str) -> str:
    """The plural of an English noun: `ranks`, `micro-batches`, `processes`, `copies`."""
    if what.endswith(("s", "x", "ch", "sh")):
        return f"{what}es"
    return f"{what[:-1]}ies" if what.endswith("y") and what[-2:-1] not in "aeiou" else f"{what}s"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """What an error adds for a mistyped word: `; did you mean 1f1b?`. It is "" where no known word is near."""
    close = get_close_matches(str(word).lower(), list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
