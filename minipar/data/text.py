"""The source text of the Python standard library, as bytes: a real corpus that every Python has."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minipar.data.sources import Source
from minipar.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 4 << 20
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_EVERY = 10


@dataclass(frozen=True)
class Text(Source):
    """Source text for a language model. x: (rows, context) bytes as int64; y: the same, one byte later.

    seed      see `Source`
    context   bytes in a row
    limit     largest number of bytes of text to read, for both splits together
    """

    context: int = 64
    limit: int = LIMIT
    vocab = 256

    def __post_init__(self) -> None:
        _check(self.limit, context=self.context)

    @property
    def targets(self) -> range:
        return range(self.vocab)

    def places(self, split: str) -> int:
        return _places(self.limit, split, self.context)

    @property
    def stride(self) -> int:
        return self.context

    def examples(self, places: np.ndarray, split: str) -> tuple[Tensor, Tensor]:
        import torch

        found = _cut(self.limit, split, places, self.context + 1).astype(np.int64)
        return torch.from_numpy(found[:, :-1].copy()), torch.from_numpy(found[:, 1:].copy())


@dataclass(frozen=True)
class Windows(Source):
    """Source text for an MLP. x: (rows, window) bytes, scaled to [-1, 1], float32; y: (rows,) the next byte, int64.

    seed     see `Source`
    window   bytes in a row
    limit    largest number of bytes of text to read, for both splits together
    """

    window: int = 32
    limit: int = LIMIT
    vocab = 256

    def __post_init__(self) -> None:
        _check(self.limit, window=self.window)

    @property
    def targets(self) -> range:
        return range(self.vocab)

    def places(self, split: str) -> int:
        return _places(self.limit, split, self.window)

    @property
    def stride(self) -> int:
        return self.window

    def examples(self, places: np.ndarray, split: str) -> tuple[Tensor, Tensor]:
        import torch

        found = _cut(self.limit, split, places, self.window + 1)
        x = found[:, :-1].astype(np.float32) / np.float32(127.5) - np.float32(1)
        return torch.from_numpy(x), torch.from_numpy(found[:, -1].astype(np.int64))


def stdlib_text(context: int = 64, seed: int = 0, limit: int = LIMIT) -> Text:
    """The standard library's source text for a language model: rows of `context` bytes, `vocab` 256.

    Every tenth file is validation, the others are train. Nothing is read yet.
    Errors: `PlanError` for a context below 1, or longer than the text.
    """
    return Text(context, limit, seed=seed)


def files() -> list[str]:
    """The corpus's files, relative to the standard library: its modules, without tests or other packages.

    They are in the order of a hash of their names, so that the first few MB are a fair sample of the whole library.
    """
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED]
        found += [Path(folder, name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return sorted(found, key=lambda name: hashlib.blake2b(name.encode()).digest())


@lru_cache(maxsize=2)
def corpus(limit: int = LIMIT) -> dict[str, np.ndarray]:
    """Train and validation text, uint8; read once per process.

    The text is whole files in the order of `files`; the last one is cut so that both splits together have at most
    `limit` bytes. Ranks that run the same Python read the same text. Errors: `PlanError` if the standard library has no
    source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[str, list[bytes]] = {"train": [], "validation": []}
    left = limit
    for number, name in enumerate(files()):
        if left <= 0:
            break
        content = (root / name).read_bytes()[:left]
        left -= len(content)
        parts["validation" if number % VALIDATION_EVERY == VALIDATION_EVERY - 1 else "train"].append(content)
    if not parts["train"]:
        raise PlanError(f"no Python source under {root}: this Python comes without its standard library's text")
    return {split: np.frombuffer(b"".join(found), dtype=np.uint8) for split, found in parts.items()}


def _check(limit: int, **length: int) -> None:
    for key, value in {**length, "limit": limit}.items():
        if value < 1:
            raise PlanError(f"{key}={value}: must be at least 1")


def _places(limit: int, split: str, length: int) -> int:
    size = len(corpus(limit)[split])
    if size <= length:
        raise PlanError(f"rows of {length} bytes: the {split} text has {size}; a larger limit than {limit} may help")
    return size - length


def _cut(limit: int, split: str, places: np.ndarray, length: int) -> np.ndarray:
    return corpus(limit)[split][places[:, None] + np.arange(length)]
