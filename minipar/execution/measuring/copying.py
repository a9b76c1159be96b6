"""Measure what a copy to a slower tier takes on this machine: tensors of a few sizes there and back, and a line."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from minipar.costs.rates import Copies, LinearCost, fit
from minipar.execution.memory.disk import DiskStore
from minipar.execution.memory.stores import Tier, host_store
from minipar.execution.streams import streams_of

SIZES = (16 << 10, 256 << 10, 4 << 20)  # bytes
REPEATS = 3


def measure_copies(device: torch.device, disk: bool, folder: str | None = None) -> Copies:
    """Measure copies of tensors of `device` to the host, and to the disk if `disk`. StoreError for a bad folder."""
    away, back = _lines(host_store(streams_of(device)), device)
    if not disk:
        return Copies(away, back)
    return Copies(away, back, *_lines(DiskStore(folder), torch.device("cpu")))


def _lines(store: Tier, device: torch.device) -> tuple[LinearCost, LinearCost]:
    away: list[tuple[float, float]] = []
    back: list[tuple[float, float]] = []
    try:
        for size in SIZES:
            tensor = torch.zeros(size, dtype=torch.uint8, device=device)
            into = torch.empty_like(tensor)
            away.append((size, _seconds(lambda t=tensor: store.put("probe", t).result())))  # type: ignore[misc]
            back.append((size, _seconds(lambda t=into: store.fetch("probe", t).result())))  # type: ignore[misc]
            store.drop("probe")
    finally:
        store.close()
    return fit(away), fit(back)


def _seconds(act: Callable[[], object]) -> float:
    """The median of a few times, after one that touches the pages."""
    act()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return median(times)
