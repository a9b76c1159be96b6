"""Clusters that tests share: starting ranks is cheap, but not free. Nothing survives in their freed memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minipar import tails
from minipar.cluster import Cluster

# glibc fills what is freed with this byte, and what it gives out with the opposite one. As floating-point numbers the
# first are tiny and the second huge: who reads either is far off, at any size of a model.
POISON = "glibc.malloc.perturb=128"


def shorten_always() -> None:
    """In a rank: recomputations leave out what is not needed however small it is."""
    tails.WORTH.update(cpu=-1.0)


class Clusters:
    """Clusters by size, started at the first use and kept for all tests. Their freed memory is poisoned."""

    def __init__(self) -> None:
        self._made: dict[int, Cluster] = {}

    def __call__(self, ranks: int) -> Cluster:
        if ranks not in self._made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("GLIBC_TUNABLES", POISON)
                self._made[ranks] = Cluster(ranks, device="cpu")
            self._made[ranks].run(shorten_always)
        return self._made[ranks]

    def close(self) -> None:
        for cluster in self._made.values():
            cluster.close()


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    made = Clusters()
    yield made
    made.close()
