"""Follow every live storage, to the byte, by torch's public dispatch hooks.

    an operator's output with a storage not seen before    + its bytes
    that storage dies (a weak reference says so)           - its bytes
    `storage.resize_(n)`, or an operator that grows it     the difference

Seen are the operators of the thread that entered the mode, and of autograd's backward on its behalf. Not seen: what a
kernel needs for itself, the buffers of gloo and NCCL, memory of numpy, and tensors made outside (`register` takes
them in). Bytes are those of live tensors: an allocator may hold more.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from minipar.models.dispatch_mode import DispatchMode

_OUTSIDE = -1


class FollowedStorage(weakref.ref[Any]):
    """A storage that is followed: a weak reference that knows what it refers to.

    nbytes   its size when it was last seen; -1 for one that belongs to somebody else
    kind     one of `series.ALL_KINDS`; "" until it is known
    layer    the layer that it belongs to; -1: none
    """

    __slots__ = ("key", "kind", "layer", "nbytes")
    key: int
    kind: str
    layer: int
    nbytes: int


class Storages(DispatchMode):
    """Live storages of one device type, while entered; frees are seen afterwards, too.

    `changed(held, delta)` is what a subclass does about a change. It may raise, and then the operator raises.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device_type = device
        self.live = 0
        self.known: dict[int, FollowedStorage] = {}
        # Weak references are told of a death at any place, on any thread: they only leave a note, read by `settle`.
        self._freed: deque[Any] = deque()
        self._taking = True
        self._resize: list[Any] = []

    def changed(self, held: FollowedStorage, delta: int) -> None:
        """A storage was allocated, freed, or has another size now."""

    def register(self, tensor: Tensor, kind: str = "", layer: int = -1) -> FollowedStorage:
        """Follow a tensor's storage from now on, made outside or not, and say what it is."""
        storage = tensor.untyped_storage()
        held = self.find(storage)
        if held is None or held.nbytes == _OUTSIDE:
            held = self._follow(storage, storage.nbytes(), kind, layer)
            self._change(held, held.nbytes)
        return held

    def find(self, storage: torch.UntypedStorage) -> FollowedStorage | None:
        """The record of a storage, if it has one."""
        held = self.known.get(id(storage))
        return held if held is not None and held() is storage else None

    def held_by(self, tensor: Tensor) -> FollowedStorage | None:
        """The record of a tensor's storage; None for one that is not followed."""
        held = self.find(tensor.untyped_storage())
        return None if held is None or held.nbytes == _OUTSIDE else held

    def leave(self, held: FollowedStorage) -> None:
        """A storage belongs to somebody else from now on. (It is not counted, and its end is no news.)"""
        held.nbytes = _OUTSIDE

    def everything(self) -> Iterator[FollowedStorage]:
        """All that is live and followed."""
        self.settle()
        return (held for held in list(self.known.values()) if held.nbytes > 0)

    def settle(self) -> None:
        """Take note of the storages that have died."""
        freed = self._freed
        while freed:
            held: FollowedStorage = freed.popleft()
            if self.known.get(held.key) is held:
                del self.known[held.key]
            if held.nbytes > 0:
                self.live -= held.nbytes
                self.changed(held, -held.nbytes)

    # what the mode sees ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._see(out, args, kwargs)
        elif isinstance(out, (list, tuple)):
            for one in out:
                if isinstance(one, Tensor):
                    self._see(one, args, kwargs)
        return out

    def _see(self, tensor: Tensor, args: Any, kwargs: Any) -> None:
        if tensor.layout is not torch.strided:
            return  # has no storage of its own, but tensors inside
        storage = tensor.untyped_storage()
        held = self.known.get(id(storage))
        if held is not None and held() is storage:
            if held.nbytes != _OUTSIDE and held.nbytes != storage.nbytes():
                self._resized(held, storage.nbytes())
        elif tensor.device.type == self.device_type:
            outside = not self._taking or _has(args, storage) or (kwargs and _has(kwargs.values(), storage))
            held = self._follow(storage, _OUTSIDE if outside else storage.nbytes(), "", -1)
            if not outside:
                self._change(held, held.nbytes)

    def _follow(self, storage: torch.UntypedStorage, nbytes: int, kind: str, layer: int) -> FollowedStorage:
        held = FollowedStorage(storage, self._freed.append)
        held.key, held.nbytes, held.kind, held.layer = id(storage), nbytes, kind, layer
        self.known[held.key] = held
        return held

    def _resized(self, held: FollowedStorage, nbytes: int) -> None:
        delta = nbytes - held.nbytes
        held.nbytes = nbytes
        self._change(held, delta)

    def _change(self, held: FollowedStorage, delta: int) -> None:
        self.settle()
        self.live += delta
        self.changed(held, delta)

    # resize_ is a method of storages, which no operator goes through -------------------------------------------------

    def __enter__(self) -> Any:
        before: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = before(storage, size)
            held = self.find(storage)
            if held is not None and held.nbytes != _OUTSIDE:
                self._resized(held, storage.nbytes())
            return result

        self._resize.append(before)
        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize.pop()  # type: ignore[method-assign]
        super().__exit__(*error)


def _has(arguments: Any, storage: torch.UntypedStorage) -> bool:
    """Whether an operator's output is a view of something that it was given."""
    for one in arguments:
        if isinstance(one, Tensor):
            if one.layout is torch.strided and one.untyped_storage() is storage:
                return True
        elif isinstance(one, (list, tuple)) and _has(one, storage):
            return True
    return False
