"""Clusters that tests share: starting ranks is cheap, but not free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minipar.cluster import Cluster


class Clusters:
    """Clusters by size, started at the first use and kept for all tests."""

    def __init__(self) -> None:
        self._made: dict[int, Cluster] = {}

    def __call__(self, ranks: int) -> Cluster:
        if ranks not in self._made:
            self._made[ranks] = Cluster(ranks, device="cpu")
        return self._made[ranks]

    def close(self) -> None:
        for cluster in self._made.values():
            cluster.close()


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    made = Clusters()
    yield made
    made.close()
