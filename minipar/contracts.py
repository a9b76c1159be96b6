"""What a program promises about the parameters that its forwards and backwards use. Imports nothing of minipar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Synchronous:
    """Every forward of step s uses the parameters after exactly s updates; an update uses every micro-batch once."""


@dataclass(frozen=True)
class Local:
    """Every replica updates its own parameters with the gradients of its own rows, each micro-batch of it once. After
    every `steps` updates, and at the end, they are averaged over the replicas, and at no other time."""

    steps: int


Contract = Synchronous | Local
