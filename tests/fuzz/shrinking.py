"""The smallest pair that fails as another one does: `python -m tests.fuzz.campaign --only SEED --shrink`.

Layers, words of the plan, steps and settings are taken away, one after the other, as long as what is left fails alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.models import Entry

MOST = 150  # pairs that are tried
NEEDED = ("linear", "tied", "again", "listed", "pick", "join")  # kinds that are not replaced by a linear layer


def shrink(pair: Any, fails: Callable[[Any], bool]) -> Any:
    """The smallest pair found that `fails`; an error in the judgement, as of layers that do not fit, is no failure."""

    def still(smaller: Any) -> bool:
        try:
            return fails(smaller)
        except Exception:
            return False

    left = MOST
    found = iter(smaller_than(pair))
    while left and (smaller := next(found, None)) is not None:
        left -= 1
        if still(smaller):
            pair, found = smaller, iter(smaller_than(smaller))
    return pair


def smaller_than(pair: Any) -> Iterator[Any]:
    """Pairs with one thing less."""
    spec, entries, words = pair.spec, pair.spec.entries, dict(pair.words)
    for k, entry in enumerate(entries):
        rest = _without(entries, k) if len(entries) > 1 else None
        changed = [replace(entry, freeze=""), replace(entry, still=False)]
        if entry.kind not in NEEDED and entry.dtype is torch.float64:
            changed.append(replace(entry, kind="linear"))
        others = [(*entries[:k], one, *entries[k + 1 :]) for one in changed if one != entry]
        for some in [rest] * (rest is not None) + others:
            yield replace(pair, spec=replace(spec, entries=some))
    for key in words:
        yield replace(pair, words=tuple((k, v) for k, v in words.items() if k != key))
    if words.get("schedule") not in (None, "1f1b", "gpipe", "zb-h1"):
        for other in ("gpipe", "zb-h1"):
            yield replace(pair, words=tuple((words | {"schedule": other}).items()))
    simple = {"cut": 0, "steps": 1, "optimizer": pair.optimizer and "sgd", "scheduler": "", "check": False}
    for name, value in simple.items():
        if getattr(pair, name) != value:
            yield replace(pair, **{name: value}, **({"later": ()} if name == "cut" else {}))
    if pair.steps > 2:
        yield replace(pair, steps=pair.steps - 1)
    for name, value in {"loss": "mse", "given": "steps", "rows": 4}.items():
        if getattr(spec, name) != value and not (name == "rows" and spec.rows < 4):
            yield replace(pair, spec=replace(spec, **{name: value}))


def _without(entries: tuple[Entry, ...], gone: int) -> tuple[Entry, ...] | None:
    """The other layers; None if one of them needs it."""
    found = []
    for k, entry in enumerate(entries):
        sources = tuple(s - (s > gone) for s in entry.sources if s != gone)
        if k == gone:
            continue
        if entry.of == gone or (entry.sources and not sources):
            return None
        found.append(replace(entry, of=entry.of - (entry.of > gone), sources=sources if len(sources) > 1 else ()))
    return tuple(found)
