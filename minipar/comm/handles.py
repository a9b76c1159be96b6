"""Operations under way: what `isend`, `irecv` and `iallreduce` return."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from minipar.cluster import notes, worker
from minipar.comm.queues import Collective
from minipar.comm.transport.interface import StreamWork


class Handle:
    """One operation under way. Its communicator keeps it (and so its tensor) alive until `wait` was called.

    `what`: for a message, "send to rank" or "recv from rank" with the peer and the tag, to say what a rank waits for.
    `after`: what `wait` calls when it is complete.
    """

    __slots__ = ("_after", "_pending", "_tensor", "_what", "_work")

    def __init__(
        self,
        work: Any,
        tensor: torch.Tensor | None,
        pending: set[Handle],
        what: tuple[str, int, int] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._after = after
        self._work = work
        self._what = what
        self._tensor = tensor
        self._pending = pending
        if work is not None:
            pending.add(self)

    def wait(self) -> None:
        """Return when the operation is complete; on NCCL, when the current stream is set to wait for it.

        RuntimeError when a peer is gone; RankError when ranks started different collectives. A second call returns
        at once.
        """
        if self._work is not None:
            self._await()
            self._work = self._tensor = None
            self._pending.discard(self)
        after, self._after = self._after, None
        if after is not None:
            after()

    def then(self, call: Callable[[], object]) -> Handle:
        """This handle, whose `wait` calls `call` at its end, on the thread that waits."""
        before = self._after

        def both() -> None:
            if before is not None:
                before()
            call()

        self._after = both
        return self

    def _await(self) -> None:
        worker.check_whole()
        work, what = self._work, self._what
        if what is not None and work.is_completed():
            work.wait()
            return
        text = f"{what[0]} {what[1]} tag {what[2]}" if what is not None else getattr(work, "label", "")
        notes.waiting(text, time.monotonic())
        try:
            work.wait()
        finally:
            notes.going_on()

    def done(self) -> bool:
        """Whether it is complete, without blocking. A receive, and on gloo a send, counts as not done
        until `wait` has returned."""
        return self._work is None or bool(self._work.is_completed())

    def on_stream(self) -> bool:
        """Let the current stream of the GPU wait for the operation, while this thread goes on. Returns False, and does
        nothing, where only a thread can wait for it."""
        return isinstance(self._work, (Collective, StreamWork)) and self._work.on_stream()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` when a collective is complete, from another thread; never, if the backend cannot do that."""
        if isinstance(self._work, Collective):
            self._work.when_done(call)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on a GPU in pinned memory; complete when this returns."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
