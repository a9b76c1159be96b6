"""The shared memory in which the ranks of a group, all on one machine, exchange the pieces of a collective.

    | a counter for each rank | slots: 4 buffers of a piece for each rank |

A collective (shared.py) is a generator of steps: it yields the ranks that it has to wait for, then copies or adds a
piece, then posts. `post` makes this rank's counter one larger. All ranks of a group run the same collectives in the
same order, and each posts as often in them as the others. So "rank 2 has posted 17 times" says exactly what rank 2 has
done, and a rank waits until some counters have reached a number. Every counter has one writer; other ranks can sleep
until it changes.

A collective may begin before it is known that all ranks have called the same one: its first piece is written and
posted, and then announced (`Exchange.begin`). If they have not, `Arena.realign` makes all counts equal again.

There is a `fence` before each post: what was written to a slot can be seen before the number that says so, and all
reads are done. There is another one after each wait: nothing of a slot is read before the number. No wake-up can be
lost: the futex call of Linux compares the word and goes to sleep in one step.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minipar.comm.transport import shared_memory
from minipar.comm.transport.shared_memory import fence
from minipar.errors import RankError

_LINE = 128  # bytes between two counters: no two on one line of a cache
_PAGE = 4096
_BUFFERS = 4
_LARGEST, _TOTAL = 1 << 20, 64 << 20  # bytes of a slot, and of all slots of a group (at most, about)
_ALIGNMENT = 64
_LOOKS = 4  # before it sleeps: what comes at once need not wake it
_SLICE = 0.05  # seconds of a wait for a lock: an interrupt can come this late
_LOOK_AFTER = 0.04  # seconds of sleep after which the rank checks whether a member is gone

Need = tuple[Sequence[int], int]  # members, and the number that their counters must have reached
Steps = Generator[Need, None, None]


def slot_size(count: int) -> int:
    """Bytes of one slot in a group of so many."""
    return max(_PAGE, min(_LARGEST, _TOTAL // (_BUFFERS * count) // _PAGE * _PAGE))


def size(count: int) -> int:
    """Bytes of the arena of a group of so many."""
    return -(-count * _LINE // _PAGE) * _PAGE + _BUFFERS * count * slot_size(count)


@dataclass(eq=False)
class Arena:
    """The arena of one group in one of its ranks, which is member `index`. `gone(k)` gives the rank of member k if its
    process has ended, or None."""

    memory: mmap.mmap
    count: int
    index: int
    gone: Callable[[int], int | None]
    posted: int = 0
    attended: int = 0  # how many threads wait for an exchange here; they run its steps
    lock: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that runs steps
    _free: list[int] = field(default_factory=lambda: [0] * _BUFFERS)  # the post after which nobody reads a buffer
    _next: int = 0
    _views: dict[tuple[int, torch.dtype], list[list[Tensor]]] = field(default_factory=dict)
    _waiting: deque[Exchange] = field(default_factory=deque)

    def __post_init__(self) -> None:
        count = self.count
        self.slot = slot_size(count)
        self.everyone = tuple(range(count))
        self.others = tuple(k for k in range(count) if k != self.index)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._words = memoryview(self.memory)[: count * _LINE].cast("Q")
        self._first = self._bytes.numel() - _BUFFERS * count * self.slot

    # what a collective does ------------------------------------------------------------------------------------------

    def slots(self, numel: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """[buffer][member]: the first so many elements of each slot."""
        found = self._views.get((numel, dtype))
        if found is None:
            if len(self._views) > 64:
                self._views.clear()
            found = self._views[numel, dtype] = [
                [self._slot(buffer, k)[: numel * dtype.itemsize].view(dtype) for k in self.everyone]
                for buffer in range(_BUFFERS)
            ]
        return found

    def _slot(self, buffer: int, k: int) -> Tensor:
        start = self._first + (_BUFFERS * k + buffer) * self.slot
        return self._bytes[start : start + self.slot]

    def fits(self, dtype: torch.dtype, parts: int = 1) -> int:
        """How many elements fit in each of `parts` aligned parts of a slot."""
        return self.slot // parts // _ALIGNMENT * _ALIGNMENT // dtype.itemsize

    def take(self) -> tuple[int, Need]:
        """The next buffer, and what a rank must wait for before it writes to it."""
        buffer = self._next
        self._next = (buffer + 1) % _BUFFERS
        return buffer, (self.others, self._free[buffer])

    def free(self, buffer: int) -> None:
        """Post that this rank has read all that it needs of a buffer; the others do it in the same step."""
        self._free[buffer] = self.post()

    def post(self) -> int:
        """Say that one more step is done; returns its number."""
        fence()
        self.posted += 1
        self._words[self.index * _LINE // 8] = self.posted
        shared_memory.wake(self._address + self.index * _LINE)
        return self.posted

    # who runs them ---------------------------------------------------------------------------------------------------

    def line_up(self, exchange: Exchange) -> None:
        """Queue a collective: from now on `run` does its steps, after those of the collectives before it."""
        self._waiting.append(exchange)

    def realign(self, begun: int) -> None:
        """After a mismatch in a collective, in which this rank has posted `begun` times: post until it is two times, as
        all ranks do."""

        def steps() -> Steps:
            for _ in range(begun, 2):
                self.post()
            self._free, self._next = [self.posted] * _BUFFERS, 0
            yield from ()

        self.line_up(Exchange(self, steps()))
        self.run()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._waiting

    def run(self, blocking: bool = False) -> None:
        """Do all steps that can be done now. If another thread is doing that: wait for it (`blocking`, in slices), or
        return at once."""
        if not self._waiting or not self.lock.acquire(blocking, _SLICE if blocking else -1):
            return
        done: list[Exchange] = []
        try:
            while self._waiting:
                exchange = self._waiting[0]
                if not exchange.advance():
                    break
                exchange.done = True  # before it leaves the queue: `sleep` reads the queue first, then `done`
                self._waiting.popleft()
                done.append(exchange)
        finally:
            self.lock.release()
        for exchange in done:
            exchange.finish()

    def lagging(self, need: Need) -> tuple[int, int] | None:
        """A member that has posted less often than needed, and its count; None if there is none."""
        words, (members, number) = self._words, need
        for k in members:
            value = words[k * _LINE // 8]
            if value < number:
                return k, value
        fence()
        return None

    def sleep(self, until: Exchange | None = None) -> None:
        """Sleep until a member for which the first exchange waits has posted, or for 50 ms (without `until`: 0.5 ms).
        Returns at once if `until` is done. ConnectionError when a member is gone."""
        exchange = self._waiting[0] if self._waiting else None
        if exchange is None or (until is not None and until.done):
            return
        behind = self.lagging(exchange.need)
        if behind is None:
            return
        member, value = behind
        began = time.monotonic()
        shared_memory.wait(self._address + member * _LINE, value & 0xFFFFFFFF, until is None)
        if until is None or time.monotonic() - began < _LOOK_AFTER:
            return
        members, number = exchange.need
        for k in members:  # (one that has done its part may end while another one is late)
            ended = self.gone(k)
            if ended is not None and self.lagging(((k,), number)) is not None:
                raise ConnectionError(f"rank {ended} is gone")


@dataclass(eq=False)
class Exchange:
    """One collective in an arena, under way."""

    arena: Arena
    steps: Iterator[Need]
    need: Need = ((), 0)
    error: BaseException | None = None
    done: bool = False
    begun: int = 0  # posts done by `begin`, two at most
    _calls: list[Callable[[], None]] = field(default_factory=list)
    _finished: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Do the first step at once, if nothing is under way and it need not wait for anyone."""
        arena = self.arena
        if not arena.idle:
            return
        with arena.lock, torch.no_grad():
            before = arena.posted
            need = next(self.steps, None)
            if need is not None and arena.posted == before and arena.lagging(need) is None:
                need = next(self.steps, None)
            if need is None:  # that was all
                need, self.steps = ((), 0), iter(())
            self.need, self.begun = need, arena.posted - before

    def advance(self) -> bool:
        """Do all steps that can be done now; returns whether it is complete. Called under the arena's lock."""
        arena = self.arena
        try:
            with torch.no_grad():
                while self.error is None and arena.lagging(self.need) is None:
                    try:
                        self.need = next(self.steps)
                    except StopIteration:
                        return True
                    except Exception as error:
                        self.error = error
        except BaseException:  # an interrupt, in the middle of a step
            self.error = RankError("this collective was interrupted; what it has left in its tensor is of no use")
            raise
        return self.error is not None

    def finish(self) -> None:
        """It is complete: run the calls of `when_done`."""
        with self._lock:
            self._finished = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def wait(self) -> None:
        """Return when it is complete. ConnectionError when a member is gone."""
        looks, arena = 0, self.arena
        arena.attended += 1
        try:
            while not self.done:
                arena.run(blocking=True)
                looks += 1
                if not self.done and looks > _LOOKS:
                    arena.sleep(self)
        finally:
            arena.attended -= 1
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Whether it is complete, without blocking."""
        if not self.done:
            self.arena.run()
        return self.done

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` when it is complete, from the thread that completes it."""
        with self._lock:
            if not self._finished:
                self._calls.append(call)
                return
        call()
