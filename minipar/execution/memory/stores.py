"""Slower tiers for tensors: the host's memory, or files on a disk.

    store.put(key, tensor)     starts to copy it away, and returns a future; until it is done the tensor must stay
    store.fetch(key, into)     starts to copy it into an existing tensor, and returns a future; what was put stays

Copies run on two threads of the store, one per direction, in order, while the rank computes; those between a GPU and
the host's memory run on two streams of the GPU. A read waits for a put that is under way. A store has a capacity, and
counts its bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minipar.cluster import threads
from minipar.errors import StoreError
from minipar.execution.streams import Copy, StreamCopy, Streams
from minipar.program import Op
from minipar.wording import several


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
        self._thread = threads.InTurn(f"copies to {self.tier}")
        self._reader = threads.InTurn(f"copies from {self.tier}")
        self._written: dict[Hashable, Future[None]] = {}

    def put(self, key: Hashable, tensor: Tensor) -> Copy:
        """Start to copy a tensor away. It must stay as it is until the future is done."""
        self._ledger.take(key, tensor.numel() * tensor.element_size())
        written = self._written[key] = self._thread.submit(self._write, key, tensor.detach())
        return written

    def fetch(self, key: Hashable, into: Tensor) -> Copy:
        """Start to copy a tensor into `into`, which has its shape; to another dtype it is converted."""
        self._ledger.known(key)
        found: Future[None] = self._reader.submit(
            self._read_written, self._written.get(key), self._read_into, key, into.detach()
        )
        return found

    def hold(self, key: Hashable, size: int) -> None:
        """Count bytes that somebody else keeps in this tier. StoreError when there is no room for them."""
        self._ledger.take(key, size)

    def _read_written(self, written: Future[None] | None, read: Callable[..., Any], *args: Any) -> Any:
        if written is not None:
            wait([written])  # (if it failed, what was put before is still there)
        return read(*args)

    def drop(self, key: Hashable) -> None:
        """Forget a tensor; nothing happens for an unknown key."""
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
    def _read_into(self, key: Hashable, into: Tensor) -> None: ...

    @abstractmethod
    def _forget(self, key: Hashable) -> None: ...


class HostStore(Tier):
    """Tensors in the host's own memory."""

    tier = "host"

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._kept: dict[Hashable, Tensor] = {}

    def _write(self, key: Hashable, tensor: Tensor) -> None:
        kept = self._kept.get(key)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        kept.copy_(tensor)

    def _read_into(self, key: Hashable, into: Tensor) -> None:
        into.copy_(self._kept[key])

    def _forget(self, key: Hashable) -> None:
        self._kept.pop(key, None)


class PinnedStore(HostStore):
    """The host's memory for tensors of a GPU: buffers that copies on streams of the GPU reach fast, used again and
    again. A copy is done for whoever follows it on the GPU before it is done for the host."""

    def __init__(self, streams: Streams, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._streams = streams
        self._last: dict[Hashable, Copy] = {}  # that reads or writes what is kept

    def put(self, key: Hashable, tensor: Tensor) -> Copy:
        self._ledger.take(key, tensor.numel() * tensor.element_size())
        kept = self._kept.get(key)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            self._forget(key)
            kept = self._kept[key] = self._streams.room(tensor)
        return self._noted(key, self._streams.copy(tensor.detach(), kept, Op.OFFLOAD.value, self._last.get(key)))

    def fetch(self, key: Hashable, into: Tensor) -> Copy:
        self._ledger.known(key)
        return self._noted(key, self._streams.copy(self._kept[key], into.detach(), Op.FETCH.value, self._last[key]))

    def _noted(self, key: Hashable, copy: Copy) -> Copy:
        self._last[key] = replace(copy, tensors=()) if isinstance(copy, StreamCopy) else copy
        return copy

    def drop(self, key: Hashable) -> None:
        if self._ledger.sizes.pop(key, None) is not None:
            self._forget(key)

    def _forget(self, key: Hashable) -> None:
        kept = self._kept.pop(key, None)
        last = self._last.pop(key, None)
        if kept is not None:
            self._streams.give_back(kept, last)


def host_store(streams: Streams, capacity: int | None = None) -> Tier:
    """The host's memory beside a rank's device."""
    return PinnedStore(streams, capacity) if streams.runs_ahead else HostStore(capacity)
