"""Operations under way: what `isend`, `irecv` and `iallreduce` hand back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Handle:
    """One operation under way. Its communicator keeps it (and so its tensor) alive until it was waited for."""

    __slots__ = ("_pending", "_tensor", "_work")

    def __init__(self, work: Any, tensor: torch.Tensor | None, pending: set[Handle]) -> None:
        self._work = work
        self._tensor = tensor
        self._pending = pending
        if work is not None:
            pending.add(self)

    def wait(self) -> None:
        """Return when the operation is complete; on NCCL, when the current stream is set to wait for it.

        RuntimeError when a peer is gone. A second call returns at once.
        """
        if self._work is not None:
            self._work.wait()
            self._release()

    def done(self) -> bool:
        """Whether it is complete, without blocking. A receive, and on gloo a send, counts as not done
        until `wait` has returned."""
        return self._work is None or bool(self._work.is_completed())

    def when_done(self, call: Callable[[], None]) -> None:
        """Call back when a collective is complete, from another thread; where the backend cannot, never."""
        if self._work is not None and isinstance(self._work, dist.Work):
            try:
                self._work.get_future().add_done_callback(lambda _: call())
            except RuntimeError:
                return

    def _release(self) -> None:
        self._work = self._tensor = None
        self._pending.discard(self)


class StagedHandle(Handle):
    """An operation on a host copy of a tensor on a GPU; `wait` brings the result back where there is one."""

    __slots__ = ("_host",)

    def __init__(self, work: Any, host: torch.Tensor, into: torch.Tensor | None, pending: set[Handle]) -> None:
        super().__init__(work, into, pending)
        self._host: torch.Tensor | None = host

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        if self._tensor is not None and self._host is not None:
            # On the current stream, as a kernel would be; pinned memory is not reused before the copy is through.
            self._tensor.copy_(self._host, non_blocking=True)
        self._host = None
        self._release()
