"""The collectives of a group, in the order in which this rank has called them: each in turn goes through its steps.

    iallreduce(x) on rank 0     announce | not all there: queued          | all there and equal: go on
    iallreduce(x) on rank 1                        announce | all there and equal: go on at once

The steps of a collective are a generator: it announces what it is, waits until all ranks have called the same
(calls.py), and then exchanges pieces in shared memory (arena.py, shared.py), or starts a work of gloo or NCCL. The
caller does not wait for that. Three can do the steps: the rank's `wait`, its next collective, or a helper thread. All
three call `run`, which does what can be done now, in order.

A mismatch is an error on every rank of the group, and counts as done: the group goes on with the next collective.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from minipar.cluster import worker
from minipar.cluster.threads import Helper
from minipar.comm.transport.calls import Need, Steps
from minipar.errors import CollectiveMismatch, RankError

_SLICE = 0.05  # seconds of a wait for a lock, or in native code: an interrupt can come this late
_LOOKS = 4  # before it sleeps: what comes at once need not wake it
_NAP = 5e-4


@dataclass(eq=False)
class Collective:
    """One collective, under way. What `Handle` calls a work.

    work       what its steps have started in gloo or NCCL, if anything
    on_gpu     whether the stream of the GPU waits for that, and not the thread that calls `wait`
    """

    queue: Queue
    text: str
    steps: Steps
    on_gpu: bool = False
    need: Need | None = None
    work: Any = None
    error: BaseException | None = None
    done: bool = False  # with its steps
    calls: list[Callable[[], None]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """What it is, and among which ranks."""
        return f"{self.text} over {','.join(map(str, self.queue.members))}"

    def advance(self) -> bool:
        """Do all steps that can be done now; returns whether they are over. Called under the queue's lock."""
        try:
            with torch.no_grad():
                while self.error is None and (self.need is None or self.need.met()):
                    self.need = next(self.steps)
        except StopIteration as end:
            self.work = end.value
            return True
        except Exception as error:
            self.error = error
        except BaseException:  # an interrupt, in the middle of a step
            self.error = RankError("this collective was interrupted; what it has left in its tensor is of no use")
            raise
        return self.error is not None

    def wait(self) -> None:
        """Return when it is complete; an interrupt can come between the steps of the wait. RankError for a mismatch;
        RuntimeError when a peer is gone."""
        self.queue.wait(self)
        if self.error is not None:
            raise self.error
        if self.on_gpu and self.work is not None:
            self.work.wait()
            return
        while self.work is not None:
            try:
                self.work.wait(timedelta(seconds=_SLICE))
                return
            except RuntimeError:
                # The error is of the time limit, which does nothing else to a collective, or of the collective itself.
                if self.work.is_completed():
                    self.work.wait()
                    return
            self.queue.check()

    def is_completed(self) -> bool:
        """Whether it is complete or has failed, without blocking."""
        self.queue.run()
        return self.done and (self.work is None or bool(self.work.is_completed()))

    def on_stream(self) -> bool:
        """Let the current stream of the GPU wait for it, if it works on streams; returns whether it did."""
        if self.on_gpu and self.work is not None:
            self.work.synchronize()
        return self.on_gpu and self.work is not None

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` when it is complete, from another thread; never, if the backend cannot do that. (NCCL's future
        is done when the work is in the stream: `on_stream` is for these.)"""
        with self.queue.telling:
            if not self.done:
                self.calls.append(call)
                return
        self._tell(call)

    def finish(self) -> None:
        """Its steps are over."""
        with self.queue.telling:
            self.done = True
        for call in self.calls:
            self._tell(call)

    def _tell(self, call: Callable[[], None]) -> None:
        if self.work is None:
            call()
        elif not self.on_gpu:
            with contextlib.suppress(RuntimeError):  # (the backend cannot do that)
                self.work.get_future().add_done_callback(lambda _: call())


@dataclass(eq=False)
class Queue:
    """The collectives of one group. `starter`: continues what nobody waits for. `lost`: gives a member whose host is
    known to be cut off."""

    members: tuple[int, ...]
    starter: Starter
    lost: Callable[[], int | None] = lambda: None
    waiting: deque[Collective] = field(default_factory=deque)
    attended: int = 0  # how many threads wait for a collective here; they do its steps
    lock: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that does steps
    telling: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, text: str, steps: Steps, unattended: bool = True, on_gpu: bool = False) -> Collective:
        """Queue a collective, and do what can be done of it now. `unattended`: whether it must go on while nobody waits
        for it (False if the caller waits at once). What the backend refuses at once is raised here."""
        worker.check_whole()
        one = Collective(self, text, steps, on_gpu)
        self.waiting.append(one)
        self.run()
        if on_gpu:  # NCCL orders its work by the calling thread's stream
            self.wait(one)
        elif unattended and not one.done:
            self.starter.watch(self)
        if one.error is not None and not isinstance(one.error, CollectiveMismatch):
            raise one.error
        return one

    def run(self, blocking: bool = False) -> None:
        """Do all steps that can be done now. If another thread is doing that: wait for it (`blocking`, in slices), or
        return at once."""
        if not self.waiting or not self.lock.acquire(blocking, _SLICE if blocking else -1):
            return
        try:
            while self.waiting and self.waiting[0].advance():
                self.waiting[0].finish()  # before it leaves the queue: `sleep` reads the queue first, then `done`
                self.waiting.popleft()
        finally:
            self.lock.release()

    def wait(self, one: Collective) -> None:
        """Return when the steps of a collective are over. ConnectionError when a member is gone."""
        looks = 0
        self.attended += 1
        try:
            while not one.done:
                self.run(blocking=True)
                looks += 1
                if not one.done and looks > _LOOKS:
                    self.sleep(one)
        finally:
            self.attended -= 1

    def sleep(self, until: Collective | None = None) -> None:
        """Sleep until the first collective may go on, or for 50 ms (without `until`: 0.5 ms). Returns at once if
        `until` is done. ConnectionError when a member is gone."""
        first = self.waiting[0] if self.waiting else None
        if first is not None and first.need is not None and not (until is not None and until.done):
            first.need.sleep(until is None)
            if until is not None:
                self.check()

    def check(self) -> None:
        """ConnectionError if a member's host is known to be cut off."""
        gone = self.lost()
        if gone is not None:
            raise ConnectionError(f"rank {gone} is gone, or its host is cut off")


class Starter(Helper[Queue]):
    """Goes on with the collectives of all groups of a rank."""

    def turn(self) -> None:
        for queue in list(self.waiting):
            if not queue.attended:  # two threads would only be in each other's way
                queue.run()
            with self.lock:  # (what is queued after this check is watched again)
                if not queue.waiting:
                    self.waiting.discard(queue)
        only = list(self.waiting)
        if len(only) == 1 and not only[0].attended:
            only[0].sleep()
        elif only:
            time.sleep(_NAP)
