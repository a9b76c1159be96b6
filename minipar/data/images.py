"""Scikit-learn's handwritten digits: 1797 images of 8 x 8, which come with the package (an optional extra)."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minipar.data.sources import Source
from minipar.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

VALIDATION_EVERY = 10


@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits. x: (rows, 64) grey values in [0, 1], float32; y: (rows,) the digit, int64.

    seed   see `Source`
    """

    inputs = 64
    classes = 10

    def __post_init__(self) -> None:
        if find_spec("sklearn") is None:
            raise PlanError("the digits come with scikit-learn, which is not installed: pip install scikit-learn")

    @property
    def targets(self) -> range:
        return range(self.classes)

    def places(self, split: str) -> int:
        return len(images()[split][0])

    def examples(self, places: np.ndarray, split: str) -> tuple[Tensor, Tensor]:
        import torch

        x, y = images()[split]
        return torch.from_numpy(x[places]), torch.from_numpy(y[places])


def digits(seed: int = 0) -> Digits:
    """The digits; every tenth image is validation, the others are train. Nothing is read yet.

    Errors: `PlanError` if scikit-learn is not installed.
    """
    return Digits(seed=seed)


@lru_cache(maxsize=1)
def images() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images (n, 64) and digits (n,) of both splits; read once per process."""
    table = _table()
    x, y = (table[:, :-1] / 16).astype(np.float32), table[:, -1].astype(np.int64)
    validation = np.arange(len(x)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return {"train": (x[~validation], y[~validation]), "validation": (x[validation], y[validation])}


def _table() -> np.ndarray:
    """The digits (n, 65): 64 grey values from 0 to 16, and the digit."""
    found = find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():  # importing scikit-learn, which reads the same file, takes a second in each rank
            with gzip.open(file, "rt") as lines:
                return np.loadtxt(lines, delimiter=",")
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True))
