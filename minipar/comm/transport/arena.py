"""The shared memory in which the ranks of a group, all on one machine, exchange the pieces of a collective.

    | of each rank: a counter, two announcements | slots: 4 buffers of a piece for each rank |

A collective (shared.py) is a generator of steps: it yields what it has to wait for, then copies or adds a piece, then
posts. `post` makes this rank's counter one larger. All ranks of a group run the same collectives in the same order, and
each posts as often in them as the others. So "rank 2 has posted 17 times" says exactly what rank 2 has done, and a rank
waits until some counters have reached a number. Every counter has one writer; other ranks can sleep until it changes.

With the first post of a collective, its announcement (calls.py) is there, too. Each rank reads all of them before it
goes on: if they differ, all ranks have posted once, and the next collective begins. An announcement is written over in
the second collective after it, which begins when all have posted in the one between, and so have read it.

There is a `fence` before each post: what was written to a slot can be seen before the number that says so, and all
reads are done. There is another one after each wait: nothing of a slot is read before the number. No wake-up can be
lost: the futex call of Linux compares the word and goes to sleep in one step.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from minipar.comm.transport import calls, shared_memory
from minipar.comm.transport.calls import Steps
from minipar.comm.transport.shared_memory import fence

_FIRST = 128  # bytes before the announcements of a rank: no two counters are on one line of a cache
_LINE = _FIRST + 2 * calls.LENGTH
_PAGE = 4096
_BUFFERS = 4
_LARGEST, _TOTAL = 1 << 20, 64 << 20  # bytes of a slot, and of all slots of a group (at most, about)
_ALIGNMENT = 64
_LOOK_AFTER = 0.04  # seconds of sleep after which the rank checks whether a member is gone


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
    members: tuple[int, ...]
    index: int
    gone: Callable[[int], int | None]
    posted: int = 0
    announced: int = 0  # collectives
    _compared: int = 0  # the same, of which all announcements were read
    _free: list[int] = field(default_factory=lambda: [0] * _BUFFERS)  # the post after which nobody reads a buffer
    _next: int = 0
    _views: dict[tuple[int, torch.dtype], list[list[Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count = count = len(self.members)
        self.slot = slot_size(count)
        self.everyone = tuple(range(count))
        self.others = tuple(k for k in range(count) if k != self.index)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._words = memoryview(self.memory)[: count * _LINE].cast("Q")
        self._first = self._bytes.numel() - _BUFFERS * count * self.slot

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

    def announce(self, call: bytes) -> None:
        """Begin a collective; with its first post all can read what it is."""
        self.announced += 1
        start = self.index * _LINE + _FIRST + self.announced % 2 * calls.LENGTH
        self.memory[start : start + calls.LENGTH] = call

    def compare(self) -> Steps:
        """After the first post of a collective, wait for that of all others. CollectiveMismatch, on every rank, if they
        have called different ones."""
        if self._compared == self.announced:
            return
        yield Posts(self, self.others, self.posted)
        self._compared = self.announced
        starts = [k * _LINE + _FIRST + self.announced % 2 * calls.LENGTH for k in self.everyone]
        free, following = self._free, self._next
        self._free, self._next = [self.posted] * _BUFFERS, 0  # (what all agree on, should they differ)
        calls.compare(self.members, [self.memory[start : start + calls.LENGTH] for start in starts])
        self._free, self._next = free, following

    def take(self) -> tuple[int, Posts]:
        """The next buffer, and what a rank must wait for before it writes to it."""
        buffer = self._next
        self._next = (buffer + 1) % _BUFFERS
        return buffer, Posts(self, self.others, self._free[buffer])

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

    def lagging(self, members: Sequence[int], number: int) -> tuple[int, int] | None:
        """One of these members that has posted less often than so many times, and its count; None if there is none."""
        words = self._words
        for k in members:
            value = words[k * _LINE // 8]
            if value < number:
                return k, value
        fence()
        return None


class Posts(NamedTuple):
    """Wait until these members of an arena have posted so many times."""

    arena: Arena
    members: Sequence[int]
    number: int

    def met(self) -> bool:
        return self.arena.lagging(self.members, self.number) is None

    def sleep(self, short: bool) -> None:
        """Sleep until one that is behind has posted. ConnectionError when one is gone (not if `short`)."""
        arena = self.arena
        behind = arena.lagging(self.members, self.number)
        if behind is None:
            return
        member, value = behind
        began = time.monotonic()
        shared_memory.wait(arena._address + member * _LINE, value & 0xFFFFFFFF, short)
        if short or time.monotonic() - began < _LOOK_AFTER:
            return
        for k in self.members:  # (one that has done its part may end while another one is late)
            ended = arena.gone(k)
            if ended is not None and arena.lagging((k,), self.number) is not None:
                raise ConnectionError(f"rank {ended} is gone")
