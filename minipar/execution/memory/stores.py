"""Slower tiers for tensors: the host's memory, or files on a disk.

    store.put(key, tensor)     starts to copy it away, and returns a future; until it is done the tensor must stay
    store.prefetch(key)        starts to bring it back
    store.get(key)             the tensor, when it is back; what was put stays there until it is put again or dropped
    store.fetch(key, into)     starts to copy it into an existing tensor, and returns a future

Copies run on two threads of the store, one per direction, in order, while the rank computes. A read waits for a put
that is under way. A store has a capacity, and counts its bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from torch import Tensor

from minipar.errors import StoreError
from minipar.wording import several


class Store(Protocol):
    """Where tensors are kept away from the device. StoreError when there is no room, for an unknown key, for damage."""

    def put(self, key: Hashable, tensor: Tensor) -> Future[None]: ...
    def prefetch(self, key: Hashable) -> None: ...
    def get(self, key: Hashable) -> Tensor: ...
    def fetch(self, key: Hashable, into: Tensor) -> Future[None]: ...
    def drop(self, key: Hashable) -> None: ...
    def hold(self, key: Hashable, size: int) -> None: ...
    def close(self) -> None: ...
    @property
    def bytes(self) -> int: ...


class Ledger:
    """Who holds how many bytes of a tier with a capacity."""

    def __init__(self, tier: str, capacity: int | None) -> None:
        self.tier, self.capacity = tier, capacity
        self.sizes: dict[Hashable, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def take(self, key: Hashable, size: int) -> None:
        """Note that `key` now holds `size` bytes. StoreError when that is more than the tier has."""
        others = self.bytes - self.sizes.get(key, 0)
        if self.capacity is not None and others + size > self.capacity:
            raise StoreError(
                f"{self.tier}: {key} needs {size:,} bytes, but {others:,} of {self.capacity:,} are taken; "
                f"possible: offload less, or a {self.tier} with more room"
            )
        self.sizes[key] = size

    def known(self, key: Hashable) -> None:
        """StoreError for a key that was never put."""
        if key not in self.sizes:
            raise StoreError(
                f"{self.tier}: nothing was put under {key!r}; there are {several(len(self.sizes), 'tensor')}"
            )


class Tier(ABC):
    """What both tiers share: two threads that copy in order, and the copies that are under way."""

    tier = ""

    def __init__(self, capacity: int | None = None) -> None:
        self._ledger = Ledger(self.tier, capacity)
        self._thread = ThreadPoolExecutor(1, f"copies to {self.tier}")
        self._reader = ThreadPoolExecutor(1, f"copies from {self.tier}")
        self._written: dict[Hashable, Future[None]] = {}
        self._back: dict[Hashable, Future[Tensor]] = {}

    def put(self, key: Hashable, tensor: Tensor) -> Future[None]:
        """Start to copy a tensor away. It must stay as it is until the future is done."""
        self._ledger.take(key, tensor.numel() * tensor.element_size())
        self._back.pop(key, None)
        self._written[key] = self._thread.submit(self._write, key, tensor.detach())
        return self._written[key]

    def prefetch(self, key: Hashable) -> None:
        """Start to bring a tensor back."""
        self._ledger.known(key)
        if key not in self._back:
            self._back[key] = self._reader.submit(self._read_written, self._written.get(key), self._read, key)

    def get(self, key: Hashable) -> Tensor:
        """A tensor as it was put, in memory of its own; waits for it."""
        self.prefetch(key)
        return self._back.pop(key).result()

    def fetch(self, key: Hashable, into: Tensor) -> Future[None]:
        """Start to copy a tensor into `into`, which has its shape; to another dtype it is converted."""
        self._ledger.known(key)
        return self._reader.submit(self._read_written, self._written.get(key), self._read_into, key, into.detach())

    def hold(self, key: Hashable, size: int) -> None:
        """Count bytes that somebody else keeps in this tier. StoreError when there is no room for them."""
        self._ledger.take(key, size)

    def _read_written(self, written: Future[None] | None, read: Callable[..., Any], *args: Any) -> Any:
        if written is not None:
            wait([written])  # (if it failed, what was put before is still there)
        return read(*args)

    def drop(self, key: Hashable) -> None:
        """Forget a tensor; nothing happens for an unknown key."""
        self._back.pop(key, None)
        self._written.pop(key, None)
        if self._ledger.sizes.pop(key, None) is not None:
            self._thread.submit(self._forget, key)

    @property
    def bytes(self) -> int:
        """Bytes that are kept now."""
        return self._ledger.bytes

    def close(self) -> None:
        """Wait for copies that have not ended, and drop everything that was kept."""
        for key in list(self._ledger.sizes):
            self.drop(key)
        self._reader.shutdown()
        self._thread.shutdown()

    @abstractmethod
    def _write(self, key: Hashable, tensor: Tensor) -> None: ...

    @abstractmethod
    def _read(self, key: Hashable) -> Tensor: ...

    @abstractmethod
    def _read_into(self, key: Hashable, into: Tensor) -> None: ...

    @abstractmethod
    def _forget(self, key: Hashable) -> None: ...


class HostStore(Tier):
    """Tensors in the host's own memory; in pinned memory if they come from a GPU."""

    tier = "host"

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._kept: dict[Hashable, Tensor] = {}

    def _write(self, key: Hashable, tensor: Tensor) -> None:
        kept = self._kept.get(key)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        move(tensor, kept)

    def _read(self, key: Hashable) -> Tensor:
        return self._kept[key].clone()

    def _read_into(self, key: Hashable, into: Tensor) -> None:
        move(self._kept[key], into)

    def _forget(self, key: Hashable) -> None:
        self._kept.pop(key, None)


def move(source: Tensor, into: Tensor) -> None:
    """Copy one tensor into another; the copy is done when this returns. A GPU goes on computing meanwhile."""
    device = next((t.device for t in (source, into) if t.is_cuda), None)
    if device is None:
        into.copy_(source)
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        into.copy_(source, non_blocking=True)
    stream.synchronize()
