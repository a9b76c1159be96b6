"""A stream of bytes from one process to another, in memory that both have mapped.

    | bytes written | bytes read | writer waits | reader waits |  ring of data: byte k of the stream at k mod CAPACITY

Writer and reader copy in pieces and update their number after each, so that both work on a long message at once. Each
word has one writer. There is a `fence` (shared_memory.py) between data and the number that announces it, and between
the number and the check whether the other end waits. An end that goes to sleep announces it first, and then checks once
more, so that no wake-up is lost.
"""

from __future__ import annotations

import mmap

import torch

from minipar.comm.transport import shared_memory
from minipar.comm.transport.shared_memory import fence

CAPACITY = 4 << 20
SIZE = CAPACITY + 4096
_PIECE = 1 << 18
_LINE = 16  # words of 8 bytes between two numbers: no two on one line of a cache
_WRITTEN, _READ, _WRITER_WAITS, _READER_WAITS = 0, _LINE, 2 * _LINE, 3 * _LINE


class Stream:
    """One end of a stream: the writer's, or the reader's."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._map = memory
        self._words = memoryview(memory)[:4096].cast("Q")
        self._data = memoryview(memory)[4096:SIZE]
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._own = 0  # bytes that this end has written, or read
        self._other = 0  # the other end's number, when it was last read

    def write(self, data: memoryview) -> int:
        """Write as much as there is room for; returns how many bytes."""
        done, size = 0, len(data)
        while done < size:
            room = CAPACITY + self._other - self._own
            if not room:
                self._other = self._words[_READ]
                fence()
                room = CAPACITY + self._other - self._own
                if not room:
                    break
            place = self._own % CAPACITY
            count = min(room, size - done, CAPACITY - place, _PIECE)
            self._data[place : place + count] = data[done : done + count]
            done += count
            self._tell(_WRITTEN, count, _READER_WAITS)
        return done

    def read(self, into: memoryview) -> int:
        """Read the bytes that have arrived, up to the length of `into`; returns their number."""
        done, size = 0, len(into)
        while done < size:
            there = self._other - self._own
            if not there:
                self._other = self._words[_WRITTEN]
                fence()
                there = self._other - self._own
                if not there:
                    break
            place = self._own % CAPACITY
            count = min(there, size - done, CAPACITY - place, _PIECE)
            into[done : done + count] = self._data[place : place + count]
            done += count
            self._tell(_READ, count, _WRITER_WAITS)
        return done

    def _tell(self, which: int, count: int, waits: int) -> None:
        fence()
        self._own += count
        self._words[which] = self._own
        fence()
        if self._words[waits]:
            shared_memory.wake(self._address + 8 * which)

    def wait_to_write(self) -> None:
        """Sleep until there is room, or for half a millisecond, since two threads of the writer may wait here."""
        self._wait(_READ, CAPACITY, _WRITER_WAITS, True)

    def wait_to_read(self) -> None:
        """Sleep until there is something to read, or for 50 ms."""
        self._wait(_WRITTEN, 0, _READER_WAITS, False)

    def _wait(self, which: int, ahead: int, waits: int, short: bool) -> None:
        words = self._words
        words[waits] = 1
        fence()
        value = words[which]
        if abs(self._own - value) == ahead:
            shared_memory.wait(self._address + 8 * which, value & 0xFFFFFFFF, short)
        words[waits] = 0
